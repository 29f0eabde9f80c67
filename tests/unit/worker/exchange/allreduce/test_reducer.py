"""Reducing: who may contribute, when a shard closes, and what the late are told."""

from collections.abc import Iterator, Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce.closing import Patience
from murmuration.worker.exchange.view import ShardKey
from murmuration.worker.simulation.virtual_loop import VirtualLoop as Clock
from tests.protocol.views import view
from tests.unit.worker.exchange.allreduce.layouts import (
    BYTES,
    CONFIG,
    ROUND_S,
    TRANSFER_S,
    on_a_loop,
)
from tests.unit.worker.exchange.allreduce.reducing import KEY, Reducing, told

OTHER_GROUP = ("a", "b", "c", "d", "e")
GRACE_S = CONFIG.grace_s + TRANSFER_S


@pytest.fixture
def clock() -> Iterator[Clock]:
    with on_a_loop() as clock:
        yield clock


def closed(clock: Clock) -> Reducing:
    made = Reducing(clock)
    assert told(made.contribute("abcd")) == {"mean of abcd"}
    return made


# ---------------------------------------------------------------------------------- closing


def test_a_shard_closes_when_everyone_has_contributed(clock: Clock) -> None:
    made = Reducing(clock)
    streams = made.contribute("dba")
    assert (told(streams), made.awaited) == ({""}, "c")
    streams += made.contribute("c")
    assert told(streams) == {"mean of abcd"}
    answer = streams[0].answer
    assert (answer.last, list(answer.joiners)) == ("c", [])


def test_equal_contributions_are_named_and_equal_shards_of_others_are_not(clock: Clock) -> None:
    """Where no sample has touched a shard it may be equal, while the norms of all of it differ."""
    made = Reducing(clock)
    for peer, value, norm in (("c", 7, 100), ("a", 7, 100), ("b", 7, 150), ("d", 8, 100)):
        made.offer(peer, value=value, norm=norm).send_up_to(BYTES)
    assert made.context.counts.alike == {("a", "c")}


def test_a_quorum_closes_after_the_grace(clock: Clock) -> None:
    made = Reducing(clock)
    streams = made.contribute("a")
    made.tick(100.0)
    assert told(streams) == {""}  # one of four is no quorum
    streams += made.contribute("c")
    made.tick(100.0 + GRACE_S - 0.01)
    assert told(streams) == {""}
    made.tick(100.0 + GRACE_S)
    assert told(streams) == {"mean of ac"}
    assert made.reducer.take_late(0) == ["b", "d"]


def test_the_grace_is_three_usual_rounds() -> None:
    """A round counts from the end of the one before to its own quorum: the late lengthen none."""
    patience = Patience(20.0, Plan(dylu=False))
    assert patience.usual_s(0, 0, 4) == 20.0
    now = 0.0
    for round_, took_s in enumerate([1.0, 2.0, 4.0, 4.0, 90.0]):
        patience.has_quorum(0, round_, now + took_s)
        patience.has_quorum(0, round_, now + took_s + 5)  # of another shard
        now += took_s + 40
        patience.ends(0, round_, now)
        patience.ends(0, round_, now + 5)
    assert patience.usual_s(0, 5, 4) == 12.0
    patience.has_quorum(0, 9, now + 1)  # it has reduced nothing meanwhile
    assert (patience.usual_s(0, 9, 4), patience.usual_s(1, 9, 4)) == (12.0, 20.0)


@pytest.mark.parametrize(("took_s", "grace_s"), [(0.1, 5.0), (90.0, 20.0)])
def test_the_grace_is_bounded(took_s: float, grace_s: float) -> None:
    patience = Patience(20.0, Plan(dylu=False))
    patience.ends(0, 0, 0.0)
    patience.has_quorum(0, 1, took_s)
    assert patience.usual_s(0, 1, 4) == grace_s


def test_two_rounds_of_many_are_waited_for_longer_than_three_usual_ones() -> None:
    """Of 1 s each. A wait for reducers may be half as long again, and lengthens no usual round."""
    patience, now = Patience(20.0, Plan(dylu=False)), 0.0
    for round_, late_s in enumerate([0.0, 4.4, 4.6, 4.6, 0.0]):
        patience.ends(0, round_, now)
        patience.waited_for_reducers(0, round_, now + late_s, late_s)
        now += late_s + 1
        patience.has_quorum(0, round_ + 1, now)
    assert [patience.usual_s(0, round_, 4) for round_ in (3, 4, 33, 34)] == [5.0, 3.0, 3.0, 5.0]
    assert patience.usual_s(0, 4, 2) == 5.0  # one of two is slow, and nobody knows which


@given(st.lists(st.tuples(st.floats(0.1, 60), st.floats(0, 1)), min_size=4, max_size=8))
def test_where_steps_go_by_speed_a_slow_peer_costs_a_twentieth(
    rounds: list[tuple[float, float]],
) -> None:
    """Beyond four times what the peers of equal speed are apart, and what overlaps steps."""
    plans = Plan(dylu=True), Plan(dylu=True, overlap_steps=10, inner_steps=20), Plan()
    brief_s = [brief_of(plan, rounds) for plan in plans]
    took_s, spread_s = (list(each) for each in zip(*rounds, strict=True))
    assert brief_s[0] <= 4 * 1.25 * max(spread_s) + 0.05 * max(took_s)
    assert brief_s[0] >= 4 * median(spread_s) + 0.05 * min(took_s)
    assert brief_s[1] == pytest.approx(brief_s[0] + 0.25 * median(took_s))
    assert brief_s[2] is None is brief_of(plans[0], rounds[:3])  # nothing is known at first


def brief_of(plan: Plan, rounds: Sequence[tuple[float, float]]) -> float | None:
    patience = Patience(20.0, plan)
    for round_, (took_s, spread_s) in enumerate(rounds):
        patience.ends(0, round_ - 1, 0.0)
        patience.has_quorum(0, round_, took_s, spread_s)
    return patience.brief_s(0)


def test_the_grace_is_not_begun_again_by_a_further_contribution(clock: Clock) -> None:
    made = Reducing(clock)
    made.now = 10.0
    streams = made.contribute("ab")
    made.now = 20.0
    streams += made.contribute("c")
    made.tick(10.0 + GRACE_S)
    assert told(streams) == {"mean of abc"}


@pytest.mark.parametrize("begun", [False, True])
def test_it_does_not_wait_for_the_dead_nor_where_most_are_here_for_the_silent(
    clock: Clock, begun: bool
) -> None:
    made = Reducing(clock)
    streams = made.contribute("ab")
    made.on_view(view("ab", suspect="cd"))
    if begun:
        made.offer("d")
    assert told(streams) == {""}
    streams += made.contribute("c")
    assert told(streams) == {""}
    made.tick(2.0)
    assert told(streams) == {"" if begun else "mean of abc"}
    made.on_view(view("abc", dead="d"))
    assert told(streams) == {"mean of abc"}
    assert list(streams[0].answer.joiners) == ([] if begun else ["d"])  # that may be back


@pytest.mark.parametrize("gone", [{"left": "d"}, {"done": "d"}, {"ahead": "d"}])
def test_it_does_not_wait_for_a_peer_that_has_nothing_to_contribute(
    clock: Clock, gone: dict[str, str]
) -> None:
    made = Reducing(clock, seen=view("abc", **gone))
    assert told(made.contribute("abc")) == {"mean of abc"}


def test_the_quorum_is_of_those_that_are_expected_and_may_be_lost_again(clock: Clock) -> None:
    made = Reducing(clock, seen=view("ab", dead="cd"))
    streams = made.contribute("a")
    made.on_view(view("abcd"))
    made.tick(GRACE_S)
    assert told(streams) == {""}
    made.on_view(view("ab", dead="cd"))
    made.tick(2 * GRACE_S)
    assert told(streams) == {"mean of a"}


def test_a_contribution_from_outside_the_group_adds_nothing_and_is_answered(clock: Clock) -> None:
    made = Reducing(clock, seen=view("abcde"))
    outside = made.offer("e")
    assert not outside.is_read
    made.contribute("abcd")
    assert told([outside, made.offer("e")]) == {"mean of abcd"}
    assert list(outside.answer.joiners) == ["e"]


def test_a_contribution_from_outside_is_let_go_when_the_round_does_not_close(clock: Clock) -> None:
    made = Reducing(clock, seen=view("abcde"))
    outside = made.offer("e")
    made.tick(ROUND_S)
    assert outside.told == ["pruned"]


def test_who_is_outside_contributes_where_nobody_of_the_group_is_left(clock: Clock) -> None:
    made = Reducing(clock, me="e", seen=view("be", dead="acd"))
    assert made.offer("f").told == ["to b"]
    made.on_view(view("ef", dead="abcd"))
    assert told(made.contribute("e")) == {"mean of e"}


@pytest.mark.parametrize(("round_", "joiners"), [(0, "dx"), (1, "")])
def test_one_shard_of_a_round_names_late_peers_and_joiners(
    clock: Clock, round_: int, joiners: str
) -> None:
    seen = view("abcx", suspect="d", starting="e", done="f", dead="g")
    made = Reducing(clock, seen=seen, version=round_)
    streams = [made.offer(p, key=ShardKey(0, round_, 0)).send_up_to(BYTES) for p in "abc"]
    made.tick(GRACE_S)
    assert list(streams[0].answer.joiners) == list(joiners)


def test_a_shard_that_could_not_be_reduced_is_open_to_those_that_try_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Reducing(clock)
    with monkeypatch.context() as broken:
        broken.setattr(wire, "average", lambda *_, **__: 1 / 0)
        assert told(made.contribute("abcd")) == {"again"}
    assert told(made.contribute("abcd")) == {"mean of abcd"}


# ------------------------------------------------------------------------------- what is taken


def test_values_that_were_replaced_while_they_were_verified_do_not_count(clock: Clock) -> None:
    """Else the mean would be of bytes that are only half here."""
    made = Reducing(clock)
    made.contribute("acd")
    made.context.gate.clear()
    first = made.offer("b").send_up_to(BYTES)
    made.offer("b", value=1.0)
    made.context.gate.set()
    made.settle()
    assert (first.told, made.awaited) == (["again"], "b")


def test_nothing_can_be_withdrawn_while_the_mean_is_computed(clock: Clock) -> None:
    made = Reducing(clock)
    streams = made.contribute("abc")
    made.context.gate.clear()
    streams += made.contribute("d")  # verified, it waits for the gate once more
    made.context.gate.set()
    made.settle()
    other = made.offer("b", value=1.0).send_up_to(BYTES)
    assert told([*streams, other]) == {"mean of abcd"}


def test_a_shard_without_contributions_never_closes(clock: Clock) -> None:
    made = Reducing(clock)
    streams = [*made.contribute("b"), made.offer("b", value=1.0)]
    made.on_view(view("a", dead="bcd"))
    made.tick(ROUND_S - 1)
    assert told(streams) == {""}


def test_who_comes_after_the_others_closed_gets_the_answer_and_is_not_in_it(clock: Clock) -> None:
    made = Reducing(clock, seen=view("abd", done="c"))
    late = made.offer("c").send_up_to(15)
    streams = made.contribute("abd")
    assert told(streams) == {"mean of abd"}
    assert late.told == []
    assert late.send_up_to(BYTES).told == ["mean of abd"]


# ------------------------------------------------------------------------------ what comes again


def test_of_what_a_peer_sends_again_the_newest_counts_once(clock: Clock) -> None:
    made = Reducing(clock)
    streams = [made.offer("a", value=50.0).send_up_to(BYTES), *made.contribute("aabcd")]
    assert told(streams) == {"mean of abcd"}
    assert streams[-1].mean == {98.5}  # by their letters


def test_a_contribution_goes_on_where_it_broke_off(clock: Clock) -> None:
    """Though the reducer has not seen it break: old frames still arrive."""
    made = Reducing(clock)
    old = made.offer("a").send_up_to(16)
    new = made.offer("a", resumed=True)
    assert new.told == ["resume 16"]
    old.send_up_to(24)
    new.send_up_to(BYTES, start=16)
    made.contribute("bcd")
    assert (new.told, new.mean) == (["resume 16", "mean of abcd"], {98.5})


def test_a_round_laid_out_anew_just_before_its_mean_is_computed(clock: Clock) -> None:
    """Another state came in at the same moment: nothing of the former layout is computed."""
    made = Reducing(clock)
    streams = made.contribute("abc")
    made.context.gate.clear()
    streams += made.contribute("d")
    made.advanced(0, ("a", "b"))
    made.context.gate.set()
    made.settle()
    assert told(streams) == {"again"}


def test_who_comes_while_the_mean_is_computed_is_not_said_to_have_come_last(clock: Clock) -> None:
    """It is no contributor, and an answer that names it would be refused by everybody."""
    made = Reducing(clock, seen=view("abc", done="d"))
    made.contribute("ab")
    made.context.gate.clear()
    streams = made.contribute("cd")
    made.context.gate.set()
    made.settle()
    assert [each.answer.last for each in streams] == ["c", "c"]
    assert told(streams) == {"mean of abc"}


def test_a_reduction_is_given_from_the_offset_that_is_asked_for(clock: Clock) -> None:
    stream = closed(clock).offer("a", resumed=True, reduction_offset=12)
    assert stream.told == ["mean of abcd", "from 12"]
    assert len(pb.ExchangeDown.FromString(stream.sent[-1]).frame.payload) == BYTES // 2 - 12


# ------------------------------------------------------------------------------ who may contribute


@pytest.mark.parametrize(("version", "key"), [(None, KEY), (3, ShardKey(0, 4, 0))])
def test_it_holds_a_round_that_it_has_not_come_to(
    clock: Clock, version: int | None, key: ShardKey
) -> None:
    made = Reducing(clock, version=version)
    stream = made.offer(key=key)
    assert not stream.is_read
    made.advanced(key.round)
    assert stream.is_read


def test_a_learned_reduction_is_answered_and_ends_the_own_attempt(clock: Clock) -> None:
    made = Reducing(clock, "b", view("bcd", suspect="a"))
    streams = made.contribute("b")
    made.learned()
    assert told(streams) == {"mean of ad"}
    made.on_view(view("bcd", dead="a"))
    assert (made.answer(), made.awaited) == ("mean of ad", "")


def test_a_mean_that_is_ready_after_another_was_learned_is_dropped(clock: Clock) -> None:
    """Others have got the learned one from here: all later ones must get the same."""
    made = Reducing(clock, "b", view("bcd", dead="a"))
    streams = made.contribute("bc")
    made.context.gate.clear()
    streams += made.contribute("d")
    made.learned()
    made.context.gate.set()
    made.settle()
    assert told(streams) == {"mean of ad"}


def test_answers_are_kept_for_a_round_and_then_pruned(clock: Clock) -> None:
    made = closed(clock)
    made.advanced(1)
    assert made.answer() == "mean of abcd"
    made.advanced(2)
    assert made.answer() == "pruned"


def test_a_peer_that_goes_back_forgets_what_it_has_closed_since(clock: Clock) -> None:
    made, later = closed(clock), ShardKey(0, 1, 0)
    made.advanced(1)
    made.learned(later)
    made.advanced(2)
    made.advanced(1)
    assert made.answer(later) == "take"


def test_a_shard_that_others_still_fill_stays_open_after_it_advanced(clock: Clock) -> None:
    made = Reducing(clock)
    made.contribute("abc")
    made.advanced(1)
    assert made.answer() == "take"


# --------------------------------------------------------------------------------- successors


def test_a_successor_gives_the_shard_back_when_the_reducer_returns(clock: Clock) -> None:
    made = Reducing(clock, "b", view("bcd", suspect="a"))
    streams, open_ = made.contribute("bc"), made.offer("d")
    made.on_view(view("abcd"))
    assert told(streams) == {"to a"}
    assert made.answer() == "to a"
    assert open_.send_up_to(BYTES).told == ["to a"]  # what came meanwhile goes on elsewhere


def test_a_successor_that_computes_already_goes_on(clock: Clock) -> None:
    made = Reducing(clock, "b", view("bcd", dead="a"))
    streams = made.contribute("bc")
    made.context.gate.clear()
    streams += made.contribute("d")
    made.on_view(view("bcd", dead="a"))
    made.context.gate.set()
    made.settle()
    made.on_view(view("abcd"))
    assert told(streams) == {"mean of bcd"}
    assert made.answer() == "mean of bcd"


# ------------------------------------------------------------------------------- other groups


def test_another_group_for_the_same_round_never_closes_what_the_first_laid_out(
    clock: Clock,
) -> None:
    """A state adopted while a shard is open may bring another group, and with it other shards."""
    made = Reducing(clock, seen=view("abcde"))
    streams = made.contribute("abc")
    made.advanced(0, OTHER_GROUP)
    made.tick(1000.0)
    assert (told(streams), made.awaited) == ({"again"}, "")


def test_another_group_begins_again(clock: Clock) -> None:
    made = Reducing(clock, seen=view("abcde"))
    made.contribute("abc")
    made.learned()
    made.advanced(0, OTHER_GROUP)
    streams = made.contribute("abcd", OTHER_GROUP)
    assert told(streams) == {""}
    streams += made.contribute("e", OTHER_GROUP)
    assert told(streams) == {"mean of abcde"}
