"""The messages about blocks of samples: of the train thread, of the rules, and between peers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from murmuration.algorithms.fragments import Ranges

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
        """In its epoch, from 0."""
        return self.number % EPOCH_BLOCKS


@dataclass(frozen=True)
class SampleStream:
    """An order of positions that all peers know, again and again; each time is an epoch.

    Args:
        id: the same on every peer that draws of it.
        block: positions of a block.
        length: of an epoch; None where nobody knows before its end.
        in_order: a peer reads it from the front: it is given rising blocks of one epoch.
        name: that the user has given it.
    """

    id: int
    block: int
    length: int | None
    in_order: bool = False
    name: str = ""

    @property
    def blocks(self) -> int | None:
        """Of an epoch."""
        return None if self.length is None else -(-self.length // self.block)

    def size(self, block: Block) -> int:
        """Positions of the block; the last one of an epoch may have fewer."""
        if self.length is None:
            return self.block
        return max(0, min(self.block, self.length - block.place * self.block))


# ------------------------------------------------------------------------------ between peers


class OpenedStream(NamedTuple):
    """A stream that a peer has drawn from: with the CRC-32 of its name; length 0 is not known."""

    id: int
    name: int
    length: int


@dataclass(frozen=True)
class Holding:
    """The blocks that a peer has, those that it asks for, and the streams that it has opened; a
    later sequence number replaces an earlier one. `epoch` is that of its `Member`."""

    peer: str
    epoch: int
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
    """What one peer tells another: who holds what, its own holding first; the blocks that are used
    by stream, as ranges of numbers; and how much is used of others."""

    holdings: tuple[Holding, ...]
    done: Mapping[int, Ranges] = field(default_factory=dict)
    cursors: Mapping[Block, int] = field(default_factory=dict)


# ------------------------------------------------------------------------- train thread -> I/O


@dataclass(frozen=True)
class StreamOpened:
    """Blocks are wanted, `ahead` of them beyond the one that is drawn from: of the epoch that the
    others are in; with `again` of the one that was exhausted last. `opening` tells this time from
    those before: all answers have it."""

    stream: SampleStream
    opening: int
    ahead: int
    again: bool = False


@dataclass(frozen=True)
class BlockBegun:
    """The first position of a block is about to be drawn."""

    block: Block


@dataclass(frozen=True)
class Starved:
    """Nothing is left to draw: a block is waited for."""

    stream: int


@dataclass(frozen=True)
class SamplesUsed:
    """`total` positions since the stream was opened; `cursors` are how many of each block, and
    `done` the blocks that are used up."""

    stream: int
    total: int
    cursors: Mapping[Block, int]
    done: tuple[Block, ...]


@dataclass(frozen=True)
class EpochEnded:
    """This block and those after it in its epoch do not exist."""

    block: Block


@dataclass(frozen=True)
class SampleStreamClosed:
    """No more is drawn: what is held goes back."""

    stream: int


ShareMessage = StreamOpened | BlockBegun | Starved | SamplesUsed | EpochEnded | SampleStreamClosed

# ------------------------------------------------------------------------- I/O -> train thread


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
    """Nothing is free in this epoch and those before. `behind`: but for blocks that a stream which
    is read from the front has passed."""

    opening: int
    stream: int
    behind: bool = False


LeaseMessage = BlockLeased | LeaseRevoked | UseKnown | Exhausted

# ------------------------------------------------------------------------ what the rules ask for


@dataclass(frozen=True)
class Announce:
    """Tell a peer; then `answered` or `unanswered`."""

    peer: str
    number: int
    news: LeaseNews


@dataclass(frozen=True)
class PeerSilent:
    """A peer has not answered: membership should probe it; `passed_over`: none waits for it now."""

    peer: str
    passed_over: bool = False


@dataclass(frozen=True)
class StreamsDiffer:
    """A peer draws from other samples where this one draws from `stream`: told once."""

    peer: str
    stream: SampleStream
    theirs: OpenedStream


LeaseAction = Announce | PeerSilent | StreamsDiffer | LeaseMessage
