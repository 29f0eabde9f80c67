"""A context whose rounds are easy to read: shard k goes to the k-th peer, then to the others.

What is ready runs in `settle`, and time stands still between: `Bench.now` is what a test says.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.measured import Arrivals, Compression, ExchangeConfig
from murmuration.worker.exchange.round_context import Context, RoundConfig
from murmuration.worker.exchange.view import ShardRange
from murmuration.worker.simulation.virtual_loop import VirtualLoop, running
from murmuration.worker.transport import Unreachable

T = TypeVar("T")
C = TypeVar("C", bound=Context)

ELEMENTS = 10
BYTES = 4 * ELEMENTS
TRANSFER_S = 3.0
ROUND_S = 60.0
CONFIG = RoundConfig(quorum=0.5, grace_s=20.0)


@dataclass(frozen=True, kw_only=True)
class ByName(Context):
    """Args: order: of the peers for every shard, instead of by name; gate: heavy work waits for."""

    order: Sequence[str] = ()
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def orders(self, fragment: int, group: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        if self.order:
            return tuple(tuple(each) for each in self.order)
        return tuple((first, *(peer for peer in group if peer != first)) for first in group)

    def shards(self, fragment: int, group: Sequence[str]) -> tuple[ShardRange, ...]:
        size, count = ELEMENTS, len(self.orders(fragment, group))
        return tuple(ShardRange(k * size, (k + 1) * size, BYTES, BYTES // 2) for k in range(count))

    def weight(self, announced: int) -> int:
        if announced > 20:
            raise wire.WireError(f"a contribution of {announced} steps")
        return announced

    def transfer_s(self, fragment: int) -> float:
        return TRANSFER_S

    def round_s(self, fragment: int) -> float:
        return ROUND_S

    async def worked(self, elements: int, work: Callable[[], T]) -> T:
        await self.gate.wait()
        return work()


def context_of(kind: type[C], clock: Callable[[], float], **given: Any) -> C:
    """Without compression; it tells nobody anything."""
    compression = Compression(ExchangeConfig(compression="never"))
    given |= {"compression": compression, "log": lambda event: None, "detection_s": 6.0}
    return kind(clock=clock, arrivals=Arrivals(clock), **given)


class Bench:
    """The loop and the context of one peer. Args: passes_s: while somebody reads the clock, as on
    a real one."""

    passes_s = 0.0
    made: ClassVar[list["Bench"]] = []  # with one that is collected its pending tasks would be, too

    def __init__(self, me: str, clock: VirtualLoop, order: Sequence[str] = ()) -> None:
        self.now, self._clock = 0.0, clock
        self.made.append(self)
        given = {"run": 7, "elements": [100] * 3, "config": CONFIG, "order": order, "me": me}
        plan = Plan(reduction_codec="bf16")
        # `worked` takes the place of `offload`.
        self.context = context_of(ByName, self._read, plan=plan, offload=None, **given)
        self.context.gate.set()

    def _read(self) -> float:
        self.now += self.passes_s
        return self.now

    def settle(self) -> None:
        self._clock.settle()


@contextmanager
def on_a_loop() -> Iterator[VirtualLoop]:
    Bench.made.clear()
    with running(VirtualLoop()) as loop:
        yield loop
    assert not loop.problems, loop.problems


class FakeStream:
    """A stream whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.cancelled = False
        self._come: deque[bytes | Unreachable | None] = deque()
        self._waits: asyncio.Future[None] | None = None

    @property
    def is_read(self) -> bool:
        return self._waits is not None and not self._waits.done()

    def gives(self, message: bytes | Unreachable | None) -> None:
        self._come.append(message)
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    async def send(self, message: bytes) -> None:
        self.sent.append(message)

    async def done(self) -> None: ...

    async def receive(self) -> bytes | None:
        while not self._come:
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        message = self._come.popleft()
        if isinstance(message, Unreachable):
            raise message
        return message

    def cancel(self) -> None:
        self.cancelled = True


def encoded(value: float) -> memoryview:
    return memoryview(bytearray(np.full(ELEMENTS, value, "<f4").tobytes()))


def frame(kind: type[pb.ExchangeUp] | type[pb.ExchangeDown], raw: memoryview, offset: int) -> bytes:
    piece = pb.Frame(offset=offset, payload=bytes(raw), hash=wire.hash64(raw))
    return kind(frame=piece).SerializeToString()
