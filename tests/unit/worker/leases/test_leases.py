"""The peers that ask for blocks never share one: tables, ledger, the train thread."""

import itertools
import json
from collections import deque
from dataclasses import replace
from unittest.mock import Mock, call

import pytest
from hypothesis import given, strategies as st

from murmuration.worker.leases import LeasedBlocks, LeaseTable, Ledger
from murmuration.worker.leases.ledger import (
    EPOCH_BLOCKS,
    Block,
    BlockLeased,
    Holding,
    LeaseMessage,
    LeaseNews,
    SampleStream,
    ShareMessage,
    UseKnown,
)
from murmuration.worker.membership import Health
from tests.unit.worker.leases.tables import Tables

STREAM = SampleStream(id=1, block=10, length=80)
SHORT = replace(STREAM, length=34)


def opened(stream: SampleStream = STREAM, ahead: int = 1) -> ShareMessage:
    return ShareMessage(lambda table: table.open_stream(stream, 0, ahead, again=False, first=0))


def leased(messages: deque[LeaseMessage]) -> list[int]:
    return [each.block.number for each in messages if isinstance(each, BlockLeased)]


@pytest.mark.parametrize("first", ["a", "b"])
def test_an_answer_says_that_the_other_asks_for_it_too(first):
    """Its own question is still on the way; whichever comes first, one has the block."""
    tables, only = Tables("a", "b"), SampleStream(id=1, block=10, length=10)
    asks = {}
    for name, other in (("a", "b"), ("b", "a")):
        table = tables.tables[name]
        table.heard(opened(only))
        *_, number, _ = tables.under_way.pop()
        # As if the other had not opened the stream yet: it does not know that it is asked for.
        table.answered(other, number, LeaseNews((Holding(other, 1, 0),)))
        asks[name] = tables.under_way.pop()
    for name in (first, *({"a", "b"} - {first})):
        _, other, number, news = asks[name]
        tables.tables[name].answered(other, number, tables.tables[other].answer(news))
    assert len(leased(tables.received["a"])) + len(leased(tables.received["b"])) == 1


def test_a_former_life_holds_nothing():
    tables = Tables("a", "b")
    tables.handle("a", opened(ahead=8))
    tables.join("a", start_ms=2)
    tables.handle("b", opened(ahead=8))
    assert sorted(leased(tables.received["b"])) == list(range(8))


def test_nothing_is_given_before_all_that_are_alive_have_answered():
    tables = Tables("a", "b", "c")
    tables.gone.add("c")
    tables.handle("a", opened())
    assert tables.silent == [("c", False)]
    tables.tick("a")
    assert not tables.received["a"]
    tables.members["c"] = replace(tables.members["c"], health=Health.SUSPECT)
    tables.all_see()
    assert len(leased(tables.received["a"])) == 1


def test_what_a_third_says_of_one_that_answers_itself_counts_for_nothing():
    tables = Tables("a", "b", "c")
    said = Holding("b", 1, 10**6, tuple(Block(1, number) for number in range(8)))
    c, honest = tables.tables["c"], tables.tables["c"].answer
    c.answer = lambda news: replace(told := honest(news), holdings=(*told.holdings, said))
    tables.handle("a", opened(ahead=8))
    assert sorted(leased(tables.received["a"])) == list(range(8))


def test_what_a_third_says_of_one_that_is_passed_over_counts():
    tables = Tables("a", "b", "c")
    tables.cut = {"a", "b"}
    tables.handle("a", opened(ahead=4))
    tables.handle("b", opened(ahead=4))
    for tables.now in range(0, 40, 4):
        tables.tick()
    assert sorted(leased(tables.received["a"]) + leased(tables.received["b"])) == [*range(8)]


def test_streams_without_end_hide_no_use_of_one_that_is_drawn():
    tables, stream = Tables("a", "b"), replace(STREAM, length=None, in_order=True)
    tables.tables["b"].ledger.merge(dict.fromkeys(range(2, 400), ((0, 1),)), {})
    tables.tick()
    tables.tables["a"].ledger.finish(1, 0, 3)
    tables.handle("b", opened(stream, ahead=2))
    assert leased(tables.received["b"]) == [3, 4]


BLOCKS = st.lists(st.integers(0, 30), max_size=8)


def ledger_of(blocks: list[int], cursors: dict[int, int] | None = None) -> Ledger:
    ledger = Ledger()
    for number in blocks:
        ledger.finish(1, number, number + 1)
    ledger.merge({}, {Block(1, number): used for number, used in (cursors or {}).items()})
    return ledger


@given(st.lists(BLOCKS, min_size=1, max_size=4))
def test_merging_is_a_union_in_any_order(parts):
    ledgers, merged = [ledger_of(part) for part in parts], Ledger()
    for each in (*reversed(ledgers), *ledgers):
        merged.merge(each.done, each.cursors)
    used = set(itertools.chain(*parts))
    assert {n for n in range(40) if merged.is_done(Block(1, n))} == used
    assert list(merged.free(1, 0, 40, None, {3, 39})) == [
        n for n in range(39) if n not in used | {3}
    ]


def test_free_blocks_of_several_epochs_leave_out_what_an_epoch_does_not_have():
    free = list(ledger_of([0, 1]).free(1, 0, 2 * EPOCH_BLOCKS, 3, ()))
    assert free == [2, *range(EPOCH_BLOCKS, EPOCH_BLOCKS + 3)]


def test_a_checkpoint_holds_it_as_plain_values():
    ledger = ledger_of([0, 1, 5], {7: 3})
    again = ledger_of([77], {78: 1})
    again.load(json.loads(json.dumps(ledger.plain())))
    assert (again.done, again.cursors) == (ledger.done, ledger.cursors)


def test_what_others_say_is_bounded():
    ledger = Ledger()
    ledger.merge(dict.fromkeys(range(2000), ((0, 1),)), {})
    ledger.merge({}, {Block(5000, number): 1 for number in range(70_000)})
    assert (len(ledger.done), len(ledger.cursors)) == (256, 4096)
    ledger.merge({n: tuple((at, at + 1) for at in range(0, 8000, 2)) for n in range(256)}, {})
    assert len(ledger.told([])) == 1


class Waits(Exception):
    """Nothing has come."""


class Ends:
    """Both ends of the queues between a loop and its I/O thread."""

    def __init__(self, stream: SampleStream = SHORT, at_once: int = 4) -> None:
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


def test_a_batch_is_told_of_when_the_loop_comes_back_for_the_next():
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


def test_no_more_than_a_block_is_used_that_the_others_do_not_know_of():
    """Batches that are larger than a block wait for the one before the last."""
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
    ends = Ends(SampleStream(1, 2, 100), at_once=8)
    ends.lease(*range(12))
    ends.blocks.take(24)
    ends.blocks.use(8)
    ends.blocks.use(8)
    with pytest.raises(Waits):
        ends.blocks.use(8)


def test_what_is_closed_is_told_first():
    ends = Ends()
    ends.lease(0)
    ends.blocks.take(4)
    ends.blocks.use(3)
    ends.blocks.close()
    told = [call.use(1, 3, {Block(1, 0): 3}, ()), call.close_stream(1)]
    assert ends.table.mock_calls[-2:] == told
