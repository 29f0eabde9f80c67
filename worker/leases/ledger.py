"""What is used of each stream of samples."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from murmuration.algorithms.fragments import Ranges, union
from murmuration.worker.leases.types import EPOCH_BLOCKS, Block

# Far more than honest peers have: what others say must not fill the memory.
_MOST_STREAMS, _MOST_CURSORS = 1024, 1 << 16


class Ledger:
    """Blocks that are used up, as ranges, and cursors into others. Merging is union and maximum, so
    that news may come twice and in any order.

    Peers draw near the front of what is free, so there are but a few ranges for each of them.
    """

    def __init__(self) -> None:
        self.done: dict[int, Ranges] = {}
        self.cursors: dict[Block, int] = {}

    def is_done(self, block: Block) -> bool:
        ranges = self.done.get(block.stream, ())
        at = bisect_right(ranges, (block.number, 1 << 70)) - 1
        return at >= 0 and block.number < ranges[at][1]

    def finish(self, stream: int, start: int, stop: int) -> None:
        """Blocks `start` to `stop` are used up."""
        self.merge({stream: ((start, stop),)}, {})

    def merge(self, done: Mapping[int, Ranges], cursors: Mapping[Block, int]) -> None:
        """Takes over what another ledger has."""
        for stream, ranges in done.items():
            if stream in self.done or len(self.done) < _MOST_STREAMS:
                self.done[stream] = union(self.done.get(stream, ()), ranges)
        for block, used in cursors.items():
            if used > self.cursors.get(block, 0) and len(self.cursors) < _MOST_CURSORS:
                self.cursors[block] = used
        for block in [block for block in self.cursors if self.is_done(block)]:
            del self.cursors[block]

    def free(
        self, stream: int, first: int, stop: int, blocks: int | None, taken: Collection[int]
    ) -> Iterator[int]:
        """Numbers from `first` below `stop` that are neither used up nor taken, in order.

        Args:
            blocks: of each epoch; None as long as nobody knows.
        """
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
        last = max((*taken, *(stop - 1 for _, stop in ranges)), default=0)
        return last // EPOCH_BLOCKS

    def plain(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return {
            "done": [[stream, [list(each) for each in self.done[stream]]] for stream in self.done],
            "cursors": [[*block, used] for block, used in self.cursors.items()],
        }

    def load(self, plain: Mapping[str, Any]) -> None:
        """Holds what `plain` gave, and nothing else."""
        self.done.clear()
        self.cursors.clear()
        done: Sequence[Any] = plain["done"]
        self.merge(
            {stream: tuple((start, stop) for start, stop in ranges) for stream, ranges in done},
            {Block(stream, number): used for stream, number, used in plain["cursors"]},
        )
