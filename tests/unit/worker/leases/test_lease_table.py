"""Of several peers that ask for blocks each block is one's."""

from collections import deque
from dataclasses import replace

import pytest

from murmuration.worker.leases.ledger import (
    Announce,
    BlockLeased,
    Holding,
    LeaseMessage,
    LeaseNews,
    PeerSilent,
    SampleStream,
    ShareMessage,
)
from murmuration.worker.membership import Health
from tests.unit.worker.leases.tables import Tables

STREAM = SampleStream(id=1, block=10, length=80)


def opened(stream: SampleStream = STREAM, ahead: int = 1) -> ShareMessage:
    return ShareMessage(lambda table: table.open_stream(stream, 0, ahead, again=False, first=0))


def leased(messages: deque[LeaseMessage]) -> list[int]:
    return [each.block.number for each in messages if isinstance(each, BlockLeased)]


@pytest.mark.parametrize("first", ["a", "b"])
def test_an_answer_says_that_the_other_asks_for_it_too(first: str) -> None:
    """Its own question is still on the way; whichever comes first, one has the block."""
    tables = Tables("a", "b")
    only = SampleStream(id=1, block=10, length=10)
    asks = {}
    for name, other in (("a", "b"), ("b", "a")):
        table = tables.tables[name]
        (joins,) = table.heard(opened(only))
        assert isinstance(joins, Announce)
        # As if the other had not opened the stream yet: it does not know that it is asked for.
        fresh = LeaseNews((Holding(other, 1, 0),))
        (asks[name],) = table.answered(other, joins.number, fresh)
    had = []
    for name in (first, *({"a", "b"} - {first})):
        ask, other = asks[name], ({"a", "b"} - {name}).pop()
        assert isinstance(ask, Announce)
        reply, _ = tables.tables[other].answer(ask.news)
        actions = tables.tables[name].answered(other, ask.number, reply)
        had += [name for action in actions if isinstance(action, BlockLeased)]
    assert len(had) == 1


def test_a_former_life_holds_nothing() -> None:
    tables = Tables("a", "b")
    tables.handle("a", opened(ahead=8))
    tables.join("a", epoch=2)
    tables.handle("b", opened(ahead=8))
    assert sorted(leased(tables.received["b"])) == list(range(8))


def test_nothing_is_given_before_all_that_are_alive_have_answered() -> None:
    tables = Tables("a", "b", "c")
    tables.kill("c", seen=False)
    tables.handle("a", opened())
    assert tables.silent == [PeerSilent("c")]
    tables.tick("a")
    assert not tables.received["a"]
    tables.members["c"] = replace(tables.members["c"], health=Health.SUSPECT)
    tables.all_see()
    assert len(leased(tables.received["a"])) == 1
