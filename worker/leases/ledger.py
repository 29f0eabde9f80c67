"""Blocks of samples, what is used of them, and the messages about them."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from murmuration.algorithms.fragments import Ranges, union

if TYPE_CHECKING:
    from murmuration.worker.leases.lease_table import LeaseTable

EPOCH_BLOCKS = 1 << 32  # block i of epoch e has the number e * EPOCH_BLOCKS + i


class Block(NamedTuple):
    """A block of a stream: positions in a row of the order of one epoch."""

    stream: int
    number: int

    @property
    def epoch(self) -> int:
        return self.number // EPOCH_BLOCKS

    @property
    def place(self) -> int:
        return self.number % EPOCH_BLOCKS


@dataclass(frozen=True)
class SampleStream:
    """An order of positions that all peers know, again and again; each time is an epoch."""

    id: int  # the same on every peer that draws of it
    block: int  # positions of a block
    length: int | None  # of an epoch; None where nobody knows before its end
    in_order: bool = False  # a peer reads it from the front: it is given rising blocks
    name: str = ""  # that the user has given it

    @property
    def blocks(self) -> int | None:
        return None if self.length is None else -(-self.length // self.block)

    def size(self, block: Block) -> int:
        """Positions of the block; the last one of an epoch may have fewer."""
        if self.length is None:
            return self.block
        return max(0, min(self.block, self.length - block.place * self.block))


class OpenedStream(NamedTuple):
    """A stream that a peer has drawn from: with the CRC-32 of its name; length 0 is not known."""

    id: int
    name: int
    length: int


@dataclass(frozen=True)
class Holding:
    """The blocks that a peer has and asks for, and the streams that it has opened; a later sequence
    number replaces an earlier one. `start_ms` is that of its `Member`."""

    peer: str
    start_ms: int
    sequence: int
    held: tuple[Block, ...] = ()
    asked: tuple[Block, ...] = ()
    streams: tuple[OpenedStream, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All that others leave alone."""
        return (*self.held, *self.asked)


@dataclass(frozen=True)
class LeaseNews:
    """The news that one peer tells another."""

    holdings: tuple[Holding, ...]  # who holds what, its own holding first
    # The blocks that are used by stream, as ranges of numbers.
    done: Mapping[int, Ranges] = field(default_factory=dict)
    cursors: Mapping[Block, int] = field(default_factory=dict)  # how much is used of others


@dataclass(frozen=True)
class ShareMessage:
    """Something for the table of this peer's leases, by a method of it."""

    tell: "Callable[[LeaseTable], None]"


@dataclass(frozen=True)
class BlockLeased:
    """The block is this peer's from position `begin` of it on."""

    opening: int
    block: Block
    begin: int

    @property
    def stream(self) -> int:
        return self.block.stream


@dataclass(frozen=True)
class LeaseRevoked:
    """The others have held this peer for dead: the block is another's by now."""

    opening: int
    block: Block

    @property
    def stream(self) -> int:
        return self.block.stream


@dataclass(frozen=True)
class UseKnown:
    """All that are alive know that this many positions are used."""

    opening: int
    stream: int
    total: int


@dataclass(frozen=True)
class Exhausted:
    """Nothing is free in this epoch and those before."""

    opening: int
    stream: int
    behind: bool = False  # but for blocks that a stream which is read from the front has passed


LeaseMessage = BlockLeased | LeaseRevoked | UseKnown | Exhausted

# Far more than honest peers have: what others say must fill neither memory nor messages.
_MOST_STREAMS, _MOST_RANGES, _MOST_CURSORS = 256, 3000, 1 << 12
# Epochs that are believed, and so many after the latest that is known: numbers would run out.
_EPOCHS, _EPOCHS_AHEAD = 1 << 24, 64


class Ledger:
    """Blocks that are used up, as ranges, and cursors into others. Merging is union and maximum:
    news may come twice and in any order. Peers draw near the front, so ranges are few."""

    def __init__(self) -> None:
        self.done: dict[int, Ranges] = {}
        self.cursors: dict[Block, int] = {}

    def is_done(self, block: Block) -> bool:
        ranges = self.done.get(block.stream, ())
        at = bisect_right(ranges, (block.number, 1 << 70)) - 1
        return at >= 0 and block.number < ranges[at][1]

    def finish(self, stream: int, start: int, stop: int) -> None:
        self.done.setdefault(stream, ())
        self.merge({stream: ((start, stop),)}, {})

    def horizon(self, stream: int) -> int:
        """The number from which on nothing is believed: no honest peer is there."""
        last = self.done[stream][-1][1] if self.done.get(stream) else 0
        return EPOCH_BLOCKS * max(_EPOCHS, last // EPOCH_BLOCKS + _EPOCHS_AHEAD)

    def told(self, first: Collection[int]) -> dict[int, Ranges]:
        """As much of what is used as one message takes, that of these streams before others."""
        found, left = dict[int, Ranges](), _MOST_RANGES
        for stream in sorted(self.done, key=lambda each: each not in first):
            if told := self.done[stream][:left]:  # who is told merges each, however short
                found[stream], left = told, left - len(told)
        return found

    def merge(self, done: Mapping[int, Ranges], cursors: Mapping[Block, int]) -> None:
        for stream, ranges in done.items():
            if stream in self.done or len(self.done) < _MOST_STREAMS:
                end = self.horizon(stream)
                near = [(start, min(stop, end)) for start, stop in ranges if start < end]
                self.done[stream] = union(self.done.get(stream, ()), near)[:_MOST_RANGES]
        for block, used in cursors.items():
            if used > self.cursors.get(block, 0) and len(self.cursors) < _MOST_CURSORS:
                self.cursors[block] = used
        for block in [block for block in self.cursors if self.is_done(block)]:
            del self.cursors[block]

    def free(
        self, stream: int, first: int, stop: int, blocks: int | None, taken: Collection[int]
    ) -> Iterator[int]:
        """Numbers from `first` below `stop` that are free. Args: blocks: of an epoch, if known."""
        end = EPOCH_BLOCKS if blocks is None else blocks
        number = first
        for start, after in (*self.done.get(stream, ()), (stop, stop)):
            while number < min(start, stop):
                if number % EPOCH_BLOCKS >= end:
                    number += EPOCH_BLOCKS - number % EPOCH_BLOCKS
                    continue
                if number not in taken:
                    yield number
                number += 1
            number = max(number, after)

    def last_epoch(self, stream: int, taken: Iterable[int]) -> int:
        """The latest epoch in which a block is used up or taken; 0 at first."""
        ranges = self.done.get(stream, ())
        return max((*taken, *(stop - 1 for _, stop in ranges)), default=0) // EPOCH_BLOCKS

    def plain(self) -> dict[str, Any]:
        return {
            "done": [[stream, [list(each) for each in self.done[stream]]] for stream in self.done],
            "cursors": [[*block, used] for block, used in self.cursors.items()],
        }

    def load(self, plain: Mapping[str, Any]) -> None:
        self.done.clear()
        self.cursors.clear()
        done: Sequence[Any] = plain["done"]
        self.merge(
            {stream: tuple((start, stop) for start, stop in ranges) for stream, ranges in done},
            {Block(stream, number): used for stream, number, used in plain["cursors"]},
        )
