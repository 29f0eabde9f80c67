"""The answers of a node to other peers: its calls and streams, by name of the method.

What is wrong with a message ends that call and nothing else.
"""

import asyncio
import math
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from murmuration.protos.events import Warnings
from murmuration.protos.figures import MAX_REASON, shown
from murmuration.worker import transport, wire
from murmuration.worker.identity.gate import Gate
from murmuration.worker.transport import Caller, Method, Refused, Stream

STREAMS_EACH = 32  # of one caller at once: it may have two connections for a while
_STREAMS_SHARE = 8  # of one caller, whatever others have
FETCHES_EACH = 4  # each keeps the states of its beginning in memory
_STREAMS_PER_PEER = 16  # of all callers together, for each peer of the swarm
_FEWEST_PEERS = 8  # that there is room for in any case
# Streams of relaying, which last. A dial takes two, one of each of the peers that it joins.
_TUNNELS_SHARE, TUNNELS_EACH, MOST_TUNNELS = 4, 64, 160
_HEADER_S = 10.0
_SEND_S = 120.0  # for a message of at most 4 MiB, on a link that 16 streams share


class NodeServer:
    """The node's `Handler`. io thread only. Args: refused: called with what is counted: "call" or
    "busy"; warnings: take our own defects. Attributes: calls, calls_by: what answers, by the
    message alone or by the caller too; streams: what serves; peers: how many there are in the
    swarm, about: streams are limited by it."""

    def __init__(self, gate: Gate, refused: Callable[[str], None], warnings: Warnings) -> None:
        self._gate, self._refused, self._warnings = gate, refused, warnings
        self.admit = gate.admit
        most = lambda: most_streams(self.peers())  # noqa: E731
        self._places = transport.Places("streams", _STREAMS_SHARE, STREAMS_EACH, most)
        self._tunnels = transport.Places(
            "tunnels", _TUNNELS_SHARE, TUNNELS_EACH, lambda: MOST_TUNNELS
        )
        self._fetches = transport.Places("streams of states", FETCHES_EACH, FETCHES_EACH, most)
        self.peers: Callable[[], int] = lambda: 0
        self.calls: dict[str, Callable[[bytes], Awaitable[bytes]]] = {}
        self.calls_by: dict[str, Callable[[bytes, Caller], Awaitable[bytes]]] = {
            Method.ENROL: gate.enrol
        }
        self.streams: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self._open: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)  # by caller

    async def on_call(
        self, method: str, request: bytes, caller: Caller = transport.NOBODY
    ) -> bytes:
        with self._ending_the_call(method):
            self._gate.check(method, request, caller)
            if (answer := self.calls.get(method)) is not None:
                return await answer(request)
            if (answer_to := self.calls_by.get(method)) is not None:
                return await answer_to(request, caller)
        raise Refused(f"no method {method}")

    async def on_stream(
        self, method: str, stream: Stream, caller: Caller = transport.NOBODY
    ) -> None:
        """Serves one data stream. Raises Refused."""
        with suppress(transport.Unreachable, TimeoutError), self._ending_the_call(method):
            if (serve := self.streams.get(method)) is not None:
                self.admit(method, caller)
                places = self._fetches if method == Method.FETCH else self._places
                places = self._tunnels if method in transport.RELAY_METHODS else places
                check = lambda message: self._gate.check(method, message, caller)  # noqa: E731
                with places.taken(caller):
                    async with self._until_expelled(caller):
                        await serve(_Served(method, stream, check))

    def end_streams_of(self, peer: str) -> None:
        for limit in self._open.get(peer, ()):
            limit.reschedule(-math.inf)

    @asynccontextmanager
    async def _until_expelled(self, caller: Caller) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as limit:
            self._open[caller.name].add(limit)
            try:
                yield
            finally:
                self._open[caller.name].discard(limit)
                if not self._open[caller.name]:
                    del self._open[caller.name]

    @contextmanager
    def _ending_the_call(self, method: str) -> Iterator[None]:
        """Raises Refused for what a peer cannot send, and for defects, which are told of."""
        try:
            yield
        except wire.WireError as error:
            self._refused("call")
            raise Refused(shown(str(error), MAX_REASON)) from error
        except transport.Busy as error:
            self._refused("busy")
            self._warnings.add(f"refused: {shown(str(error), MAX_REASON)}")
            raise
        except (transport.TransportError, TimeoutError):
            raise
        except Exception as error:
            self.on_defect(method, error)
            raise Refused(f"{method} cannot be answered") from error

    def on_defect(self, where: str, error: Exception) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{where}: {type(error).__name__} in {at.name}, line {at.lineno}"
        self._warnings.add(text, shown(str(error), MAX_REASON))


class _Served:
    """A served stream whose first message comes soon, and is checked, and that is read in time."""

    def __init__(self, method: str, stream: Stream, check: Callable[[bytes], None]) -> None:
        self._method, self._stream, self._check, self._begun = method, stream, check, False
        self.done, self.cancel = stream.done, stream.cancel

    async def receive(self) -> bytes | None:
        if self._begun:
            return await self._stream.receive()
        try:
            async with asyncio.timeout(_HEADER_S):
                message = await self._stream.receive()
        except TimeoutError:
            raise Refused(f"{self._method}: no header in {_HEADER_S:g} s") from None
        self._begun = True
        if message is not None:
            self._check(message)
        return message

    async def send(self, message: bytes) -> None:
        try:
            async with asyncio.timeout(_SEND_S):
                await self._stream.send(message)
        except TimeoutError:
            raise Refused(f"{self._method}: nothing was read for {_SEND_S:g} s") from None


def most_streams(peers: int) -> int:
    return _STREAMS_PER_PEER * max(_FEWEST_PEERS, peers)
