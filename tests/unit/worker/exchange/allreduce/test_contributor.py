"""Contributing: where each shard goes, what is said on a stream, and how a round ends."""

from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.views import view
from tests.unit.worker.exchange.allreduce.layouts import ByName
from worker.exchange.allreduce import events
from worker.exchange.allreduce.contributor import Contributor, OwnRound
from worker.exchange.allreduce.dialogue import ReductionHeader
from worker.exchange.types import (
    Failed,
    GivenUp,
    RoundConfig,
    RoundTick,
    ShardKey,
    Succeeded,
    Suspect,
    View,
    ViewUpdated,
)

CONFIG = RoundConfig(retry_s=0.25)
DEADLINE = 60.0
ORDERS = ("abc", "bca", "cab")
ONE = ("abc",)
FROM_AFAR = ("bca",)
TICK = RoundTick()
SIZE = 20  # of a reduction


def begin(seen: View | None = None, orders: tuple[str, ...] = ORDERS, me: str = "a") -> Contributor:
    own = OwnRound(2, 7, ("a", "b", "c"), tuple(range(100, 100 + len(orders))), weight=5)
    return Contributor(me, own, ByName(orders), seen or view("abc"), CONFIG, DEADLINE)


def key(shard: int) -> ShardKey:
    return ShardKey(2, 7, shard)


def header(contributors: str = "abc", last: str = "c", hash_: int = 9) -> ReductionHeader:
    codec = ByName.reduction_codec.wire_id
    return ReductionHeader(tuple(contributors), ("a", "b", "c", "d"), codec, SIZE, hash_, last)


def opened(actions: list[events.ContributorAction]) -> list[tuple[int, str, int, bool]]:
    """(shard, peer, attempt, resumed) of each try that begins."""
    return [
        (a.header.key.shard, a.peer, a.attempt, a.header.resumed)
        for a in actions
        if isinstance(a, events.OpenTry)
    ]


def others(actions: list[events.ContributorAction]) -> list[events.ContributorAction]:
    return [action for action in actions if not isinstance(action, events.OpenTry)]


def reduce(
    machine: Contributor, shard: int, attempt: int, now: float, head: ReductionHeader | None = None
) -> list[events.ContributorAction]:
    """The whole answer comes; what follows from it."""
    machine.handle(events.ReductionBegun(shard, attempt, head or header()), now)
    came = machine.handle(events.ReductionBytes(shard, attempt, SIZE), now)
    assert events.DecodeReduction(key(shard), attempt) in came
    return machine.handle(events.ReductionDecoded(shard, attempt), now)


def used(shard: int, attempt: int) -> list[events.ContributorAction]:
    return [events.UseReduction(key(shard), attempt), events.EndTry(key(shard), attempt)]


# --------------------------------------------------------------------------------- where shards go


def test_every_shard_goes_to_the_first_of_its_order() -> None:
    machine = begin()
    actions = machine.handle(TICK, 0.0)
    assert opened(actions) == [(0, "a", 1, False), (1, "b", 1, False), (2, "c", 1, False)]
    assert others(actions) == [events.SendContribution(key(k), 1, 0) for k in (1, 2)]
    assert machine.handle(TICK, 0.1) == []
    assert machine.waiting_for == ("a", "b", "c")


def test_the_header_says_what_comes() -> None:
    (first, *_) = begin().handle(TICK, 0.0)
    assert isinstance(first, events.OpenTry)
    found = first.header
    assert (found.run, found.key, found.sender, found.weight) == (7, key(0), "a", 5)
    assert (found.elements, found.total_bytes, found.hash) == (10, 40, 100)
    assert (found.codec, found.group) == (ByName.codec.wire_id, hash(("a", "b", "c")))
    assert (found.reduction_offset, found.resumed) == (0, False)


def test_a_suspected_or_unknown_reducer_is_passed_over() -> None:
    actions = begin(view("c", suspect="b")).handle(TICK, 0.0)  # nobody has heard of a
    assert opened(actions) == [(k, "c", 1, False) for k in range(3)]


def test_a_shard_waits_while_nobody_can_take_it() -> None:
    machine = begin(view("", suspect="ab", dead="c"))
    assert machine.handle(TICK, 0.0) == []
    assert machine.waiting_for == ()
    assert machine.wakes_at(0.0) == DEADLINE
    actions = machine.handle(ViewUpdated(view("b", suspect="a", dead="c")), 3.0)
    assert opened(actions) == [(k, "b", 1, False) for k in range(3)]


def test_shards_for_one_peer_go_one_after_another() -> None:
    machine = begin(view("b", suspect="ac"))
    assert others(machine.handle(TICK, 0.0)) == [events.SendContribution(key(0), 1, 0)]
    sent = machine.handle(events.ContributionSent(0, 1), 1.0)
    assert sent == [events.SendContribution(key(1), 1, 0)]
    reduced = reduce(machine, 1, 1, 2.0)  # the answer came before all was sent
    assert reduced == [*used(1, 1), events.SendContribution(key(2), 1, 0)]
    assert machine.handle(events.ContributionSent(2, 1), 3.0) == []


def test_a_waiting_shard_that_ends_leaves_the_others_their_turn() -> None:
    machine = begin(view("b", suspect="ac"))
    machine.handle(TICK, 0.0)
    broken = machine.handle(events.ContributionRefused(1, 1, "again", "no room"), 1.0)
    assert broken == [events.EndTry(key(1), 1)]
    sent = machine.handle(events.ContributionSent(0, 1), 1.0)
    assert sent == [events.SendContribution(key(2), 1, 0)]


def test_the_next_in_order_takes_over_at_once_when_the_reducer_is_suspected() -> None:
    machine = begin()
    machine.handle(TICK, 0.0)
    actions = machine.handle(ViewUpdated(view("bc", suspect="a")), 2.0)
    assert events.EndTry(key(0), 1, taken_over=True) in actions
    assert opened(actions) == [(0, "b", 2, False)]


def test_a_stream_at_a_usable_peer_goes_on_when_a_better_one_appears() -> None:
    machine = begin(view("bc", suspect="a"), ONE)
    machine.handle(TICK, 0.0)
    assert machine.handle(ViewUpdated(view("abc")), 1.0) == []
    assert reduce(machine, 0, 1, 2.0) == [*used(0, 1), Succeeded()]


# ------------------------------------------------------------------------------- another try


@pytest.mark.parametrize(
    ("ending", "suspects"),
    [
        (events.TryBroken(0, 1, "reset"), True),
        (events.TryBroken(0, 1), True),
        (events.ContributionRefused(0, 1, "again", "no room"), False),
        (events.AnswerDamaged(0, 1, "not a message"), False),
    ],
)
def test_a_try_that_came_to_nothing_is_resumed_at_the_same_peer(
    ending: events.ContributorEvent, suspects: bool
) -> None:
    machine = begin(orders=FROM_AFAR)
    machine.handle(TICK, 0.0)
    ended = machine.handle(ending, 1.0)
    assert ended == [events.EndTry(key(0), 1), *([Suspect("b")] if suspects else [])]
    assert machine.wakes_at(1.0) == 1.25
    assert machine.handle(TICK, 1.2) == []
    again = machine.handle(TICK, 1.25)
    assert opened(again) == [(0, "b", 2, True)]
    assert others(again) == []  # it waits for the reducer to say what is there
    resumed = machine.handle(events.ContributionResumed(0, 2, 12), 1.4)
    assert resumed == [events.SendContribution(key(0), 2, 12)]


def test_more_than_all_cannot_be_there() -> None:
    machine = begin(orders=FROM_AFAR)
    machine.handle(TICK, 0.0)
    machine.handle(events.TryBroken(0, 1), 1.0)
    machine.handle(TICK, 1.25)
    resumed = machine.handle(events.ContributionResumed(0, 2, 999), 1.4)
    assert resumed == [events.SendContribution(key(0), 2, 40)]


def test_a_resume_that_nobody_has_asked_for_ends_the_try() -> None:
    machine = begin(orders=FROM_AFAR)
    machine.handle(TICK, 0.0)
    assert machine.handle(events.ContributionResumed(0, 1, 4), 1.0) == [events.EndTry(key(0), 1)]


def test_a_retry_pause_ends_early_when_the_reducer_is_suspected_meanwhile() -> None:
    machine = begin(orders=ONE)
    machine.handle(TICK, 0.0)
    machine.handle(events.TryBroken(0, 1, "reset"), 1.0)
    actions = machine.handle(ViewUpdated(view("bc", suspect="a")), 1.1)
    actions += machine.handle(TICK, 1.25)
    assert opened(actions) == [(0, "b", 2, False)]


def test_a_try_elsewhere_makes_the_next_try_a_fresh_one() -> None:
    machine = begin(orders=ONE)
    machine.handle(TICK, 0.0)
    machine.handle(ViewUpdated(view("bc", suspect="a")), 1.0)
    machine.handle(ViewUpdated(view("abc")), 1.1)
    actions = machine.handle(events.ContributionRedirected(0, 2, "a"), 1.2)
    assert opened(actions) == [(0, "a", 3, False)]


def test_a_redirect_that_our_view_agrees_with_is_followed_at_once() -> None:
    machine = begin(view("bc", suspect="a"), ONE)
    machine.handle(TICK, 0.0)
    machine.handle(ViewUpdated(view("abc")), 0.9)
    actions = machine.handle(events.ContributionRedirected(0, 1, "a"), 1.0)
    assert opened(actions) == [(0, "a", 2, False)]


def test_a_redirect_to_a_peer_that_we_doubt_is_not_followed_but_asked_again() -> None:
    machine = begin(view("bc", suspect="a"), ONE)
    machine.handle(TICK, 0.0)
    redirected = machine.handle(events.ContributionRedirected(0, 1, "a"), 1.0)
    assert redirected == [events.EndTry(key(0), 1)]
    assert opened(machine.handle(TICK, 1.25)) == [(0, "b", 2, True)]


# -------------------------------------------------------------------------------- the reduction


def test_a_reduction_goes_on_where_it_broke_off() -> None:
    machine = begin(orders=FROM_AFAR)
    machine.handle(TICK, 0.0)
    begun = machine.handle(events.ReductionBegun(0, 1, header()), 1.0)
    assert begun == [events.ReceiveReduction(key(0), 1, header(), fresh=True)]
    assert machine.receives(0, 1)
    assert machine.handle(events.ReductionBytes(0, 1, 15), 1.0) == []
    machine.handle(events.TryBroken(0, 1), 1.1)
    (again,) = machine.handle(TICK, 1.35)
    assert isinstance(again, events.OpenTry)
    assert again.header.reduction_offset == 15
    begun = machine.handle(events.ReductionBegun(0, 2, header()), 1.4)
    assert begun == [events.ReceiveReduction(key(0), 2, header(), fresh=False)]
    came = machine.handle(events.ReductionBytes(0, 2, 5), 1.4)
    assert came == [events.DecodeReduction(key(0), 2)]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(header(), total_bytes=24),
        replace(header(), codec=99),
        replace(header(), last="d"),
        replace(header(), hash=10),  # another one than before
    ],
)
def test_what_was_kept_of_a_reduction_is_dropped_when_the_next_does_not_fit(
    wrong: ReductionHeader,
) -> None:
    machine = begin(orders=FROM_AFAR)
    machine.handle(TICK, 0.0)
    machine.handle(events.ReductionBegun(0, 1, header()), 1.0)
    machine.handle(events.ReductionBytes(0, 1, 15), 1.0)
    machine.handle(events.TryBroken(0, 1), 1.1)
    machine.handle(TICK, 1.35)
    assert machine.handle(events.ReductionBegun(0, 2, wrong), 1.4) == [events.EndTry(key(0), 2)]
    (again,) = machine.handle(TICK, 1.65)
    assert isinstance(again, events.OpenTry)
    assert again.header.reduction_offset == 0


def test_an_empty_reduction_is_whole_with_its_header() -> None:
    own = OwnRound(2, 7, ("a", "b"), (1,))
    machine = Contributor("a", own, ByName(("ba",), elements=0), view("ab"), CONFIG, DEADLINE)
    machine.handle(TICK, 0.0)
    begun = machine.handle(events.ReductionBegun(0, 1, replace(header(), total_bytes=0)), 1.0)
    assert events.DecodeReduction(key(0), 1) in begun


def test_a_reduction_of_the_own_is_here_at_once() -> None:
    machine = begin(orders=ONE)
    machine.handle(TICK, 0.0)
    begun = machine.handle(events.ReductionBegun(0, 1, header(), whole=True), 1.0)
    assert events.DecodeReduction(key(0), 1) in begun


# ------------------------------------------------------------------------------- how rounds end


def test_it_succeeds_once_all_shards_are_reduced_and_then_stays_silent() -> None:
    machine = begin()
    machine.handle(TICK, 0.0)
    assert reduce(machine, 0, 1, 1.0) == used(0, 1)
    assert reduce(machine, 2, 1, 1.0) == used(2, 1)
    assert machine.waiting_for == ("b",)
    assert reduce(machine, 1, 1, 1.0)[-1] == Succeeded()
    assert machine.handle(events.ReductionDecoded(1, 1), 1.0) == []
    assert machine.handle(TICK, DEADLINE + 1) == []
    assert machine.wakes_at(1.0) == float("inf")


def test_what_a_round_came_to() -> None:
    machine = begin()
    machine.handle(TICK, 0.0)
    reduce(machine, 1, 1, 1.0, header("abc", last="c"))
    assert machine.counted == ((10, 20),)
    reduce(machine, 0, 1, 2.0, header("bc", last="c"))
    reduce(machine, 2, 1, 3.0, header("abc", last="c"))
    assert machine.contributors == 2
    assert machine.next_group == ("a", "b", "c", "d")
    assert (machine.counted, machine.missed) == (((10, 20), (20, 30)), ((0, 10),))
    assert machine.waited_for == "c"


def test_where_no_peer_was_the_last_everywhere_the_slowest_reducer_was_waited_for() -> None:
    machine = begin()
    machine.handle(TICK, 0.0)
    for shard, last in ((2, "c"), (0, "a"), (1, "c")):
        reduce(machine, shard, 1, 1.0, header(last=last))
    assert machine.waited_for == "b"


@pytest.mark.parametrize("kind", ["group", "pruned", "invalid", "run"])
def test_a_refusal_ends_the_round_and_the_other_streams(kind: Any) -> None:
    machine = begin()
    machine.handle(TICK, 0.0)
    reduce(machine, 1, 1, 0.5)
    refused = events.ContributionRefused(2, 1, kind, "no")
    ended = [events.EndTry(key(0), 1), events.EndTry(key(2), 1)]
    assert machine.handle(refused, 1.0) == [*ended, Failed("c: no", ("a", "c"))]
    assert machine.handle(TICK, 2.0) == []


def test_a_round_that_is_given_up_fails() -> None:
    machine = begin(orders=ONE)
    machine.handle(TICK, 0.0)
    ended = machine.handle(GivenUp("another state is better"), 1.0)
    assert ended == [events.EndTry(key(0), 1), Failed("another state is better", ("a",))]


def test_the_deadline_ends_the_round_with_the_reasons_and_who_did_not_answer() -> None:
    machine = begin()
    machine.handle(TICK, 0.0)
    reduce(machine, 0, 1, 1.0)
    machine.handle(events.TryBroken(1, 1, "reset"), 1.0)
    machine.handle(TICK, 1.25)
    assert machine.handle(TICK, DEADLINE - 0.01) == []
    assert machine.handle(TICK, DEADLINE) == [
        events.EndTry(key(1), 2),
        events.EndTry(key(2), 1),
        Failed("the round's deadline has passed; b: reset", ("b", "c")),
    ]


def test_an_answer_at_the_deadline_still_counts() -> None:
    machine = begin(orders=ONE)
    machine.handle(TICK, 0.0)
    machine.handle(events.ReductionBegun(0, 1, header(), whole=True), 1.0)
    assert machine.handle(events.ReductionDecoded(0, 1), DEADLINE)[-1] == Succeeded()


@pytest.mark.parametrize(
    "late",
    [
        events.ContributionResumed(0, 1, 3),
        events.ContributionSent(0, 1),
        events.ContributionRedirected(0, 1, "c"),
        events.ContributionRefused(0, 1, "group", "too late"),
        events.ReductionBegun(0, 1, header()),
        events.ReductionBytes(0, 1, SIZE),
        events.ReductionDecoded(0, 1),
        events.AnswerDamaged(0, 1, "what"),
        events.TryBroken(0, 1, "reset"),
    ],
)
def test_what_an_earlier_try_reports_is_ignored(late: events.ContributorEvent) -> None:
    machine = begin(orders=ONE)
    machine.handle(TICK, 0.0)
    machine.handle(ViewUpdated(view("bc", suspect="a")), 1.0)
    assert machine.handle(late, 1.1) == []
    assert machine.waiting_for == ("b",)


def test_a_reduced_shard_is_not_sent_again_when_its_reducer_dies() -> None:
    machine = begin()
    machine.handle(TICK, 0.0)
    reduce(machine, 0, 1, 1.0)
    assert machine.handle(ViewUpdated(view("bc", dead="a")), 2.0) == []
