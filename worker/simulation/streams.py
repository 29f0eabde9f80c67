"""Streams of the live code over the simulated network, message by message. The first one opens a
stream at the callee. A frame counts as the bytes that it stands for; others take only the delay."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.simulation.network import Network, SimulatedStream
from murmuration.worker.simulation.virtual_loop import Act
from murmuration.worker.transport import Unreachable

Sizes = Callable[[bytes], int]
"""The bytes that a message counts on the links, 0 for none."""


class StreamEnd:
    """One end, as the live code uses it (`murmuration.worker.transport.Stream`). `task` serves the
    stream, if this is the callee's; `opens` is done when the first message has come."""

    def __init__(self, network: Network, stream: SimulatedStream, me: int, sizes: Sizes) -> None:
        self.other: StreamEnd
        self.task: asyncio.Task[None] | None = None
        self.opens: Act | None = None
        self._network, self._stream, self._me, self._size = network, stream, me, sizes
        self._come: deque[bytes | None] = deque()
        self._ended = self._broken = False
        self._waits: asyncio.Future[None] | None = None  # for a message
        self._sends: asyncio.Future[None] | None = None  # until it has left

    async def send(self, message: bytes) -> None:
        """Returns when the message has left, at once if it has no payload. Raises Unreachable."""
        self._check()
        size = self._size(message)
        if not size:
            self._pass(message)
            return
        sends = self._sends = asyncio.get_running_loop().create_future()
        self._pass(message, size, partial(_wake, sends))
        await sends
        self._check()

    async def done(self) -> None:
        if self._me == self._stream.caller:
            self._check()
            self._pass(None)

    def returned(self) -> None:
        if not self._broken:
            self._pass(None)

    async def receive(self) -> bytes | None:
        """The next message, None when the other side is done. Raises Unreachable."""
        if self._ended:
            return None
        while not self._come:
            self._check()
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        message = self._come.popleft()
        self._ended = message is None
        return message

    def cancel(self) -> None:
        """Ends the stream for both sides; the other one finds out a delay later."""
        if self._broken:
            return
        if self._ended or None in self._come:
            self._stream.close()
        else:
            self._network.abort(self._stream, self._me)

    def broke(self) -> None:
        self._broken = True
        _wake(self._waits)
        _wake(self._sends)
        if self.task is not None:
            self.task.cancel()

    def _pass(self, message: bytes | None, size: int = 0, left: Act | None = None) -> None:
        self._stream.send(self._me, partial(self.other._came, message), size, left=left)

    def _came(self, message: bytes | None) -> None:
        self._come.append(message)
        _wake(self._waits)
        begin, self.opens = self.opens, None
        if begin is not None:
            begin()

    def _check(self) -> None:
        if self._broken:
            raise Unreachable("a stream broke")


def _wake(waits: asyncio.Future[None] | None) -> None:
    if waits is not None and not waits.done():
        waits.set_result(None)


def frame_sizes(kind: type[pb.ExchangeUp] | type[pb.ExchangeDown], scale: float) -> Sizes:
    """Counts `scale` bytes for each byte of a frame's payload."""

    def size(message: bytes) -> int:
        parsed = kind.FromString(message)
        return round(len(parsed.frame.payload) * scale) if parsed.HasField("frame") else 0

    return size


def open_stream(
    network: Network, caller: int, callee: int, sizes: tuple[Sizes, Sizes]
) -> tuple[StreamEnd, StreamEnd]:
    stream = network.open(caller, callee)
    near = StreamEnd(network, stream, caller, sizes[0])
    far = StreamEnd(network, stream, callee, sizes[1])
    near.other, far.other = far, near
    stream.users |= {caller: near, callee: far}
    return near, far
