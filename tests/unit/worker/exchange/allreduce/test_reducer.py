"""Reducing: who may contribute, what is taken, when a shard closes, and what the late are told."""

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.protocol.views import view
from tests.unit.worker.exchange.allreduce.layouts import ROUND_S, TRANSFER_S, ByName
from worker.exchange.allreduce import events
from worker.exchange.allreduce.dialogue import ContributionHeader, Group
from worker.exchange.allreduce.reducer import Reducer
from worker.exchange.types import RoundConfig, RoundTick, ShardKey, View, ViewUpdated

GROUP = ("a", "b", "c", "d")
OTHER_GROUP = ("a", "b", "c", "d", "e")
KEY = ShardKey(0, 0, 0)
CONFIG = RoundConfig(quorum=0.5, grace_s=20.0)
GRACE_S = CONFIG.grace_s + TRANSFER_S
TICK = RoundTick()
BYTES = 40
numbers = count(1)


def reducer(me: str = "a", seen: View | None = None, version: int | None = 0) -> Reducer:
    machine = Reducer(me, ByName(), CONFIG)
    machine.handle(ViewUpdated(view("abcd") if seen is None else seen), 0.0)
    if version is not None:
        machine.handle(events.Advanced(0, version, GROUP), 0.0)
    return machine


def header(
    peer: str, key: ShardKey = KEY, group: Group = GROUP, **changes: Any
) -> ContributionHeader:
    plain = ContributionHeader(
        run=ByName.run,
        fragment=key.fragment,
        round=key.round,
        shard=key.shard,
        sender=peer,
        group=hash(group),
        codec=ByName.codec.wire_id,
        elements=10,
        total_bytes=BYTES,
        hash=ord(peer),
    )
    return replace(plain, **changes)


def offer(
    machine: Reducer,
    peer: str = "d",
    key: ShardKey = KEY,
    group: Group = GROUP,
    now: float = 0.0,
    **changes: Any,
) -> tuple[int, list[events.ReducerAction]]:
    """A peer wants to contribute: the number of its stream, and what it is told."""
    stream = next(numbers)
    return stream, machine.handle(
        events.ContributionOffered(stream, header(peer, key, group, **changes)), now
    )


def answer(machine: Reducer, key: ShardKey = KEY, group: Group = GROUP) -> object:
    """What a peer that offers a contribution is told at once, without its stream; None: hold."""
    stream, actions = offer(machine, "d", key, group)
    machine.handle(events.ContributorGone(stream), 0.0)
    if not actions:
        return None
    (action,) = actions
    match action:
        case events.TakeContribution():
            return "take"
        case events.AnswerStream():
            return "answer"
        case events.RedirectStream(_, peer):
            return f"to {peer}"
        case events.RefuseStream(_, kind, reason):
            assert reason
            return kind
    raise AssertionError(action)


def contribute(
    machine: Reducer, peers: str, now: float = 0.0, group: Group = GROUP, **changes: Any
) -> list[events.ReducerAction]:
    """Whole contributions; what follows beside their being taken."""
    actions = []
    for peer in peers:
        stream, taken = offer(machine, peer, group=group, now=now, **changes)
        assert events.TakeContribution(stream, KEY, peer, fresh=True) in taken
        came = machine.handle(events.ContributionBytes(stream, BYTES), now)
        assert any(isinstance(each, events.VerifyContribution) for each in came)
        actions += machine.handle(events.ContributionVerified(stream), now)
    return actions


def computed(actions: list[events.ReducerAction]) -> list[tuple[str, str]]:
    """(contributors, next group) of the means that are due."""
    return [
        ("".join(action.contributors), "".join(action.next_group))
        for action in actions
        if isinstance(action, events.ComputeShard)
    ]


def close(machine: Reducer, actions: list[events.ReducerAction]) -> list[events.ReducerAction]:
    """The mean that is due is computed."""
    (due,) = [action for action in actions if isinstance(action, events.ComputeShard)]
    return machine.handle(events.ShardComputed(due.key, due.attempt), 1.0)


def closed() -> Reducer:
    machine = reducer()
    close(machine, contribute(machine, "abcd"))
    return machine


# ---------------------------------------------------------------------------------- closing


def test_a_shard_closes_when_everyone_has_contributed() -> None:
    machine = reducer()
    assert contribute(machine, "dba") == []
    assert machine.awaited(KEY) == ("c",)
    actions = contribute(machine, "c")
    assert computed(actions) == [("abcd", "abcd")]
    (due,) = actions
    assert isinstance(due, events.ComputeShard)
    assert (due.last, due.weights, due.shard.bounds) == ("c", (1, 1, 1, 1), (0, 10))


def test_contributors_are_sorted_whatever_the_order_of_arrival() -> None:
    rng = random.Random(4)
    for _ in range(20):
        order = "".join(rng.sample("abcd", 4))
        assert computed(contribute(reducer(), order)) == [("abcd", "abcd")]


def test_equal_contributions_are_named_and_equal_shards_of_others_are_not() -> None:
    """Where no sample has touched a shard it may be equal, while the norms of all of it differ."""
    machine = reducer()
    contribute(machine, "ca", hash=7, norm=2.0)
    contribute(machine, "b", hash=7, norm=3.0)
    (due,) = contribute(machine, "d", hash=8, norm=2.0)
    assert isinstance(due, events.ComputeShard)
    assert due.alike == (("a", "c"),)


def test_a_repeated_contribution_counts_once() -> None:
    machine = reducer()
    contribute(machine, "b")
    for resumed in (False, True):
        assert offer(machine, "b", resumed=resumed)[1] == []  # it is whole here: it waits
    assert machine.awaited(KEY) == ("a", "c", "d")


def test_it_is_computed_exactly_once() -> None:
    machine = reducer()
    actions = contribute(machine, "abcd")
    for event in (TICK, ViewUpdated(view("abcd"))):
        assert machine.handle(event, 1.0) == []
    answered = close(machine, actions)
    assert answered[:2] == [events.KeepReduction(KEY), events.ForgetContributions(KEY)]
    assert len([each for each in answered if isinstance(each, events.AnswerStream)]) == 4
    assert close(machine, actions) == []
    assert machine.handle(TICK, 1000.0) == []


def test_a_quorum_closes_after_the_grace() -> None:
    machine = reducer()
    contribute(machine, "a", now=1.0)
    assert machine.handle(TICK, 100.0) == []  # one of four is no quorum
    contribute(machine, "c", now=100.0)
    assert machine.wakes_at(100.0) == 100.0 + GRACE_S
    assert machine.handle(TICK, 100.0 + GRACE_S - 0.01) == []
    assert computed(machine.handle(TICK, 100.0 + GRACE_S)) == [("ac", "abcd")]


def test_the_grace_is_not_begun_again_by_a_further_contribution() -> None:
    machine = reducer()
    contribute(machine, "ab", now=10.0)
    contribute(machine, "c", now=20.0)
    assert computed(machine.handle(TICK, 10.0 + GRACE_S)) == [("abc", "abcd")]


def test_it_does_not_wait_for_the_dead() -> None:
    machine = reducer()
    contribute(machine, "abc", now=1.0)
    assert machine.handle(ViewUpdated(view("abc", suspect="d")), 4.0) == []
    dead = machine.handle(ViewUpdated(view("abc", dead="d")), 8.0)
    assert computed(dead) == [("abc", "abc")]


@pytest.mark.parametrize("gone", [{"left": "d"}, {"done": "d"}, {"ahead": "d"}])
def test_it_does_not_wait_for_a_peer_that_has_nothing_to_contribute(gone: dict[str, str]) -> None:
    machine = reducer(seen=view("abc", **gone))
    assert len(computed(contribute(machine, "abc", now=1.0))) == 1


def test_the_quorum_is_of_those_that_are_expected() -> None:
    machine = reducer(seen=view("ab", dead="cd"))
    contribute(machine, "a", now=1.0)
    assert computed(machine.handle(TICK, 1.0 + GRACE_S)) == [("a", "ab")]


def test_a_lost_quorum_is_waited_for_again() -> None:
    machine = reducer(seen=view("ab", dead="cd"))
    contribute(machine, "a", now=1.0)
    machine.handle(ViewUpdated(view("abcd")), 2.0)
    assert machine.handle(TICK, 1.0 + GRACE_S) == []


def test_a_contribution_from_outside_the_group_adds_nothing_and_is_answered() -> None:
    machine = reducer(seen=view("abcde"))
    outside, actions = offer(machine, "e")
    assert actions == []
    assert computed(contribute(machine, "abcd")) == [("abcd", "abcde")]
    closed = machine.handle(events.ShardComputed(KEY, 1), 1.0)
    assert events.AnswerStream(outside, KEY, 0) in closed
    late, answer = offer(machine, "e")
    assert answer == [events.AnswerStream(late, KEY, 0)]


def test_a_contribution_from_outside_is_let_go_when_the_round_does_not_close() -> None:
    machine = reducer(seen=view("abcde"))
    outside, _ = offer(machine, "e")
    (refused,) = machine.handle(TICK, machine.wakes_at(0.0))
    assert isinstance(refused, events.RefuseStream)
    assert (refused.stream, refused.kind, refused.faulty) == (outside, "pruned", False)


def test_who_is_outside_contributes_where_nobody_of_the_group_is_left() -> None:
    machine = reducer(me="e", seen=view("be", dead="acd"))
    elsewhere, led = offer(machine, "f")
    assert led == [events.RedirectStream(elsewhere, "b")]
    machine.handle(ViewUpdated(view("ef", dead="abcd")), 1.0)
    assert computed(contribute(machine, "e")) == [("e", "ef")]


def test_the_next_group_is_of_those_that_can_join_it() -> None:
    machine = reducer(seen=view("abcx", suspect="d", starting="e", done="f", dead="g"))
    assert computed(contribute(machine, "abcd")) == [("abcd", "abcdx")]


def test_a_shard_that_could_not_be_reduced_is_open_to_those_that_try_again() -> None:
    machine = reducer()
    (due,) = contribute(machine, "abcd")
    assert isinstance(due, events.ComputeShard)
    failed = machine.handle(events.ShardComputed(KEY, due.attempt, failed=True), 1.0)
    kinds = [each.kind for each in failed if isinstance(each, events.RefuseStream)]
    assert kinds == ["again"] * 4
    assert computed(contribute(machine, "abcd")) == [("abcd", "abcd")]


# ------------------------------------------------------------------------------- what is taken


def test_a_resumed_contribution_goes_on_where_it_broke_off() -> None:
    machine = reducer()
    first, _ = offer(machine, "b")
    machine.handle(events.ContributionBytes(first, 15), 0.0)
    machine.handle(events.ContributorGone(first), 0.0)
    again, actions = offer(machine, "b", resumed=True)
    taken = events.TakeContribution(again, KEY, "b", fresh=False)
    assert actions == [events.AskToResume(again, 15), taken]
    (verify,) = machine.handle(events.ContributionBytes(again, BYTES - 15), 0.0)
    assert isinstance(verify, events.VerifyContribution)


def test_a_resumed_one_of_which_nothing_is_here_begins_at_the_first_byte() -> None:
    stream, actions = offer(reducer(), "b", resumed=True)
    taken = events.TakeContribution(stream, KEY, "b", fresh=True)
    assert actions == [events.AskToResume(stream, 0), taken]


def test_a_later_stream_takes_over_from_an_earlier() -> None:
    machine = reducer()
    first, _ = offer(machine, "b")
    machine.handle(events.ContributionBytes(first, 15), 0.0)
    later, _ = offer(machine, "b", resumed=True)
    assert (machine.takes(first), machine.takes(later)) == (False, True)
    (refused,) = machine.handle(events.ContributionBytes(first, 0), 0.0)
    assert isinstance(refused, events.RefuseStream)
    assert (refused.stream, refused.kind, refused.faulty) == (first, "again", True)
    (verify,) = machine.handle(events.ContributionBytes(later, BYTES - 15), 0.0)
    assert isinstance(verify, events.VerifyContribution)


def test_other_values_withdraw_what_was_here() -> None:
    machine = reducer()
    contribute(machine, "abc")
    stream, _ = offer(machine, "b", hash=1)
    assert machine.awaited(KEY) == ("b", "d")
    assert contribute(machine, "d") == []
    machine.handle(events.ContributionBytes(stream, BYTES), 1.0)
    actions = machine.handle(events.ContributionVerified(stream), 1.0)
    assert computed(actions) == [("abcd", "abcd")]


def test_values_that_were_replaced_while_they_were_verified_do_not_count() -> None:
    """Else the mean would be of bytes that are only half here."""
    machine = reducer()
    contribute(machine, "acd")
    first, _ = offer(machine, "b")
    machine.handle(events.ContributionBytes(first, BYTES), 0.0)
    offer(machine, "b", hash=1)
    (refused,) = machine.handle(events.ContributionVerified(first), 0.0)
    assert isinstance(refused, events.RefuseStream)
    assert machine.awaited(KEY) == ("b",)


def test_nothing_can_be_withdrawn_while_the_mean_is_computed() -> None:
    machine = reducer()
    actions = contribute(machine, "abcd")
    stream, _ = offer(machine, "b", hash=1)
    machine.handle(events.ContributionBytes(stream, BYTES), 1.0)
    assert machine.handle(events.ContributionVerified(stream), 1.0) == []
    assert events.AnswerStream(stream, KEY, 0) in close(machine, actions)


def test_a_shard_without_contributions_never_closes() -> None:
    machine = reducer()
    contribute(machine, "b")
    offer(machine, "b", hash=1)
    assert machine.handle(ViewUpdated(view("a", dead="bcd")), 2.0) == []
    assert machine.handle(TICK, 1000.0) == []


def test_the_own_contribution_is_here_at_once_and_the_newest_counts() -> None:
    machine = reducer()
    contribute(machine, "bcd")
    stream = next(numbers)
    actions = machine.handle(events.OwnOffered(stream, KEY, GROUP, hash=5, weight=3), 1.0)
    assert events.TakeContribution(stream, KEY, "a", fresh=True) in actions
    assert computed(actions) == [("abcd", "abcd")]
    (due,) = [each for each in actions if isinstance(each, events.ComputeShard)]
    assert due.weights == (3, 1, 1, 1)


def test_a_damaged_frame_loses_nothing_of_what_came_before_it() -> None:
    machine = reducer()
    stream, _ = offer(machine, "b")
    machine.handle(events.ContributionBytes(stream, 15), 0.0)
    (refused,) = machine.handle(events.ContributionDamaged(stream, "damaged", again=True), 0.0)
    assert isinstance(refused, events.RefuseStream)
    assert (refused.kind, refused.faulty) == ("again", True)
    again, actions = offer(machine, "b", resumed=True)
    assert events.AskToResume(again, 15) in actions


def test_nothing_is_left_of_values_that_cannot_be_averaged() -> None:
    machine = reducer()
    stream, _ = offer(machine, "b")
    machine.handle(events.ContributionBytes(stream, BYTES), 0.0)
    (refused,) = machine.handle(events.ContributionDamaged(stream, "NaN", again=False), 0.0)
    assert isinstance(refused, events.RefuseStream)
    assert refused.kind == "invalid"
    again, actions = offer(machine, "b", resumed=True)
    assert events.AskToResume(again, 0) in actions


def test_who_ends_before_all_is_here_may_come_again() -> None:
    machine = reducer()
    stream, _ = offer(machine, "b")
    (refused,) = machine.handle(events.ContributorDone(stream), 0.0)
    assert isinstance(refused, events.RefuseStream)
    assert (refused.kind, refused.faulty) == ("again", True)
    assert "broke off" in refused.reason


def test_who_comes_while_the_mean_is_computed_gets_the_answer_and_is_not_in_it() -> None:
    machine = reducer(seen=view("abcd"))
    actions = machine.handle(ViewUpdated(view("abd", done="c")), 0.0)
    actions = contribute(machine, "abd")
    assert contribute(machine, "c") == []
    (due,) = [each for each in actions if isinstance(each, events.ComputeShard)]
    assert (due.contributors, due.last) == (("a", "b", "d"), "d")
    answers = [each for each in close(machine, actions) if isinstance(each, events.AnswerStream)]
    assert len(answers) == 4


@pytest.mark.parametrize(
    ("wrong", "kind", "faulty"),
    [
        ({"run": 8}, "run", False),
        ({"key": ShardKey(3, 0, 0)}, "invalid", True),
        ({"key": ShardKey(0, 0, 4)}, "invalid", False),
        ({"codec": 99}, "invalid", True),
        ({"elements": 11}, "invalid", True),
        ({"total_bytes": 44}, "invalid", True),
        ({"weight": 21}, "invalid", True),
        ({"peer": "x"}, "again", True),  # gossip may not have told of it yet
        ({"group": OTHER_GROUP}, "group", False),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    wrong: dict[str, Any], kind: str, faulty: bool
) -> None:
    machine = reducer()
    stream, actions = offer(machine, **wrong)
    (refused,) = actions
    assert isinstance(refused, events.RefuseStream)
    assert (refused.stream, refused.kind, refused.faulty) == (stream, kind, faulty)
    assert computed(contribute(machine, "abcd")) == [("abcd", "abcd")]


# ------------------------------------------------------------------------------ who may contribute


def test_it_holds_back_until_it_knows_its_own_state() -> None:
    machine = reducer(version=None)
    stream, held = offer(machine)
    assert held == []
    taken = machine.handle(events.Advanced(0, 0, GROUP), 1.0)
    assert taken == [events.TakeContribution(stream, KEY, "d", fresh=True)]


def test_it_holds_a_round_that_it_has_not_come_to() -> None:
    machine, next_key = reducer(version=3), ShardKey(0, 4, 0)
    stream, held = offer(machine, key=next_key)
    assert held == []
    taken = machine.handle(events.Advanced(0, 4, GROUP), 1.0)
    assert events.TakeContribution(stream, next_key, "d", fresh=True) in taken


def test_it_holds_nobody_for_longer_than_a_round_may_take() -> None:
    machine = reducer(version=None)
    stream, _ = offer(machine, now=1.0)
    assert machine.wakes_at(1.0) == 1.0 + ROUND_S
    assert machine.handle(TICK, 1.0 + ROUND_S - 0.01) == []
    (refused,) = machine.handle(TICK, 1.0 + ROUND_S)
    assert isinstance(refused, events.RefuseStream)
    assert (refused.stream, refused.kind) == (stream, "pruned")


@pytest.mark.parametrize("is_closed", [False, True])
def test_another_group_is_refused(is_closed: bool) -> None:
    """Its shards are others: neither its contribution nor our answer would fit."""
    assert answer(closed() if is_closed else reducer(), group=OTHER_GROUP) == "group"


def test_the_late_get_the_answer_from_where_they_have_it() -> None:
    stream, actions = offer(closed(), "d", reduction_offset=12)
    assert actions == [events.AnswerStream(stream, KEY, 12)]


def test_a_learned_reduction_is_answered_and_ends_the_own_attempt() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "b")
    learned = machine.handle(events.ReductionLearned(KEY), 1.0)
    assert learned[0] == events.KeepReduction(KEY)
    assert any(isinstance(each, events.AnswerStream) for each in learned)
    assert answer(machine) == "answer"
    machine.handle(ViewUpdated(view("bcd", dead="a")), 2.0)
    assert answer(machine) == "answer"
    assert machine.awaited(KEY) == ()
    assert machine.handle(TICK, 1000.0) == []


def test_a_mean_that_is_ready_after_another_was_learned_is_dropped() -> None:
    """Others have got the learned one from here: all later ones must get the same."""
    machine = reducer("b", view("bcd", dead="a"))
    actions = contribute(machine, "bcd")
    machine.handle(events.ReductionLearned(KEY), 1.0)
    assert close(machine, actions) == []


def test_answers_are_kept_for_a_round_and_then_pruned() -> None:
    machine = closed()
    assert machine.handle(events.Advanced(0, 1, GROUP), 1.0) == []
    assert answer(machine) == "answer"
    assert machine.handle(events.Advanced(0, 2, GROUP), 1.0) == [events.ForgetShard(KEY)]
    assert answer(machine) == "pruned"


def test_a_peer_that_goes_back_forgets_what_it_has_closed_since() -> None:
    machine, later = closed(), ShardKey(0, 1, 0)
    machine.handle(events.Advanced(0, 1, GROUP), 1.0)
    machine.handle(events.ReductionLearned(later), 1.0)
    machine.handle(events.Advanced(0, 2, GROUP), 1.0)
    assert machine.handle(events.Advanced(0, 1, GROUP), 1.0) == [events.ForgetShard(later)]
    assert answer(machine, later) == "take"


def test_pruning_leaves_other_fragments_alone() -> None:
    machine, other = reducer(), ShardKey(1, 0, 0)
    machine.handle(events.Advanced(1, 0, GROUP), 0.0)
    machine.handle(events.ReductionLearned(other), 1.0)
    machine.handle(events.Advanced(0, 9, GROUP), 1.0)
    assert answer(machine, other) == "answer"


def test_a_round_that_was_applied_through_others_is_over() -> None:
    machine = reducer()
    machine.handle(events.Advanced(0, 1, GROUP), 1.0)
    assert answer(machine) == "pruned"


def test_a_shard_that_others_still_fill_stays_open_after_it_advanced() -> None:
    machine = reducer()
    contribute(machine, "abc")
    machine.handle(events.Advanced(0, 1, GROUP), 1.0)
    assert answer(machine) == "take"


# --------------------------------------------------------------------------------- successors


def test_a_successor_redirects_while_any_peer_above_is_usable() -> None:
    machine = reducer("c")
    assert answer(machine) == "to a"
    machine.handle(ViewUpdated(view("bcd", suspect="a")), 1.0)
    assert answer(machine) == "to b"
    machine.handle(ViewUpdated(view("cd", suspect="a", dead="b")), 2.0)
    assert answer(machine) == "take"


def test_a_successor_waits_for_the_suspected_until_they_are_dead() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "bcd", now=1.0)
    assert machine.awaited(KEY) == ("a",)
    dead = machine.handle(ViewUpdated(view("bcd", dead="a")), 5.0)
    assert computed(dead) == [("bcd", "bcd")]


def test_a_successor_gives_the_shard_back_when_the_reducer_returns() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "bc")
    forgotten, *told = machine.handle(ViewUpdated(view("abcd")), 2.0)
    assert forgotten == events.ForgetContributions(KEY)
    assert [each.peer for each in told if isinstance(each, events.RedirectStream)] == ["a", "a"]
    assert answer(machine) == "to a"
    assert machine.handle(TICK, 1000.0) == []


def test_a_successor_that_computes_already_goes_on() -> None:
    machine = reducer("b", view("bcd", dead="a"))
    actions = contribute(machine, "bcd")
    assert machine.handle(ViewUpdated(view("abcd")), 2.0) == []
    close(machine, actions)
    assert answer(machine) == "answer"


def test_a_successor_begins_again_after_it_has_given_back() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    contribute(machine, "bc", now=1.0)
    machine.handle(ViewUpdated(view("abcd")), 2.0)
    machine.handle(ViewUpdated(view("bcd", dead="a")), 3.0)
    assert contribute(machine, "d", now=3.0) == []
    assert machine.awaited(KEY) == ("b", "c")


def test_what_comes_for_a_shard_that_was_handed_back_meanwhile_goes_on_elsewhere() -> None:
    machine = reducer("b", view("bcd", suspect="a"))
    stream, _ = offer(machine, "d")
    contribute(machine, "c")
    machine.handle(ViewUpdated(view("abcd")), 2.0)
    machine.handle(events.ContributionBytes(stream, BYTES), 2.0)
    assert machine.handle(events.ContributionVerified(stream), 2.0) == [
        events.RedirectStream(stream, "a")
    ]


# ------------------------------------------------------------------------------- other groups


def test_another_group_for_the_same_round_never_closes_what_the_first_laid_out() -> None:
    """A state adopted while a shard is open may bring another group, and with it other shards."""
    machine = reducer(seen=view("abcde"))
    contribute(machine, "abc")
    actions = machine.handle(events.Advanced(0, 0, OTHER_GROUP), 1.0)
    assert events.ForgetShard(KEY) in actions
    assert computed(actions + machine.handle(TICK, 1000.0)) == []
    assert machine.awaited(KEY) == ()


def test_another_group_begins_again() -> None:
    machine = reducer(seen=view("abcde"))
    contribute(machine, "abcd")
    machine.handle(events.ReductionLearned(KEY), 1.0)
    machine.handle(events.Advanced(0, 0, OTHER_GROUP), 2.0)
    assert contribute(machine, "abcd", 3.0, OTHER_GROUP) == []
    assert computed(contribute(machine, "e", 3.0, OTHER_GROUP)) == [("abcde", "abcde")]


def test_a_mean_of_the_former_layout_is_dropped() -> None:
    machine = reducer()
    actions = contribute(machine, "abcd")
    machine.handle(events.Advanced(0, 0, OTHER_GROUP), 1.0)
    assert close(machine, actions) == []


def test_the_same_group_again_forgets_nothing() -> None:
    machine = reducer()
    contribute(machine, "abc")
    assert machine.handle(events.Advanced(0, 0, GROUP), 1.0) == []
    assert computed(contribute(machine, "d")) == [("abcd", "abcd")]


def test_another_group_leaves_other_rounds_and_fragments_alone() -> None:
    machine, other = closed(), ShardKey(1, 0, 0)
    machine.handle(events.Advanced(1, 0, GROUP), 0.0)
    machine.handle(events.ReductionLearned(other), 1.0)
    machine.handle(events.Advanced(0, 1, GROUP), 1.0)
    machine.handle(events.Advanced(0, 1, OTHER_GROUP), 1.0)
    assert answer(machine) == "answer"
    assert answer(machine, other) == "answer"
