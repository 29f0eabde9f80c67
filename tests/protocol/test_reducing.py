"""Reducing: who may contribute, when a shard closes, and what the late are told."""

import random
from collections.abc import Sequence

import pytest

from tests.protocol.views import view
from worker.exchange.allreduce.reducer import (
    Abandon,
    Accept,
    Action,
    Advanced,
    Answer,
    Closed,
    Compute,
    Contributed,
    Discard,
    Hold,
    NotReduced,
    Prune,
    RedirectTo,
    Reducing,
    Refuse,
    RoundTick,
    ViewUpdated,
    Withdrawn,
)
from worker.exchange.types import RoundConfig, ShardKey, View

GROUP = ("a", "b", "c", "d")
OTHER_GROUP = ("a", "b", "c", "d", "e")
KEY = ShardKey(0, 0, 0)
CONFIG = RoundConfig(quorum=0.5, grace_s=20.0)
TRANSFER_S = 3.0
GRACE_S = CONFIG.grace_s + TRANSFER_S


def by_name(_fragment: int, group: tuple[str, ...]) -> Sequence[Sequence[str]]:
    """Shard k goes to the k-th peer; the others follow by name."""
    return [(first, *(peer for peer in group if peer != first)) for first in group]


def reducer(me: str = "a", seen: View | None = None, version: int | None = 0) -> Reducing:
    machine = Reducing(me, by_name, CONFIG, [TRANSFER_S, TRANSFER_S])
    machine.step(ViewUpdated(view("abcd") if seen is None else seen), 0.0)
    if version is not None:
        machine.step(Advanced(0, version, GROUP), 0.0)
    return machine


def contribute(machine: Reducing, peers: str, now: float = 0.0) -> list[Action]:
    actions = []
    for peer in peers:
        assert machine.offer(KEY, GROUP) == Accept(GROUP)
        actions += machine.step(Contributed(KEY, peer), now)
    return actions


def compute(contributors: str, next_group: str = "abcd") -> Compute:
    return Compute(KEY, tuple(contributors), tuple(next_group))


# ---------------------------------------------------------------------------------- closing


def test_a_shard_closes_when_everyone_has_contributed() -> None:
    machine = reducer()
    assert contribute(machine, "dba") == []
    assert machine.awaited(KEY) == ("c",)
    assert contribute(machine, "c") == [compute("abcd")]


def test_contributors_are_sorted_whatever_the_order_of_arrival() -> None:
    rng = random.Random(4)
    for _ in range(20):
        machine = reducer()
        order = "".join(rng.sample("abcd", 4))
        assert contribute(machine, order) == [compute("abcd")]


def test_a_repeated_contribution_counts_once() -> None:
    machine = reducer()
    assert contribute(machine, "bbbbb") == []
    assert machine.awaited(KEY) == ("a", "c", "d")


def test_it_is_computed_exactly_once() -> None:
    machine = reducer()
    assert contribute(machine, "abcd") == [compute("abcd")]
    assert machine.step(RoundTick(), 1.0) == []
    assert machine.step(Contributed(KEY, "a"), 1.0) == []
    assert machine.step(ViewUpdated(view("abcd")), 1.0) == []
    assert machine.step(Closed(KEY), 1.0) == []
    assert machine.step(Contributed(KEY, "e"), 2.0) == []
    assert machine.step(RoundTick(), 1000.0) == []


def test_a_quorum_closes_after_the_grace() -> None:
    machine = reducer()
    contribute(machine, "a", now=1.0)
    assert machine.step(RoundTick(), 100.0) == []  # one of four is no quorum
    contribute(machine, "c", now=100.0)
    assert machine.step(RoundTick(), 100.0 + GRACE_S - 0.01) == []
    assert machine.step(RoundTick(), 100.0 + GRACE_S) == [compute("ac")]


def test_the_grace_is_not_started_anew_by_a_further_contribution() -> None:
    machine = reducer()
    contribute(machine, "ab", now=10.0)
    contribute(machine, "c", now=20.0)
    assert machine.step(RoundTick(), 10.0 + GRACE_S) == [compute("abc")]


def test_it_does_not_wait_for_the_dead() -> None:
    machine = reducer()
    contribute(machine, "abc", now=1.0)
    assert machine.step(ViewUpdated(view("abc", suspect="d")), 4.0) == []
    assert machine.step(ViewUpdated(view("abc", dead="d")), 8.0) == [compute("abc", "abc")]


@pytest.mark.parametrize("gone", [{"left": "d"}, {"done": "d"}, {"ahead": "d"}])
def test_it_does_not_wait_for_who_has_nothing_to_contribute(gone: dict[str, str]) -> None:
    machine = reducer(seen=view("abc", **gone))
    actions = contribute(machine, "abc", now=1.0)
    assert [type(action) for action in actions] == [Compute]


def test_the_quorum_is_of_those_who_are_expected() -> None:
    machine = reducer(seen=view("ab", dead="cd"))
    contribute(machine, "a", now=1.0)
    assert machine.step(RoundTick(), 1.0 + GRACE_S) == [compute("a", "ab")]


def test_a_lost_quorum_is_waited_for_again() -> None:
    machine = reducer(seen=view("ab", dead="cd"))
    contribute(machine, "a", now=1.0)
    machine.step(ViewUpdated(view("abcd")), 2.0)
    assert machine.step(RoundTick(), 1.0 + GRACE_S) == []


def test_a_contribution_from_outside_the_group_counts_but_is_not_awaited() -> None:
    machine = reducer(seen=view("abcde"))
    contribute(machine, "abe")
    assert machine.awaited(KEY) == ("c", "d")
    assert contribute(machine, "cd") == [compute("abcde", "abcde")]


def test_the_next_group_is_who_can_join_it() -> None:
    machine = reducer(seen=view("abc", suspect="d", starting="e", done="f", dead="g"))
    machine.step(ViewUpdated(view("abcx", suspect="d", starting="e", done="f", dead="g")), 1.0)
    assert contribute(machine, "abcd") == [compute("abcd", "abcdx")]


def test_a_withdrawn_contribution_is_awaited_again() -> None:
    machine = reducer()
    contribute(machine, "abc")
    assert machine.step(Withdrawn(KEY, "b"), 1.0) == []
    assert machine.awaited(KEY) == ("b", "d")
    assert contribute(machine, "d") == []
    assert contribute(machine, "b") == [compute("abcd")]


def test_a_shard_that_could_not_be_reduced_is_open_to_those_who_try_again() -> None:
    machine = reducer()
    assert contribute(machine, "abcd") == [compute("abcd")]
    assert machine.step(NotReduced(KEY), 1.0) == []
    assert machine.offer(KEY, GROUP) == Accept(GROUP)
    assert contribute(machine, "abcd") == [compute("abcd")]


def test_nothing_can_be_withdrawn_while_the_mean_is_computed() -> None:
    machine = reducer()
    assert contribute(machine, "abcd") == [compute("abcd")]
    assert machine.step(Withdrawn(KEY, "b"), 1.0) == []
    assert machine.step(Contributed(KEY, "b"), 1.0) == []
    assert machine.step(Closed(KEY), 1.0) == []


def test_a_shard_without_contributions_never_closes() -> None:
    machine = reducer()
    contribute(machine, "a")
    machine.step(Withdrawn(KEY, "a"), 1.0)
    assert machine.step(ViewUpdated(view("a", dead="bcd")), 2.0) == []
    assert machine.step(RoundTick(), 1000.0) == []


# ------------------------------------------------------------------------------ who may contribute


def test_it_holds_back_until_it_knows_its_own_state() -> None:
    machine = reducer(version=None)
    assert machine.offer(KEY, None) == Hold()
    machine.step(Advanced(0, 0, GROUP), 1.0)
    assert machine.offer(KEY, GROUP) == Accept(GROUP)


def test_it_holds_a_round_that_it_has_not_come_to() -> None:
    machine = reducer(version=3)
    assert machine.offer(ShardKey(0, 4, 0), None) == Hold()
    machine.step(Advanced(0, 4, GROUP), 1.0)
    assert machine.offer(ShardKey(0, 4, 0), GROUP) == Accept(GROUP)


@pytest.mark.parametrize("closed", [False, True])
def test_another_group_is_refused(closed: bool) -> None:
    """Its shards are others: neither its contribution nor our answer would fit."""
    machine = reducer()
    if closed:
        contribute(machine, "abcd")
        machine.step(Closed(KEY), 1.0)
    assert refused(machine) == "group"


def refused(machine: Reducing, group: tuple[str, ...] | None = None) -> str:
    """The kind of refusal that an offer for the shard meets."""
    decision = machine.offer(KEY, group)
    assert isinstance(decision, Refuse)
    assert decision.reason
    return decision.kind


def test_the_late_get_the_answer() -> None:
    machine = reducer()
    contribute(machine, "abcd")
    machine.step(Closed(KEY), 1.0)
    assert machine.offer(KEY, GROUP) == Answer()


def test_a_learned_reduction_is_answered() -> None:
    machine = reducer("b")
    machine.step(Closed(KEY), 1.0)
    assert machine.offer(KEY, GROUP) == Answer()
    machine.step(ViewUpdated(view("bcd", dead="a")), 2.0)
    assert machine.offer(KEY, GROUP) == Answer()


def test_a_learned_reduction_ends_the_own_attempt() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "b")
    machine.step(Closed(KEY), 1.0)
    assert machine.awaited(KEY) == ()
    assert machine.step(RoundTick(), 1000.0) == []


def test_answers_are_kept_for_two_rounds_and_then_pruned() -> None:
    machine = reducer()
    machine.step(Closed(KEY), 1.0)
    for version in (1, 2):
        assert machine.step(Advanced(0, version, GROUP), 1.0) == [Prune(0, version - 2)]
        assert machine.offer(KEY, GROUP) == Answer()
    machine.step(Advanced(0, 3, GROUP), 1.0)
    assert refused(machine, GROUP) == "pruned"


def test_pruning_leaves_other_fragments_alone() -> None:
    machine = reducer()
    other = ShardKey(1, 0, 0)
    machine.step(Advanced(1, 0, GROUP), 0.0)
    machine.step(Closed(other), 1.0)
    machine.step(Advanced(0, 9, GROUP), 1.0)
    assert machine.offer(other, GROUP) == Answer()


def test_a_round_that_was_applied_through_others_is_over() -> None:
    machine = reducer()
    machine.step(Advanced(0, 1, GROUP), 1.0)
    assert refused(machine, GROUP) == "pruned"


def test_a_shard_that_others_still_fill_stays_open_after_it_advanced() -> None:
    machine = reducer()
    contribute(machine, "abc")
    machine.step(Advanced(0, 1, GROUP), 1.0)
    assert machine.offer(KEY, GROUP) == Accept(GROUP)


# --------------------------------------------------------------------------------- successors


def test_a_successor_redirects_while_anyone_above_is_usable() -> None:
    machine = reducer("c")
    assert machine.offer(KEY, GROUP) == RedirectTo("a")
    machine.step(ViewUpdated(view("bcd", suspect="a")), 1.0)
    assert machine.offer(KEY, GROUP) == RedirectTo("b")
    machine.step(ViewUpdated(view("cd", suspect="a", dead="b")), 2.0)
    assert machine.offer(KEY, GROUP) == Accept(GROUP)


def test_a_successor_waits_for_the_suspected_until_they_are_dead() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "bcd", now=1.0)
    assert machine.awaited(KEY) == ("a",)
    assert machine.step(ViewUpdated(view("bcd", dead="a")), 5.0) == [compute("bcd", "bcd")]


def test_a_successor_gives_the_shard_back_when_the_reducer_returns() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "bc")
    assert machine.step(ViewUpdated(view("abcd")), 2.0) == [Abandon(KEY, "a")]
    assert machine.offer(KEY, GROUP) == RedirectTo("a")
    assert machine.step(RoundTick(), 1000.0) == []


def test_a_successor_that_computes_already_goes_on() -> None:
    machine = reducer("b", view("bcd", dead="a"))
    assert contribute(machine, "bcd") == [compute("bcd", "bcd")]
    assert machine.step(ViewUpdated(view("abcd")), 2.0) == []
    machine.step(Closed(KEY), 2.0)
    assert machine.offer(KEY, GROUP) == Answer()


def test_a_successor_begins_anew_after_it_has_given_back() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "bc", now=1.0)
    machine.step(ViewUpdated(view("abcd")), 2.0)
    machine.step(ViewUpdated(view("bcd", dead="a")), 3.0)
    assert contribute(machine, "d", now=3.0) == []
    assert machine.awaited(KEY) == ("b", "c")


# ------------------------------------------------------------------------------- other groups


def test_another_group_for_the_same_round_never_closes_what_the_first_laid_out() -> None:
    """A state adopted while a shard is open may bring another group, and with it other shards."""
    machine = reducer(seen=view("abcde"))
    contribute(machine, "abc")
    actions = machine.step(Advanced(0, 0, OTHER_GROUP), 1.0)
    actions += machine.step(RoundTick(), 1000.0)
    assert not [action for action in actions if isinstance(action, Compute)]
    assert Discard(0, 0) in actions
    assert machine.awaited(KEY) == ()


def test_another_group_begins_anew() -> None:
    machine = reducer(seen=view("abcde"))
    contribute(machine, "abcd")
    machine.step(Closed(KEY), 1.0)
    machine.step(Advanced(0, 0, OTHER_GROUP), 2.0)
    assert machine.offer(KEY, OTHER_GROUP) == Accept(OTHER_GROUP)
    for peer in "abcd":
        assert machine.step(Contributed(KEY, peer), 3.0) == []
    assert machine.step(Contributed(KEY, "e"), 3.0) == [compute("abcde", "abcde")]


def test_the_same_group_again_discards_nothing() -> None:
    machine = reducer()
    contribute(machine, "abc")
    assert machine.step(Advanced(0, 0, GROUP), 1.0) == [Prune(0, -2)]
    assert contribute(machine, "d") == [compute("abcd")]


def test_another_group_leaves_other_rounds_and_fragments_alone() -> None:
    machine = reducer()
    other = ShardKey(1, 0, 0)
    machine.step(Advanced(1, 0, GROUP), 0.0)
    machine.step(Closed(KEY), 1.0)
    machine.step(Closed(other), 1.0)
    machine.step(Advanced(0, 1, GROUP), 1.0)
    machine.step(Advanced(0, 1, OTHER_GROUP), 1.0)
    assert machine.offer(KEY, GROUP) == Answer()
    assert machine.offer(other, GROUP) == Answer()
