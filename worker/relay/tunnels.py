"""The two ends of what a relay carries: at the dialling end gRPC connects to a port of loopback;
what comes in there goes to the relay, and at the other end into the server's own port. So TLS, and
all above it, is as on a direct connection."""

import asyncio
import math
import socket
from collections.abc import Callable, Container, Coroutine
from contextlib import suppress
from typing import Any

from murmuration.protos import addresses, murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.background import Tasks, cancel
from murmuration.worker.transport import Method, Stream, Transport, TransportError, Unreachable

_CHUNK_BYTES = 128 * 1024
_OPEN_S = 2.0  # for a relay to answer: then the next one is tried
_FIRST_S = 5.0  # for the first answer to what is sent: TLS gives one at once
_STALLED_S = 10.0  # without an answer, when a tunnel ends: gRPC gives its own ping up by then
_AT_ONCE_S = 1.0  # what follows an answer so soon may be an acknowledgement, which has none
_AVOID_S = 10.0  # that a relay is tried last that has failed
_MOST_RELAYS = 4  # of one peer, that are tried
_MOST_PORTS = 512  # and relays that are remembered: what peers say of themselves fills no memory


def message(**body: object) -> bytes:
    return pb.RelayMessage(**body).SerializeToString()  # type: ignore[arg-type]  # one of its own


async def received(stream: Stream, within_s: float) -> pb.RelayMessage:
    """The next message. Raises Unreachable: none in time, or the stream has ended; WireError."""
    try:
        async with asyncio.timeout(within_s):
            raw = await stream.receive()
    except TimeoutError:
        raise Unreachable(f"no answer in {within_s:g} s") from None
    if raw is None:
        raise Unreachable("the stream has ended")
    return wire.parse(pb.RelayMessage, raw)


async def first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Runs all until one ends, and cancels the others. Raises what that one raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(tasks)


async def pump(stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carries bytes both ways until one side ends; then ends both."""

    async def out() -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await stream.send(message(payload=chunk))

    async def into() -> None:
        while (raw := await stream.receive()) is not None:
            writer.write(wire.parse(pb.RelayMessage, raw).payload)
            await writer.drain()

    try:
        with suppress(TransportError, wire.WireError, OSError):
            await first_of(out(), into())
    finally:
        stream.cancel()
        await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


class _Answered:
    """A stream through a relay, on which something comes back of what is sent: TLS, and then gRPC's
    pings, see to that. So a relay that opens tunnels and drops what is in them is found out."""

    def __init__(self, stream: Stream, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self.done, self.cancel = stream.done, stream.cancel
        self.answered, self._answered_at = asyncio.Event(), -math.inf
        self._sent_at: float | None = None  # the first since then that is to be answered

    async def send(self, message: bytes) -> None:
        now = self._clock()
        if self._sent_at is None and now > self._answered_at + _AT_ONCE_S:
            self._sent_at = now
        await self._stream.send(message)

    async def receive(self) -> bytes | None:
        if (raw := await self._stream.receive()) is not None:
            self._sent_at, self._answered_at = None, self._clock()
            self.answered.set()
        return raw

    @property
    def unanswered(self) -> bool:
        """Tells whether nothing has come back of what was sent last, for long, or of anything."""
        if self._sent_at is None:
            return False
        return not self.answered.is_set() or self._clock() - self._sent_at >= _STALLED_S


def own_port(bound: str) -> tuple[str, int]:
    """Where this machine reaches its own server, which is bound to HOST:PORT."""
    host, port = addresses.split_address(bound)
    return (addresses.LOOPBACK_HOST if addresses.is_wildcard(host) else host), port


class Tunnels:
    """The dialling end: a port of loopback for each peer behind relays. io thread only."""

    def __init__(self, transport: Transport, me: str, clock: Callable[[], float]) -> None:
        self._transport, self._me, self._clock = transport, me, clock
        # By address, those first that nobody uses.
        self._ports: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._tasks = Tasks()
        self.close = self._tasks.close
        self._failed_at: dict[str, float] = {}  # by relay
        # The address that this peer advertises, and the one that it is bound to: where it is itself
        # the relay it need not be able to dial the former.
        self.own = ("", "")
        self.problems: dict[str, str] = {}  # by relay, why it has led nowhere the last time

    def port(self, address: str) -> str | None:
        """HOST:PORT of loopback that leads to the peer; None where it is dialled directly."""
        through = addresses.split_relayed(address)
        if through is None:
            return None
        if address not in self._ports:
            if len(self._ports) >= _MOST_PORTS:
                self._ports.pop(next(iter(self._ports)))[1].cancel()
            try:
                listening = socket.create_server((addresses.LOOPBACK_HOST, 0), backlog=16)
            except OSError:  # too many files are open: nobody is reached there, and it is told so
                return None
            port = f"{addresses.LOOPBACK_HOST}:{listening.getsockname()[1]}"
            serving = self._listen(listening, through[0], through[1][:_MOST_RELAYS])
            task = self._tasks.spawn(serving)
            task.add_done_callback(lambda _: listening.close())  # though it has never begun
            self._ports[address] = port, task
        self._ports[address] = self._ports.pop(address)  # those in use go last
        return self._ports[address][0]

    def close_unneeded(self, needed: Container[str]) -> None:
        """Closes the ports that lead to other addresses than these; open tunnels go on."""
        for address in [each for each in self._ports if each not in needed]:
            self._ports.pop(address)[1].cancel()

    async def _listen(self, listening: socket.socket, peer: str, relays: tuple[str, ...]) -> None:
        """Until cancelled; tunnels that are open then go on."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.spawn(self._carry(peer, relays, reader, writer))

        server = await asyncio.start_server(accept, sock=listening, limit=2 * _CHUNK_BYTES)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    async def _carry(
        self,
        peer: str,
        relays: tuple[str, ...],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        now = self._clock()
        for relay in sorted(relays, key=lambda r: now - self._failed_at.get(r, -1e9) < _AVOID_S):
            if (dialled := await self._dialled(relay, peer)) is not None:
                break
        else:
            await closed(writer)
            return
        stream = _Answered(dialled, self._clock)

        async def watch() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    await stream.answered.wait()
                await asyncio.Event().wait()
            if stream.unanswered:  # before the connection ends, and gRPC dials again
                self._failed(relay, "it drops what it is given")

        await first_of(pump(stream, reader, writer), watch())
        if stream.unanswered:
            self._failed(relay, "it drops what it is given")

    def _failed(self, relay: str, problem: str) -> None:
        if len(self._failed_at) >= _MOST_PORTS:
            self._failed_at.clear()
            self.problems.clear()
        self._failed_at[relay], self.problems[relay] = self._clock(), problem

    async def _dialled(self, relay: str, peer: str) -> Stream | None:
        """A tunnel to the peer; None: the relay does not answer, or does not reach it."""
        advertised, bound = self.own
        here = relay == addresses.public_address(advertised)
        target = addresses.join_address(*own_port(bound)) if here else relay
        stream, opened = self._transport.open(target, Method.DIAL), False
        try:
            async with asyncio.timeout(_OPEN_S):
                await stream.send(message(header=pb.RelayHeader(sender=self._me, peer=peer)))
                opened = (await received(stream, _OPEN_S)).HasField("opened")
            problem = "it answers something else"
        except (TransportError, wire.WireError, TimeoutError) as error:
            problem = str(error) or f"no answer in {_OPEN_S:g} s"
        finally:
            if not opened:
                stream.cancel()
        if opened:
            return stream
        self._failed(relay, problem)
        return None
