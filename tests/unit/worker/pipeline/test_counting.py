"""When an iteration of a stage is over, and when what was counted in it is left out."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from worker.membership import Health, Member, Phase
from worker.pipeline.stage_call import Incarnation, Key
from worker.pipeline.tracker import IterationTracker, Orphans
from worker.training.inbox import IterationOver

A, B = Incarnation("a", 1), Incarnation("b", 1)
AGAIN = Incarnation("b", 2)


def origin(
    peer: str = "a",
    step: int = 0,
    phase: Phase = Phase.TRAINING,
    health: Health = Health.ALIVE,
) -> Member:
    return Member(peer, peer, epoch=1, phase=phase, health=health, step=step)


def counting_at(iteration: int = 5, **counted: set[int]) -> IterationTracker:
    counting = IterationTracker()
    counting.begin(iteration)
    for peer, microbatches in counted.items():
        for microbatch in microbatches:
            counting.counted(Key(iteration, Incarnation(peer, 1), microbatch))
    return counting


def test_over_when_every_origin_has_said_its_last_word() -> None:
    counting = counting_at(a={0, 1}, b={0})
    origins = [origin("a"), origin("b")]
    assert counting.over(origins, 0.0) is None
    counting.finished(5, A, [1, 0])
    assert counting.over(origins, 0.0) is None
    counting.finished(5, B, [0])
    assert counting.ended == 0
    assert counting.over(origins, 0.0) == IterationOver(5, discard=False)
    assert counting.ended == 5


@pytest.mark.parametrize("told", [[], [0], [0, 1, 2]])
def test_what_was_counted_otherwise_than_told_is_left_out(told: list[int]) -> None:
    counting = counting_at(a={0, 1})
    counting.finished(5, A, told)
    assert counting.over([origin()], 0.0) == IterationOver(5, discard=True)


def test_a_backward_that_failed_is_not_counted() -> None:
    counting = counting_at(a={0, 1})
    counting.failed(Key(5, A, 1))
    counting.failed(Key(5, B, 1))  # nor is one that never was
    counting.finished(5, A, [0])
    assert counting.over([origin()], 0.0) == IterationOver(5, discard=False)


def test_what_is_counted_again_is_nothing_new() -> None:
    counting = counting_at(a={0})
    assert not counting.counted(Key(5, A, 0))
    assert counting.counted(Key(5, A, 1))


def test_a_last_word_may_come_before_the_iteration_begins() -> None:
    counting = counting_at(4)
    counting.finished(5, A, [])
    counting.finished(4, A, [])
    counting.begin(5)
    assert counting.over([origin()], 0.0) == IterationOver(5)


def test_a_last_word_from_far_ahead_is_not_kept() -> None:
    """Nobody is that far ahead of a peer that it waits for; card by card it is told to be."""
    counting = counting_at(5)
    counting.finished(5000, A, [])
    counting.begin(5000)
    assert counting.over([origin(step=4999)], 0.0) is None


def test_of_last_words_before_this_peer_has_begun_the_latest_is_kept() -> None:
    counting = IterationTracker()
    counting.finished(4999, A, [])
    counting.finished(5000, A, [])
    counting.begin(4999)
    assert counting.over([origin(step=4998)], 0.0) == IterationOver(4999)  # it is further
    counting.begin(5000)
    assert counting.over([origin(step=4999)], 0.0) == IterationOver(5000)


def test_a_last_word_on_an_earlier_iteration_says_nothing() -> None:
    counting = counting_at(5)
    counting.finished(4, A, [])
    assert counting.over([origin()], 0.0) is None


@pytest.mark.parametrize("health", [Health.DEAD, Health.LEFT])
def test_nobody_waits_for_an_origin_that_is_gone(health: Health) -> None:
    counting = counting_at(a={0})
    counting.finished(5, A, [0])
    gone = origin("b", health=health)
    assert counting.over([origin("a"), gone], 0.0) == IterationOver(5)
    assert counting_at().over([gone], 0.0) is None  # with none left, until one comes


def test_a_suspected_origin_is_waited_for() -> None:
    counting = counting_at()
    counting.finished(5, A, [])
    assert counting.over([origin("a"), origin("b", health=Health.SUSPECT)], 0.0) is None


@pytest.mark.parametrize(("step", "waits"), [(0, False), (3, False), (4, True)])
def test_an_origin_about_to_start_is_waited_for_where_it_will_begin(step: int, waits: bool) -> None:
    counting = counting_at(5)
    counting.finished(5, A, [])
    over = counting.over([origin("a"), origin("b", step, Phase.READY)], 0.0)
    assert (over is None) == waits


def heard_in_the_visit(counting: IterationTracker) -> None:
    counting.began(Key(5, B, 0))


def heard_in_what_is_counted(counting: IterationTracker) -> None:
    counting.counted(Key(5, B, 0))


def heard_in_the_last_word(counting: IterationTracker) -> None:
    counting.finished(4, B, [])


@pytest.mark.parametrize(
    ("heard", "mine"),
    [(heard_in_the_visit, []), (heard_in_what_is_counted, [0]), (heard_in_the_last_word, [])],
)
def test_an_origin_that_gossip_has_not_yet_told_to_have_started_is_waited_for(
    heard: Callable[[IterationTracker], None], mine: list[int]
) -> None:
    counting = counting_at(a=set())
    heard(counting)
    counting.finished(5, A, [])
    origins = [origin("a"), origin("b", 0, Phase.READY)]
    assert counting.over(origins, 0.0) is None
    counting.finished(5, B, mine)
    assert counting.over(origins, 0.0) == IterationOver(5)


@pytest.mark.parametrize(("heard", "waits"), [(3, False), (4, True), (5, True)])
def test_an_origin_that_gossip_has_as_not_even_ready_is_waited_for_once_heard(
    heard: int, waits: bool
) -> None:
    counting = counting_at(a=set())
    counting.heard(heard, B)
    counting.finished(5, A, [])
    over = counting.over([origin("a"), origin("b", 0, Phase.STARTING)], 0.0)
    assert (over is None) == waits


def test_an_origin_that_is_only_starting_keeps_nobody_from_the_first_iteration() -> None:
    counting = counting_at(1)
    counting.finished(1, A, [])
    origins = [origin("a"), origin("b", 0, Phase.STARTING)]
    assert counting.over(origins, 0.0) == IterationOver(1)


def test_what_an_origin_said_in_an_earlier_life_says_nothing_of_this_one() -> None:
    counting = counting_at(a=set())
    counting.finished(4, B, [])
    counting.finished(5, A, [])
    before = origin("b", 4)
    assert counting.over([origin("a"), before], 0.0) is None
    fetching = replace(before, epoch=2, phase=Phase.READY, step=0)
    assert counting.over([origin("a"), fetching], 0.0) == IterationOver(5)


def test_an_origin_that_has_started_again_is_waited_for_before_gossip_tells_of_it() -> None:
    """Its visits are here, and the card is that of its earlier life."""
    counting = counting_at(a=set())
    counting.finished(5, A, [])
    counting.counted(Key(5, AGAIN, 0))
    counting.heard(5, B)  # late, and of no account
    before = origin("b", step=4, health=Health.SUSPECT)
    assert counting.over([origin("a"), before], 0.0) is None
    counting.finished(5, AGAIN, [0])
    assert counting.over([origin("a"), before], 0.0) == IterationOver(5)


def goes_on(counting: IterationTracker, iteration: int) -> IterationOver | None:
    """What a and b say of it in the lives that gossip tells of."""
    counting.finished(iteration, A, [])
    counting.finished(iteration, B, [])
    return counting.over([origin("a", iteration - 1), origin("b", iteration - 1)], 20.0)


def test_a_life_that_gossip_never_tells_of_is_waited_for_once() -> None:
    """Its only word was forged or damaged on the way; the origin itself goes on."""
    counting = counting_at(5)
    origins = [origin("a", 4), origin("b", 4)]
    for word in (A, B, Incarnation("b", 2**63), Incarnation("b", 2**62)):
        counting.finished(5, word, [])
    assert counting.over(origins, 0.0) == IterationOver(5)
    counting.begin(6)
    counting.finished(6, A, [])
    counting.finished(6, B, [])
    assert counting.over(origins, 1.9) is None
    assert counting.over(origins, 2.0) == IterationOver(6)
    for iteration in range(7, 20):
        counting.begin(iteration)
        assert goes_on(counting, iteration) == IterationOver(iteration)


def test_a_life_that_gossip_tells_of_late_is_waited_for_on() -> None:
    counting = counting_at(a=set())
    counting.finished(5, A, [])
    counting.heard(5, AGAIN)
    assert counting.over([origin("a"), origin("b", 4)], 0.0) is None
    again = replace(origin("b", 0, Phase.STARTING), epoch=AGAIN.epoch)
    assert counting.over([origin("a"), again], 1.0) is None
    assert counting.over([origin("a"), again], 9.0) is None


@pytest.mark.parametrize("begun", [0, 5], ids=["before", "after"])
def test_word_from_far_ahead_holds_nothing_up(begun: int) -> None:
    """Nor does it have this iteration left out, as that of an origin that has gone on."""
    counting = IterationTracker()
    if begun:
        counting.begin(begun)
    for life in (A, Incarnation("a", 2**63), Incarnation("b", 2**63)):
        counting.finished(2**60, life, [])
    if not begun:
        counting.begin(5)
    counting.counted(Key(5, A, 0))
    origins = [origin("a", 4), origin("b", 4, Phase.STARTING)]
    assert counting.over(origins, 0.0) is None
    counting.finished(5, A, [0])
    assert counting.over(origins, 0.0) == IterationOver(5, discard=False)


def test_an_origin_that_has_ended_its_run_is_heard_out() -> None:
    counting = counting_at(5, b={0})
    counting.finished(5, A, [])
    origins = [origin("a"), origin("b", 5, Phase.DONE)]
    assert counting.over(origins, 0.0) is None
    counting.finished(5, B, [0])
    assert counting.over(origins, 0.0) == IterationOver(5)


def test_an_origin_further_on_is_not_waited_for_where_nothing_of_it_is_counted() -> None:
    assert counting_at(5).over([origin(step=4)], 0.0) is None
    assert counting_at(5).over([origin(step=5)], 0.0) == IterationOver(5, discard=False)


def test_what_is_counted_of_an_origin_further_on_is_left_out_after_a_while() -> None:
    counting = counting_at(5, a={0}, b={1})
    origins = [origin("a", step=5), origin("b", step=6)]
    assert counting.over(origins, 10.0) is None
    assert counting.over(origins, 11.9) is None
    assert counting.over(origins, 12.0) == IterationOver(5, discard=True)  # both in the same time


def test_the_last_word_on_a_later_iteration_tells_that_one_was_lost() -> None:
    counting = counting_at(5, a={0})
    counting.finished(6, A, [])
    assert counting.over([origin(step=4)], 0.0) == IterationOver(5, discard=True)


def test_going_back_begins_anew() -> None:
    """A peer that takes over an earlier state is at an earlier iteration than before."""
    counting = counting_at(5)
    counting.finished(5, A, [])
    assert counting.over([origin()], 0.0) is not None
    counting.begin(3)
    assert (counting.iteration, counting.ended) == (3, 2)
    counting.finished(3, A, [])
    assert counting.over([origin()], 0.0) == IterationOver(3)


# --------------------------------------------------------------------- origins that are gone


def orphaned_at(iteration: int = 5) -> IterationTracker:
    """b had sent microbatches 0 and 1 here, and 2 by way of another; of 1 and 2 it is too late."""
    counting = counting_at(iteration, b={1, 2})
    for microbatch in (0, 1, 1):
        counting.began(Key(iteration, B, microbatch))
    counting.began(Key(iteration, A, 0))
    counting.finished(iteration, A, [])
    return counting


@pytest.mark.parametrize("health", [Health.DEAD, Health.LEFT])
def test_what_an_origin_that_is_gone_had_sent_here_is_lost(health: Health) -> None:
    counting = orphaned_at()
    gone = origin("b", step=4, health=health)
    assert counting.orphaned == 0
    assert counting.over([origin("a"), gone], 0.0) == IterationOver(5, discard=False)
    assert counting.orphans(5) == {B: Orphans(frozenset({0, 1}), frozenset({1, 2}))}
    assert counting.orphaned == 2
    counting.begin(6)
    assert (counting.orphaned, counting.orphans(6)) == (2, {})


def test_what_an_origin_had_sent_here_that_serves_another_stage_now_is_lost() -> None:
    counting = orphaned_at()
    assert counting.over([origin("a")], 0.0) == IterationOver(5, discard=False)
    assert counting.orphans(5) == {B: Orphans(frozenset({0, 1}), frozenset({1, 2}))}
    assert counting.orphaned == 2


def test_an_origin_that_is_back_tells_itself_what_it_has_lost() -> None:
    counting = orphaned_at()
    counting.over([origin("a"), origin("b", step=4, health=Health.DEAD)], 0.0)
    counting.begin(7)
    counting.finished(5, B, [1])
    assert (counting.orphaned, counting.orphans(5)) == (0, {})


def test_a_life_that_was_killed_has_lost_what_the_next_does_not_know_of() -> None:
    counting = orphaned_at()
    counting.began(Key(5, AGAIN, 0))
    counting.counted(Key(5, AGAIN, 0))
    again = replace(origin("b"), epoch=AGAIN.epoch)
    assert counting.over([origin("a"), again], 0.0) is None
    counting.finished(5, AGAIN, [0])
    assert counting.over([origin("a"), again], 0.0) == IterationOver(5, discard=False)
    assert counting.orphans(5) == {B: Orphans(frozenset({0, 1}), frozenset({1, 2}))}
    counting.finished(5, AGAIN, [0])
    assert counting.orphaned == 2


@pytest.mark.parametrize(("told", "discard"), [([1, 2], False), ([1], True)])
def test_what_a_life_has_said_before_it_was_killed_holds(told: list[int], discard: bool) -> None:
    counting = orphaned_at()
    counting.finished(5, B, told)
    again = replace(origin("b"), epoch=AGAIN.epoch, phase=Phase.STARTING)
    assert counting.over([origin("a"), again], 0.0) == IterationOver(5, discard)
    assert counting.orphaned == 0


def test_an_origin_that_is_gone_and_has_ended_the_iteration_before_has_lost_nothing() -> None:
    counting = counting_at(5)
    counting.began(Key(5, B, 0))
    assert counting.over([origin("b", step=5, health=Health.DEAD)], 0.0) == IterationOver(5)
    assert counting.orphaned == 0


def test_orphans_in_an_iteration_that_is_left_out_are_in_no_sum() -> None:
    counting = orphaned_at()
    counting.counted(Key(5, A, 0))
    over = counting.over([origin("a"), origin("b", step=4, health=Health.DEAD)], 0.0)
    assert over == IterationOver(5, discard=True)
    assert counting.orphans(5)[B].counted == frozenset()
