"""The transport inside one process, for tests: same interface, same bytes, same counting.

Every message crosses as bytes, so serialisation is exercised. The network can delay messages and
cut links; on the virtual clock of the tests a delay takes no real time. A tap sees what passes over
streams, and can damage it, cut links or slow them.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Container, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, TypeVar

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import split_relayed
from murmuration.worker.transport import (
    MAX_CONTROL_BYTES,
    MAX_DATA_BYTES,
    AddressInUse,
    Caller,
    Handler,
    Refused,
    Stream,
    Traffic,
    TransportError,
    Unreachable,
)

T = TypeVar("T")
_Messages = deque[bytes | None]
_WINDOW_MESSAGES = 4


@dataclass(frozen=True)
class Passing:
    """A message of a stream that `source` opened to `target`; `up`: from source to target."""

    source: str
    target: str
    method: str
    up: bool
    message: bytes

    @property
    def exchanged(self) -> Any:
        """The message, of an exchange."""
        return (pb.ExchangeUp if self.up else pb.ExchangeDown).FromString(self.message)

    @property
    def body(self) -> str | None:
        """The field of an Exchange message: header, frame, resume, redirect or refusal."""
        return self.exchanged.WhichOneof("body") if self.method == "Data/Exchange" else None


Tap = Callable[[Passing], bytes]


class MemoryNetwork:
    """Peers by address, and the state of the links between them.

    Attributes:
        refuse_dials: relays that lead to nobody any more, though they keep their reservations.
        loss: the share of calls that are lost, or their answers, as `rng` draws them."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self._served: dict[str, tuple[MemoryTransport, Handler]] = {}
        self._cuts: set[frozenset[str]] = set()
        self._closed: dict[str, bool] = {}
        self.refuse_dials: set[str] = set()
        self.loss, self.rng = 0.0, Random(0)
        self._streams: dict[_Pipe, None] = {}  # in order, so that every run of a test is the same

    def cut(self, a: str, b: str) -> None:
        """Breaks the link: streams between the two end now, calls and new streams fail."""
        self._cuts.add(frozenset((a, b)))
        for pipe in [pipe for pipe in self._streams if frozenset((a, b)) in pipe.hops]:
            pipe.sever()

    def heal(self, a: str, b: str) -> None:
        self._cuts.discard(frozenset((a, b)))

    def close_port(self, address: str, *, silent: bool = False) -> None:
        """As a firewall does: nobody reaches the peer any more, which itself reaches everybody.

        Args: silent: what is sent there is lost, instead of refused at once."""
        self._closed[address] = silent
        for pipe in [pipe for pipe in self._streams if pipe.server == address]:
            pipe.sever()

    def open_port(self, address: str) -> None:
        self._closed.pop(address, None)

    def loses(self, source: str, target: str) -> bool:
        """Tells whether what is sent there is lost without a word."""
        return source != target and self._closed.get(target, False)

    def drops(self) -> bool:
        """Tells whether the next request or answer is lost."""
        return self.loss > 0 and self.rng.random() < self.loss

    def way(self, source: str, target: str) -> list[str]:
        """The peers that a message passes. Through a relay that reaches the target, of a relayed
        address; what the relay itself does is not done here."""
        if (through := split_relayed(target)) is None:
            return [source, target]
        peer, relays = through
        for relay in relays:
            held = any(
                pipe.method == "Relay/Reserve" and pipe.ends == frozenset((peer, relay))
                for pipe in self._streams
            )
            up = not self._closed.keys() & {relay} and frozenset((source, relay)) not in self._cuts
            if held and up and relay in self._served and relay not in self.refuse_dials:
                return [source, *([relay] if relay != source else []), peer]
        raise Unreachable(f"{target}: no relay reaches it")

    def reach(self, source: str, target: str) -> tuple["MemoryTransport", Handler]:
        """Raises Unreachable when nobody serves `target` or the link is cut."""
        if split_relayed(target) is not None:
            return self._served[self.way(source, target)[-1]]
        if frozenset((source, target)) in self._cuts:
            raise Unreachable(f"{target}: the link from {source} is cut")
        if target in self._closed and source != target:
            raise Unreachable(f"{target}: the port is closed")
        if target not in self._served:
            raise Unreachable(f"{target}: nobody listens there")
        return self._served[target]


class MemoryTransport:
    """One peer on a MemoryNetwork. Args: context: in which its handlers run, so that a peer that is
    frozen does not answer; tap: the one that streams pass now; lag_s: of a message of so many bytes
    from one address to another."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        context: contextvars.Context | None = None,
        tap: Callable[[], Tap | None] = lambda: None,
        lag_s: Callable[[str, str, int], float] = lambda *_: 0.0,
    ) -> None:
        self._network, self._address = network, address
        self._context, self.tap, self.lag_s = context, tap, lag_s
        self.caller = Caller(address)  # as which it calls others
        self.tunnel: Callable[[str], str | None] = lambda address: None
        self._traffic = Traffic()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.open_to: set[str] = set()  # addresses that a real one would have connections to

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    @property
    def encrypted(self) -> bool:
        return False

    async def listen(self, handler: Handler) -> str:
        if self._address in self._network._served:
            raise AddressInUse(f"cannot listen on {self._address}: the address is taken")
        handler = handler if self._context is None else _Serving(handler, self._context)
        self._network._served[self._address] = (self, handler)
        return self._address

    async def call(
        self, address: str, method: str, request: bytes, timeout_s: float, peer: str | None = None
    ) -> bytes:
        if len(request) > MAX_CONTROL_BYTES:
            raise Unreachable(f"{address}: {method} takes at most {MAX_CONTROL_BYTES} bytes")
        self._traffic.count_sent(method, len(request))
        self.open_to.add(address)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self._network.delay_s)
                if self._network.loses(self._address, address) or self._network.drops():
                    await asyncio.Event().wait()
                other, handler = self._network.reach(self._address, address)
                other.traffic.count_received(method, len(request))
                answer = await handler.on_call(method, request, self.caller)
                other.traffic.count_sent(method, len(answer))
                await asyncio.sleep(self._network.delay_s)
                self._network.reach(self._address, address)
                if self._network.drops():
                    await asyncio.Event().wait()
        except TimeoutError as error:
            raise Unreachable(f"{address}: no answer in {timeout_s:g} s") from error
        self._traffic.count_received(method, len(answer))
        return answer

    def open(self, address: str, method: str, peer: str | None = None) -> Stream:
        try:
            way = self._network.way(self._address, address)
        except Unreachable:
            way = [self._address, address]
        pipe = _Pipe(self._network, way, method, address)
        near = _NearEnd(pipe, self, (self._address, address))
        if self._network.loses(self._address, address):
            return near
        try:
            other, handler = self._network.reach(self._address, address)
        except Unreachable:
            pipe.sever()
            return near
        far = _ServedEnd(pipe, pipe.down, pipe.up, other.traffic)
        other._spawn(_serve(handler, method, far, self.caller))
        self._network._streams[pipe] = None
        return near

    def connect(self, address: str, peer: str | None = None) -> None:
        """Streams in memory need no connection."""

    def drop(self, address: str) -> None:
        """There are no connections to close."""

    def close_unneeded(self, needed: Container[str]) -> set[str]:
        self.open_to = {address for address in self.open_to if address in needed}
        return self.open_to

    def renew(self, security: object) -> None:
        """Nothing is encrypted in memory."""

    async def close(self) -> None:
        self._network._served.pop(self._address, None)
        for pipe in [p for p in self._network._streams if any(self._address in h for h in p.hops)]:
            pipe.sever()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))


async def _serve(handler: Handler, method: str, stream: "_ServedEnd", caller: Caller) -> None:
    try:
        await handler.on_stream(method, stream, caller)
        await stream.returned()
    except Refused:
        stream.cancel()
    except TransportError:
        return


class _Pipe:
    """Both directions of one stream to `server`. Args: way: as `MemoryNetwork.way`."""

    def __init__(self, network: MemoryNetwork, way: list[str], method: str, server: str) -> None:
        self.network, self.method, self.server = network, method, server
        self.ends = frozenset((way[0], way[-1]))
        self.hops = [frozenset(hop) for hop in pairwise(way)]
        self.up, self.down = _Messages(), _Messages()
        self._severed = self.ended = False
        self._waits: list[asyncio.Future[None]] = []

    def sever(self) -> None:
        self._severed = True
        self.network._streams.pop(self, None)
        self.wake()

    def wake(self) -> None:
        """Lets everyone that waits at the pipe look again."""
        for waits in self._waits:
            if not waits.done():
                waits.set_result(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for that. Raises Unreachable as soon as the stream is cut."""
        while not (self._severed or holds()):
            waits = asyncio.get_running_loop().create_future()
            self._waits.append(waits)
            try:
                await waits
            finally:
                self._waits.remove(waits)
        if self._severed:
            raise Unreachable(f"the stream between {' and '.join(sorted(self.ends))} broke")


class _PipeEnd:
    def __init__(self, pipe: _Pipe, out: _Messages, into: _Messages, traffic: Traffic) -> None:
        self._pipe, self._out, self._into, self._traffic = pipe, out, into, traffic
        self._ended = False

    async def send(self, message: bytes) -> None:
        if len(message) > MAX_DATA_BYTES:
            raise Unreachable(f"a message of {len(message)} bytes is over {MAX_DATA_BYTES}")
        await self._put(message)
        self._traffic.count_sent(self._pipe.method, len(message))

    async def done(self) -> None:
        with suppress(Unreachable):
            await self._put(None)

    async def receive(self) -> bytes | None:
        if self._ended:
            return None
        await self._pipe.until(lambda: bool(self._into))
        message = self._into.popleft()
        self._pipe.wake()
        if message is None:
            self._ended = True
        else:
            self._traffic.count_received(self._pipe.method, len(message))
        return message

    def cancel(self) -> None:
        self._pipe.sever()

    async def _put(self, message: bytes | None) -> None:
        arrived = False

        def arrive() -> None:
            nonlocal arrived
            arrived = True
            pipe.wake()

        pipe = self._pipe
        timer = asyncio.get_running_loop().call_later(pipe.network.delay_s, arrive)
        try:
            await pipe.until(lambda: pipe.ended or (arrived and len(self._out) < _WINDOW_MESSAGES))
        finally:
            timer.cancel()
        if pipe.ended:
            raise Unreachable("the stream has ended")
        self._out.append(message)
        pipe.wake()


class _NearEnd(_PipeEnd):
    """The end of the peer that has opened the stream: what passes is late, and seen by the tap."""

    def __init__(self, pipe: _Pipe, transport: MemoryTransport, way: tuple[str, str]) -> None:
        super().__init__(pipe, pipe.up, pipe.down, transport.traffic)
        self._transport, self._way = transport, way

    async def send(self, message: bytes) -> None:
        await super().send(await self._passes(True, message))

    async def receive(self) -> bytes | None:
        message = await super().receive()
        return None if message is None else await self._passes(False, message)

    async def _passes(self, up: bool, message: bytes) -> bytes:
        way = self._way if up else self._way[::-1]
        if lag_s := self._transport.lag_s(*way, len(message)):
            await asyncio.sleep(lag_s)
        tap = self._transport.tap()
        passing = Passing(*self._way, self._pipe.method, up, message)
        return message if tap is None else tap(passing)


class _Serving:
    """Runs a handler in the peer's own context, so that a frozen peer does not answer."""

    def __init__(self, handler: Handler, context: contextvars.Context) -> None:
        self._handler, self._context = handler, context

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return await self._in_own_context(self._handler.on_call(method, request, caller))

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        await self._in_own_context(self._handler.on_stream(method, stream, caller))

    async def _in_own_context(self, work: Coroutine[None, None, T]) -> T:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, context=self._context.copy())
        try:
            return await asyncio.shield(task)  # who gives up does not wait for a frozen peer
        except asyncio.CancelledError:
            task.cancel()
            raise


class _ServedEnd(_PipeEnd):
    """As over gRPC, the stream ends when its handler returns, and not earlier."""

    async def done(self) -> None:
        """Nothing to do."""

    async def returned(self) -> None:
        await super().done()
        self._pipe.ended = True
        self._pipe.wake()
