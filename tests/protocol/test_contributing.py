"""Contributing: where each shard goes, when it is tried again elsewhere, and how a round ends."""

import pytest

from tests.protocol.views import view
from worker.exchange.allreduce.contributor import (
    Action,
    Broken,
    CancelExchange,
    Contributing,
    Failed,
    OpenExchange,
    Redirected,
    Reduced,
    Refused,
    RoundTick,
    Succeeded,
    Suspect,
    ViewUpdated,
)
from worker.exchange.types import RoundConfig, ShardKey

CONFIG = RoundConfig(retry_s=0.25)
DEADLINE = 60.0
ORDERS = ("abc", "bca", "cab")


def begin(peers: str = "abc", orders: tuple[str, ...] = ORDERS, **others: str) -> Contributing:
    return Contributing("a", 2, 7, orders, view(peers, **others), CONFIG, DEADLINE)


def key(shard: int) -> ShardKey:
    return ShardKey(2, 7, shard)


def opened(shard: int, peer: str, attempt: int, resumed: bool = False) -> OpenExchange:
    return OpenExchange(key(shard), peer, attempt, resumed)


def test_every_shard_goes_to_the_first_of_its_order() -> None:
    machine = begin()
    assert machine.step(RoundTick(), 0.0) == [
        opened(0, "a", 1),
        opened(1, "b", 1),
        opened(2, "c", 1),
    ]
    assert machine.step(RoundTick(), 0.1) == []
    assert machine.waiting_for == ("a", "b", "c")


def test_a_suspected_or_unknown_reducer_is_passed_over() -> None:
    machine = begin("c", suspect="b")  # nobody has heard of a
    assert machine.step(RoundTick(), 0.0) == [
        opened(0, "c", 1),
        opened(1, "c", 1),
        opened(2, "c", 1),
    ]


def test_a_shard_waits_while_nobody_can_take_it() -> None:
    machine = begin("", suspect="ab", dead="c")
    assert machine.step(RoundTick(), 0.0) == []
    assert machine.waiting_for == ()
    assert machine.step(ViewUpdated(view("b", suspect="a", dead="c")), 3.0) == [
        opened(0, "b", 1),
        opened(1, "b", 1),
        opened(2, "b", 1),
    ]


def test_it_succeeds_once_all_shards_are_reduced_and_then_stays_silent() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    assert machine.step(Reduced(0, 1), 1.0) == []
    assert machine.step(Reduced(2, 1), 1.0) == []
    assert machine.waiting_for == ("b",)
    assert machine.step(Reduced(1, 1), 1.0) == [Succeeded()]
    assert machine.step(Reduced(1, 1), 1.0) == []
    assert machine.step(RoundTick(), DEADLINE + 1) == []


def test_a_broken_link_raises_doubt_and_resumes_at_the_same_peer() -> None:
    machine = begin(orders=("abc",))
    machine.step(RoundTick(), 0.0)
    assert machine.step(Broken(0, 1, "reset", link=True), 1.0) == [Suspect("a")]
    assert machine.step(RoundTick(), 1.2) == []
    assert machine.step(RoundTick(), 1.25) == [opened(0, "a", 2, resumed=True)]
    assert machine.step(Broken(0, 2, "reset", link=True), 1.3) == [Suspect("a")]
    assert machine.step(RoundTick(), 1.55) == [opened(0, "a", 3, resumed=True)]


def test_a_busy_reducer_is_asked_again_without_doubt() -> None:
    machine = begin(orders=("abc",))
    machine.step(RoundTick(), 0.0)
    assert machine.step(Broken(0, 1, "no room", link=False), 1.0) == []
    assert machine.step(RoundTick(), 1.25) == [opened(0, "a", 2, resumed=True)]


def test_the_next_in_order_takes_over_at_once_when_the_reducer_is_suspected() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    actions = machine.step(ViewUpdated(view("bc", suspect="a")), 2.0)
    assert actions == [CancelExchange(key(0), 1), opened(0, "b", 2)]


def test_a_retry_pause_ends_early_when_the_reducer_is_suspected_meanwhile() -> None:
    machine = begin(orders=("abc",))
    machine.step(RoundTick(), 0.0)
    machine.step(Broken(0, 1, "reset", link=True), 1.0)
    actions = machine.step(ViewUpdated(view("bc", suspect="a")), 1.1)
    actions += machine.step(RoundTick(), 1.25)
    assert actions == [opened(0, "b", 2)]


def test_a_try_elsewhere_makes_the_next_try_a_fresh_one() -> None:
    machine = begin(orders=("abc",))
    machine.step(RoundTick(), 0.0)
    machine.step(ViewUpdated(view("bc", suspect="a")), 1.0)
    machine.step(ViewUpdated(view("abc")), 1.1)
    assert machine.step(Redirected(0, 2, "a"), 1.2) == [opened(0, "a", 3, resumed=False)]


def test_a_stream_at_a_usable_peer_goes_on_when_a_better_one_appears() -> None:
    machine = begin("bc", suspect="a", orders=("abc",))
    machine.step(RoundTick(), 0.0)
    assert machine.step(ViewUpdated(view("abc")), 1.0) == []
    assert machine.step(Reduced(0, 1), 2.0) == [Succeeded()]


def test_a_redirect_that_our_view_agrees_with_is_followed_at_once() -> None:
    machine = begin("bc", suspect="a", orders=("abc",))
    machine.step(RoundTick(), 0.0)
    machine.step(ViewUpdated(view("abc")), 0.9)
    assert machine.step(Redirected(0, 1, "a"), 1.0) == [opened(0, "a", 2)]


def test_a_redirect_to_a_peer_that_we_doubt_is_not_followed_but_asked_again() -> None:
    machine = begin("bc", suspect="a", orders=("abc",))
    machine.step(RoundTick(), 0.0)
    assert machine.step(Redirected(0, 1, "a"), 1.0) == []
    assert machine.step(RoundTick(), 1.25) == [opened(0, "b", 2, resumed=True)]


def test_a_refusal_ends_the_round_and_cancels_the_other_streams() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    machine.step(Reduced(1, 1), 0.5)
    *cancelled, last = machine.step(Refused(0, 1, "a: the groups differ"), 1.0)
    assert CancelExchange(key(2), 1) in cancelled
    assert CancelExchange(key(1), 1) not in cancelled
    assert last == Failed("a: the groups differ", ("a", "c"))
    assert machine.step(RoundTick(), 2.0) == []


def test_the_deadline_ends_the_round_with_the_reasons_and_who_did_not_answer() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    machine.step(Reduced(0, 1), 1.0)
    machine.step(Broken(1, 1, "b: reset", link=True), 1.0)
    machine.step(RoundTick(), 1.25)
    assert machine.step(RoundTick(), DEADLINE - 0.01) == []
    assert machine.step(RoundTick(), DEADLINE) == [
        CancelExchange(key(1), 2),
        CancelExchange(key(2), 1),
        Failed("the round's deadline has passed; b: reset", ("b", "c")),
    ]


def test_an_answer_at_the_deadline_still_counts() -> None:
    machine = begin(orders=("abc",))
    machine.step(RoundTick(), 0.0)
    assert machine.step(Reduced(0, 1), DEADLINE) == [Succeeded()]


@pytest.mark.parametrize(
    "late",
    [
        Reduced(0, 1),
        Redirected(0, 1, "c"),
        Broken(0, 1, "reset", link=True),
        Refused(0, 1, "too late"),
    ],
)
def test_what_an_earlier_try_reports_is_ignored(
    late: Reduced | Redirected | Broken | Refused,
) -> None:
    machine = begin(orders=("abc",))
    machine.step(RoundTick(), 0.0)
    machine.step(ViewUpdated(view("bc", suspect="a")), 1.0)
    assert machine.step(late, 1.1) == []
    assert machine.waiting_for == ("b",)


def test_a_reduced_shard_is_not_sent_again_when_its_reducer_dies() -> None:
    machine = begin()
    machine.step(RoundTick(), 0.0)
    machine.step(Reduced(0, 1), 1.0)
    assert machine.step(ViewUpdated(view("bc", dead="a")), 2.0) == []


def test_the_same_events_give_the_same_actions() -> None:
    def play() -> list[Action]:
        machine = begin()
        actions = machine.step(RoundTick(), 0.0)
        actions += machine.step(Broken(1, 1, "reset", link=True), 0.3)
        actions += machine.step(ViewUpdated(view("ac", suspect="b")), 0.4)
        actions += machine.step(RoundTick(), 0.6)
        return actions

    assert play() == play()
