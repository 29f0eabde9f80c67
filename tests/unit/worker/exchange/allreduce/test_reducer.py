"""Reducing: who may contribute, when a shard closes, and what the late are told."""

from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given, strategies as st

from murmuration.algorithms.plan import Plan
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce.closing import Patience, next_group
from murmuration.worker.exchange.view import ShardKey
from tests.protocol.views import view
from tests.unit.worker.exchange.allreduce.layouts import BYTES, CONFIG, ROUND_S, TRANSFER_S
from tests.unit.worker.exchange.allreduce.reducing import Reducing, told

GRACE_S = CONFIG.grace_s + TRANSFER_S


def test_equal_contributions_are_named_and_equal_shards_of_others_are_not(clock):
    """Where no sample has touched a shard it may be equal, while the norms of all of it differ."""
    made = Reducing(clock)
    for peer, value, norm in (("c", 7, 100), ("a", 7, 100), ("b", 7, 150), ("d", 8, 100)):
        made.offer(peer, value=value, norm=norm).send_up_to(BYTES)
    assert made.context.counts.alike == {("a", "c")}


def test_the_grace_is_three_usual_rounds_within_bounds():
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
    for took_s, grace_s in ((0.1, 5.0), (90.0, 20.0)):
        patience = Patience(20.0, Plan(dylu=False))
        patience.ends(0, 0, 0.0)
        patience.has_quorum(0, 1, took_s)
        assert patience.usual_s(0, 1, 4) == grace_s


def test_two_rounds_of_many_are_waited_for_longer_than_three_usual_ones():
    """A round is 1 s. A wait for reducers may be half as long again, but lengthens no usual one."""
    patience, now = Patience(20.0, Plan(dylu=False)), 0.0
    for round_, late_s in enumerate([0.0, 4.4, 4.6, 4.6, 0.0]):
        patience.ends(0, round_, now)
        patience.waited_for_reducers(0, round_, now + late_s, late_s)
        now += late_s + 1
        patience.has_quorum(0, round_ + 1, now)
    assert [patience.usual_s(0, round_, 4) for round_ in (3, 4, 33, 34)] == [5.0, 3.0, 3.0, 5.0]
    assert patience.usual_s(0, 4, 2) == 5.0  # one of two is slow, and nobody knows which


@given(st.lists(st.tuples(st.floats(0.1, 60), st.floats(0, 1)), min_size=4, max_size=8))
def test_where_steps_go_by_speed_a_slow_peer_costs_a_twentieth(rounds):
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


def test_the_grace_is_not_begun_again_by_a_further_contribution(clock):
    made = Reducing(clock)
    made.now = 10.0
    streams = made.contribute("ab")
    made.now = 20.0
    streams += made.contribute("c")
    made.tick(10.0 + GRACE_S)
    assert told(streams) == {"mean of abc"}


@pytest.mark.parametrize("begun", [False, True])
def test_it_does_not_wait_for_the_dead_nor_where_most_are_here_for_the_silent(clock, begun):
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


def test_one_that_has_been_silent_for_a_while_is_not_waited_for_at_all(clock):
    made = Reducing(clock, seen=view("abc", suspect="d"))
    made.tick(2.0)
    assert told(made.contribute("abc")) == {"mean of abc"}


def test_a_contribution_from_outside_is_let_go_when_the_round_does_not_close(clock):
    made = Reducing(clock, seen=view("abcde"))
    outside = made.offer("e")
    made.tick(ROUND_S)
    assert outside.told == ["pruned"]


def test_who_is_outside_contributes_where_nobody_of_the_group_is_left(clock):
    made = Reducing(clock, me="e", seen=view("be", dead="acd"))
    assert made.offer("f").told == ["to b"]
    made.on_view(view("ef", dead="abcd"))
    assert told(made.contribute("e")) == {"mean of e"}


def test_a_shard_that_could_not_be_reduced_is_open_to_those_that_try_again(clock, monkeypatch):
    made = Reducing(clock)
    with monkeypatch.context() as broken:
        broken.setattr(wire, "average", lambda *_, **__: 1 / 0)
        assert told(made.contribute("abcd")) == {"again"}
    assert told(made.contribute("abcd")) == {"mean of abcd"}


def test_values_that_were_replaced_while_they_were_verified_do_not_count(clock):
    """Else the mean would be of bytes that are only half here."""
    made = Reducing(clock)
    made.contribute("acd")
    made.context.gate.clear()
    first = made.offer("b").send_up_to(BYTES)
    made.offer("b", value=1.0)
    made.context.gate.set()
    made.settle()
    assert (first.told, made.awaited) == (["again"], "b")


def test_a_learned_reduction_is_answered_and_ends_the_own_attempt(clock):
    made = Reducing(clock, "b", view("bcd", suspect="a"))
    streams = made.contribute("b")
    made.learned()
    assert told(streams) == {"mean of ad"}
    made.on_view(view("bcd", dead="a"))
    assert (made.answer(), made.awaited) == ("mean of ad", "")


def test_a_peer_that_goes_back_forgets_what_it_has_closed_since(clock):
    made, later = Reducing(clock), ShardKey(0, 1, 0)
    made.contribute("abcd")
    made.advanced(1)
    made.learned(later)
    made.advanced(2)
    made.advanced(1)
    assert made.answer(later) == "take"


def test_a_shard_that_others_still_fill_stays_open_after_it_advanced(clock):
    made = Reducing(clock)
    made.contribute("abc")
    made.advanced(1)
    assert made.answer() == "take"


@pytest.mark.parametrize(
    ("group", "contributors", "joiners", "found"),
    [
        pytest.param("abcd", "abcd abcd abcd abcd", "", "abcd", id="all"),
        pytest.param("abcd", "abcd abcd abcd d", "", "abcd", id="one counts itself alone"),
        pytest.param("abcd", "abc abc abc abcd", "", "abc", id="one counts somebody unseen"),
        pytest.param("ab", "ab b", "", "ab", id="of two"),
        pytest.param("abc", "abc abc ab", "x", "abcx", id="a joiner"),
        pytest.param("abc", "abc abc abx", "", "abc", id="an outsider that is counted"),
        pytest.param("abc", "dd d d", "", "d", id="the group is gone"),
    ],
)
def test_the_next_group_is_what_most_shards_have_counted(group, contributors, joiners, found):
    assert next_group(group, contributors.split(), joiners) == tuple(found)
