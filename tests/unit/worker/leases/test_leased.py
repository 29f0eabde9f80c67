"""The train thread's end: what it draws, what it tells, and when it waits."""

from collections import deque
from unittest.mock import Mock, call

import pytest

from murmuration.worker.leases import LeasedBlocks, LeaseTable, SampleStream
from murmuration.worker.leases.ledger import Block, BlockLeased, LeaseMessage, UseKnown

STREAM = SampleStream(id=1, block=10, length=34)


class Waits(Exception):
    """Nothing has come."""


class Ends:
    """Both ends of the queues between a loop and its I/O thread."""

    def __init__(self, stream: SampleStream = STREAM, at_once: int = 4) -> None:
        self.table = Mock(spec=LeaseTable)
        self.coming: deque[LeaseMessage | None] = deque()
        self.blocks = LeasedBlocks(
            stream, at_once, lambda message: message.tell(self.table), self._receive, opening=5
        )

    def lease(self, *numbers: int, begin: int = 0) -> None:
        self.coming += [BlockLeased(5, Block(1, number), begin) for number in numbers]

    def _receive(self) -> LeaseMessage | None:
        if not self.coming:
            raise Waits
        return self.coming.popleft()


def test_a_batch_is_told_of_when_the_loop_comes_back_for_the_next() -> None:
    """Until then it may not have been used: a crash must not lose it."""
    ends = Ends()
    ends.lease(0, 1)
    ends.blocks.take(10)
    ends.blocks.use(8)
    ends.table.use.assert_not_called()
    ends.blocks.use(2)
    ends.table.use.assert_called_once_with(1, 8, {Block(1, 0): 8}, ())
    ends.blocks.tell()
    ends.table.use.assert_called_with(1, 10, {}, (Block(1, 0),))


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


def test_what_is_closed_is_told_first() -> None:
    ends = Ends()
    ends.lease(0)
    ends.blocks.take(4)
    ends.blocks.use(3)
    ends.blocks.close()
    told = [call.use(1, 3, {Block(1, 0): 3}, ()), call.close_stream(1)]
    assert ends.table.mock_calls[-2:] == told
