"""The memory transport with a tap on every stream: to watch, damage, cut or slow what passes.

Handlers run in their own peer's context, so that a frozen peer does not answer.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.transport import Caller, Handler, Stream
from tests.support.memory_transport import MemoryNetwork, MemoryTransport

T = TypeVar("T")


@dataclass(frozen=True)
class Passing:
    """A message of a stream that `source` opened to `target`; `up`: from source to target."""

    source: str
    target: str
    method: str
    up: bool
    message: bytes

    @property
    def body(self) -> str | None:
        """What an Exchange message holds: header, frame, resume, redirect or refusal."""
        kind = pb.ExchangeUp if self.up else pb.ExchangeDown
        return kind.FromString(self.message).WhichOneof("body") if self._exchange else None

    @property
    def offset(self) -> int:
        """Of the frame that an Exchange message holds."""
        kind = pb.ExchangeUp if self.up else pb.ExchangeDown
        return kind.FromString(self.message).frame.offset

    @property
    def _exchange(self) -> bool:
        return self.method == "Data/Exchange"


Tap = Callable[[Passing], bytes]


class TappedTransport(MemoryTransport):
    """A MemoryTransport whose streams pass a tap, and whose handlers run as their own peer."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        context: contextvars.Context,
        tap: Callable[[], Tap | None],
        lag_s: Callable[[str, str, int], float],
    ) -> None:
        """Args: lag_s: of a message of so many bytes from one address to another."""
        super().__init__(network, address)
        self._own, self._tap, self._lag_s = context, tap, lag_s

    async def listen(self, handler: Handler) -> str:
        return await super().listen(_Serving(handler, self._own))

    def open(self, address: str, method: str, peer: str | None = None) -> Stream:
        way = self._address, address
        return _TappedStream(
            super().open(address, method, peer), self._passes(address, method), way, self._lag_s
        )

    def _passes(self, address: str, method: str) -> Callable[[bool, bytes], bytes]:
        def passes(up: bool, message: bytes) -> bytes:
            tap = self._tap()
            if tap is None:
                return message
            return tap(Passing(self._address, address, method, up, message))

        return passes


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


class _TappedStream:
    def __init__(
        self,
        stream: Stream,
        passes: Callable[[bool, bytes], bytes],
        way: tuple[str, str],
        lag_s: Callable[[str, str, int], float],
    ) -> None:
        self._stream, self._passes, self._lag_s = stream, passes, lag_s
        self._source, self._target = way

    async def send(self, message: bytes) -> None:
        if lag_s := self._lag_s(self._source, self._target, len(message)):
            await asyncio.sleep(lag_s)
        await self._stream.send(self._passes(True, message))

    async def done(self) -> None:
        await self._stream.done()

    async def receive(self) -> bytes | None:
        message = await self._stream.receive()
        if lag_s := self._lag_s(self._target, self._source, len(message or b"")):
            await asyncio.sleep(lag_s)
        return None if message is None else self._passes(False, message)

    def cancel(self) -> None:
        self._stream.cancel()


def spoiled_frame(message: bytes) -> bytes:
    """The same frame with one bit of its payload flipped."""
    up = pb.ExchangeUp.FromString(message)
    payload = bytearray(up.frame.payload)
    payload[len(payload) // 2] ^= 1
    frame = pb.Frame(offset=up.frame.offset, payload=bytes(payload), hash=up.frame.hash)
    return pb.ExchangeUp(frame=frame).SerializeToString()


def once(what: Callable[[Passing], bool], act: Callable[[Passing], bytes]) -> Tap:
    """A tap that acts on the first message for which `what` holds."""
    acted: list[Passing] = []

    def tap(passing: Passing) -> bytes:
        if not acted and what(passing):
            acted.append(passing)
            return act(passing)
        return passing.message

    return tap


def frame_up(source: str, target: str | None = None) -> Callable[[Passing], bool]:
    """A contribution's frame from one peer."""
    return lambda p: (
        p.up and p.source == source and p.target == (target or p.target) and p.body == "frame"
    )
