"""Of several peers that ask for blocks each block is one's."""

from collections import deque
from dataclasses import replace

import pytest

from murmuration.worker.leases.ledger import (
    Announce,
    Block,
    BlockBegun,
    BlockLeased,
    EpochEnded,
    Exhausted,
    Holding,
    LeaseMessage,
    LeaseNews,
    LeaseRevoked,
    PeerSilent,
    SampleStream,
    SampleStreamClosed,
    SamplesUsed,
    Starved,
    StreamOpened,
    UseKnown,
)
from murmuration.worker.membership import Health
from tests.unit.worker.leases.tables import Tables

STREAM = SampleStream(id=1, block=10, length=80)


def opened(stream: SampleStream = STREAM, ahead: int = 1, again: bool = False) -> StreamOpened:
    return StreamOpened(stream, 0, ahead, again)


def leased(messages: deque[LeaseMessage]) -> list[int]:
    return [each.block.number for each in messages if isinstance(each, BlockLeased)]


def use_up(tables: Tables, name: str, number: int) -> None:
    block = Block(1, number)
    tables.handle(name, BlockBegun(block))
    tables.handle(name, SamplesUsed(1, 10 * (number + 1), {}, (block,)))


def test_a_peer_alone_draws_all_in_turn() -> None:
    tables = Tables("a")
    tables.handle("a", opened())
    while tables.received["a"]:
        message = tables.received["a"].popleft()
        if isinstance(message, BlockLeased):
            use_up(tables, "a", message.block.number)
    assert tables.tables["a"].ledger.done[1] == ((0, 1 << 32),)
    tables.handle("a", Starved(1))
    assert list(tables.received["a"]) == [Exhausted(0, 1)]
    tables.received["a"].clear()
    tables.handle("a", opened())
    assert leased(tables.received["a"])[0] >= 1 << 32  # the next epoch


def test_two_that_ask_at_once_never_have_the_same_block() -> None:
    tables = Tables("a", "b", "c")
    tables.held_back = {"a", "b", "c"}
    for name in "abc":
        tables.handle(name, opened(ahead=4))  # of eight
    tables.held_back = set()
    tables.deliver()
    for _ in range(4):
        tables.tick()
    given = [number for name in "abc" for number in leased(tables.received[name])]
    assert len(given) == len(set(given)) >= 8
    assert set(given) >= set(range(8))


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


def test_a_newcomer_that_only_one_peer_knows_is_told_of_all() -> None:
    """The others do not know it, and would not ask it: it asks them."""
    tables = Tables("a", "b")
    tables.handle("a", opened(ahead=4))
    tables.join("c")
    known_to_a = [tables.members[name] for name in "ab"]
    tables.see("a", known_to_a)
    tables.see("b", known_to_a)
    tables.handle("c", opened(ahead=8))
    tables.handle("a", SamplesUsed(1, 1, {Block(1, 0): 1}, ()))
    given = [*leased(tables.received["a"]), *leased(tables.received["c"])]
    assert sorted(given) == list(range(8))


def test_what_a_peer_held_is_free_from_where_it_was_when_it_is_gone() -> None:
    tables = Tables("a", "b")
    tables.handle("a", opened(ahead=8))
    first, *_ = leased(tables.received["a"])
    tables.handle("a", BlockBegun(Block(1, first)))
    tables.handle("a", SamplesUsed(1, 6, {Block(1, first): 6}, ()))
    tables.kill("a")
    tables.handle("b", opened(ahead=8))
    assert sorted(leased(tables.received["b"])) == list(range(8))
    begins = {m.block.number: m.begin for m in tables.received["b"] if isinstance(m, BlockLeased)}
    assert begins.pop(first) == 6
    assert set(begins.values()) == {0}


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


def test_a_peer_out_of_reach_is_not_waited_for() -> None:
    tables = Tables("a", "b")
    tables.kill("b", seen=False)
    tables.members["a"] = replace(tables.members["a"], unreachable=("b",))
    tables.all_see()
    tables.handle("a", opened())
    assert len(leased(tables.received["a"])) == 1


def test_how_far_it_is_counts_as_known_when_all_have_answered() -> None:
    tables = Tables("a", "b")
    tables.handle("a", opened())
    (number,) = leased(tables.received["a"])
    tables.received["a"].clear()
    tables.held_back = {"b"}
    tables.handle("a", SamplesUsed(1, 3, {Block(1, number): 3}, ()))
    assert not tables.received["a"]
    tables.held_back = set()
    tables.deliver()
    assert list(tables.received["a"]) == [UseKnown(0, 1, 3)]
    assert tables.tables["b"].ledger.cursors == {Block(1, number): 3}


def test_a_peer_that_was_held_for_dead_loses_what_another_has_by_now() -> None:
    tables = Tables("a", "b")
    tables.handle("a", opened(ahead=8))
    tables.held_back = {"a"}
    tables.members["a"] = replace(tables.members["a"], health=Health.DEAD)
    tables.see("b", tables.members.values())
    tables.handle("b", opened(ahead=8))
    for number in range(4):
        use_up(tables, "b", number)
    tables.members["a"] = replace(tables.members["a"], health=Health.ALIVE)
    tables.held_back = set()
    tables.all_see()
    tables.handle("a", SamplesUsed(1, 1, {}, ()))
    tables.handle("b", SamplesUsed(1, 41, {}, ()))
    lost = {
        name: {each.block.number for each in received if isinstance(each, LeaseRevoked)}
        for name, received in tables.received.items()
    }
    assert lost["a"] >= set(range(4))
    assert lost["a"] | lost["b"] == set(range(8))
    assert not lost["a"] & lost["b"]


def test_what_is_closed_goes_back() -> None:
    tables = Tables("a", "b")
    tables.handle("a", opened(ahead=7))
    tables.handle("b", opened(ahead=2))
    (mine,) = leased(tables.received["b"])
    tables.handle("a", SampleStreamClosed(1))
    tables.tick()
    assert len(leased(tables.received["b"])) == 2
    assert mine == leased(tables.received["b"])[0]


def test_a_peer_that_leaves_does_not_wait_for_one_that_is_silent_to_say_where_it_was() -> None:
    tables = Tables("a", "b", "c")
    tables.handle("a", opened())
    (number,) = leased(tables.received["a"])
    tables.kill("c", seen=False)
    for used in (3, 8):
        tables.handle("a", SamplesUsed(1, used, {Block(1, number): used}, ()))
    tables.close("a")
    assert tables.tables["b"].ledger.cursors == {Block(1, number): 8}


def test_a_peer_that_leaves_says_again_what_it_had_no_time_to_say() -> None:
    """A node that closes begins no calls for what its train thread has said last."""
    tables = Tables("a", "b")
    tables.handle("a", opened())
    (number,) = leased(tables.received["a"])
    (lost,) = tables.tables["a"].heard(SamplesUsed(1, 6, {Block(1, number): 6}, ()))
    assert isinstance(lost, Announce)
    tables.close("a")
    assert tables.tables["b"].ledger.cursors == {Block(1, number): 6}
    assert tables.tables["a"].idle


@pytest.mark.parametrize("again", [False, True])
def test_after_its_end_an_epoch_is_not_begun_again(again: bool) -> None:
    """A part that is too short for a batch may be left of it."""
    tables = Tables("a")
    tables.handle("a", opened(ahead=8))
    for number in range(7):
        use_up(tables, "a", number)
    tables.handle("a", BlockBegun(Block(1, 7)))
    tables.handle("a", Starved(1))
    tables.received["a"].clear()
    tables.handle("a", SampleStreamClosed(1))
    tables.handle("a", opened(ahead=9, again=again))
    found = leased(tables.received["a"])
    assert found[0] == 7
    assert len(found) == (1 if again else 9)


def test_a_stream_without_a_known_length_ends_where_somebody_finds_its_end() -> None:
    tables = Tables("a", "b")
    stream = SampleStream(id=1, block=10, length=None, in_order=True)
    tables.handle("a", opened(stream))
    tables.handle("b", opened(stream))
    (mine,), (theirs,) = leased(tables.received["a"]), leased(tables.received["b"])
    assert {mine, theirs} == {0, 1}
    tables.handle("a", EpochEnded(Block(1, 2)))
    tables.handle("b", BlockBegun(Block(1, theirs)))
    tables.handle("b", Starved(1))
    assert tables.received["b"][-1] == Exhausted(0, 1)
    assert tables.tables["b"].ledger.done[1] == ((2, 1 << 32),)
