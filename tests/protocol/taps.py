"""Taps on the streams of the memory transport, and streams of somebody that keeps to a script."""

import asyncio
from collections.abc import Callable

from murmuration.protos import murmuration_pb2 as pb
from tests.support.memory_transport import Passing, Tap

__all__ = ["Passing", "Tap"]


class Scripted:
    """A stream of somebody that sends these messages and nothing more, and what it is told.

    Args:
        ends: after them; else nothing comes for ever.
        reads: else the second message to it is never taken."""

    def __init__(self, *messages: bytes, ends: bool = False, reads: bool = True) -> None:
        self._messages, self._ends, self._reads = list(messages), ends, reads
        self.sent: list[bytes] = []

    async def receive(self) -> bytes | None:
        if not self._messages and not self._ends:
            await asyncio.Event().wait()
        return self._messages.pop(0) if self._messages else None

    async def send(self, message: bytes) -> None:
        self.sent.append(message)
        if not self._reads:
            await asyncio.Event().wait()

    async def done(self) -> None: ...

    def cancel(self) -> None: ...


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
