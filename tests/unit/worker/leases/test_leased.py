"""The train thread's end: what it draws, what it tells, and when it waits."""

from collections import deque

import pytest

from murmuration.worker.leases import LeasedBlocks, Run, SampleStream
from murmuration.worker.leases.ledger import (
    Block,
    BlockBegun,
    BlockLeased,
    EpochEnded,
    Exhausted,
    LeaseMessage,
    LeaseRevoked,
    SampleStreamClosed,
    SamplesUsed,
    ShareMessage,
    Starved,
    StreamOpened,
    UseKnown,
)

STREAM = SampleStream(id=1, block=10, length=34)


class Waits(Exception):
    """Nothing has come."""


class Ends:
    """Both ends of the queues between a loop and its I/O thread."""

    def __init__(self, stream: SampleStream = STREAM, at_once: int = 4) -> None:
        self.posted: list[ShareMessage] = []
        self.coming: deque[LeaseMessage | None] = deque()
        self.blocks = LeasedBlocks(stream, at_once, self.posted.append, self._receive, opening=5)

    def lease(self, *numbers: int, begin: int = 0) -> None:
        self.coming += [BlockLeased(5, Block(1, number), begin) for number in numbers]

    def _receive(self) -> LeaseMessage | None:
        if not self.coming:
            raise Waits
        return self.coming.popleft()


def run(number: int, begin: int, end: int) -> Run:
    return Run(Block(1, number), begin, end)


def test_batches_go_over_blocks_and_what_is_drawn_from_is_said() -> None:
    ends = Ends()
    ends.lease(2, 0)
    assert [ends.blocks.take(4) for _ in range(3)] == [
        [run(2, 0, 4)],
        [run(2, 4, 8)],
        [run(2, 8, 10), run(0, 0, 2)],
    ]
    assert [m for m in ends.posted if isinstance(m, BlockBegun)] == [
        BlockBegun(Block(1, 2)),
        BlockBegun(Block(1, 0)),
    ]
    assert ends.posted[0] == StreamOpened(STREAM, 5, 2)


def test_a_block_goes_on_where_another_peer_was_and_the_last_is_shorter() -> None:
    ends = Ends()
    ends.lease(3, begin=1)
    assert ends.blocks.take(9 - 6) == [run(3, 1, 4)]
    ends.coming.append(Exhausted(5, 1))
    assert ends.blocks.take(4) == []


def test_a_batch_is_told_of_when_the_loop_comes_back_for_the_next() -> None:
    """Until then it may not have been used: a crash must not lose it."""
    ends = Ends()
    ends.lease(0, 1)
    ends.blocks.take(10)
    ends.blocks.use(8)
    assert not any(isinstance(message, SamplesUsed) for message in ends.posted)
    ends.blocks.use(2)
    assert ends.posted[-1] == SamplesUsed(1, 8, {Block(1, 0): 8}, ())
    ends.blocks.tell()
    assert ends.posted[-1] == SamplesUsed(1, 10, {}, (Block(1, 0),))


def test_no_more_than_a_block_is_used_that_the_others_do_not_know_of() -> None:
    ends = Ends()
    ends.lease(0, 1)
    ends.blocks.take(20)
    ends.blocks.use(6)
    ends.blocks.use(4)
    with pytest.raises(Waits):
        ends.blocks.use(1)
    ends.coming += [UseKnown(4, 1, 6), UseKnown(5, 1, 6)]  # the first is of an earlier opening
    ends.blocks.use(1)
    assert not ends.coming


def test_batches_that_are_larger_than_a_block_wait_for_the_one_before_the_last() -> None:
    ends = Ends(SampleStream(1, 2, 100), at_once=8)
    ends.lease(*range(12))
    ends.blocks.take(24)
    ends.blocks.use(8)
    ends.blocks.use(8)
    with pytest.raises(Waits):
        ends.blocks.use(8)


def test_a_block_that_was_revoked_is_drawn_no_further() -> None:
    ends = Ends()
    ends.lease(0, 1)
    ends.blocks.take(4)
    ends.coming += [LeaseRevoked(5, Block(1, 0)), UseKnown(5, 1, 0)]
    ends.blocks.use(4)
    with pytest.raises(Waits):
        ends.blocks.use(7)
    assert ends.blocks.take(2) == [run(1, 0, 2)]


def test_what_is_left_is_drawn_before_the_end_of_an_epoch_and_then_nothing() -> None:
    ends = Ends()
    ends.lease(0)
    ends.coming.append(Exhausted(5, 1, behind=True))
    assert ends.blocks.take(12) == [run(0, 0, 10)]
    assert ends.posted[-1] == Starved(1)
    assert ends.blocks.take(1) == []
    assert ends.blocks.passed_over
    assert not ends.blocks.run_is_over


def test_the_end_of_the_run_ends_every_wait() -> None:
    ends = Ends()
    ends.lease(0, 1)
    ends.blocks.take(20)
    ends.coming.append(None)
    ends.blocks.use(20)
    assert ends.blocks.run_is_over
    assert ends.blocks.take(1) == []


def test_what_is_closed_is_told_first() -> None:
    ends = Ends()
    ends.lease(0)
    ends.blocks.take(4)
    ends.blocks.use(3)
    ends.blocks.close()
    assert ends.posted[-2:] == [SamplesUsed(1, 3, {Block(1, 0): 3}, ()), SampleStreamClosed(1)]


def test_a_stream_that_ends_in_a_block_ends_with_it() -> None:
    ends = Ends(SampleStream(1, 10, None, in_order=True), at_once=1)
    ends.lease(1, 2)
    (first,) = ends.blocks.take(1)
    ends.blocks.use(1)
    (second,) = ends.blocks.take(1)
    ends.blocks.end_epoch(second, 11)  # there is no twelfth
    assert (first, second) == (run(1, 0, 1), run(1, 1, 2))
    assert ends.posted[-1] == EpochEnded(Block(1, 2))
    ends.blocks.tell()
    assert ends.posted[-1] == SamplesUsed(1, 1, {}, (Block(1, 1),))
