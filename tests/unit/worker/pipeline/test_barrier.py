"""When an iteration of a stage is over, and when what was counted in it is discarded."""

from collections.abc import Callable

import pytest

from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline.barrier import IterationTracker
from murmuration.worker.pipeline.stage_call import Incarnation, StageCallKey
from murmuration.worker.training.mailbox import IterationOver

A, B = Incarnation("a", 1), Incarnation("b", 1)


def origin(
    peer: str = "a",
    step: int = 0,
    phase: Phase = Phase.TRAINING,
    health: Health = Health.ALIVE,
) -> Member:
    return Member(peer, peer, epoch=1, phase=phase, health=health, step=step)


def tracker_at(iteration: int = 5, **counted: set[int]) -> IterationTracker:
    tracker = IterationTracker()
    tracker.begin(iteration)
    for peer, microbatches in counted.items():
        for microbatch in microbatches:
            tracker.counted(StageCallKey(iteration, Incarnation(peer, 1), microbatch))
    return tracker


def test_a_report_from_far_ahead_is_not_kept() -> None:
    """Nobody is that far ahead of a peer that it waits for; card by card it is told to be."""
    tracker = tracker_at(5)
    tracker.reported(5000, A, [])
    tracker.begin(5000)
    assert tracker.over([origin(step=4999)], 0.0) is None


@pytest.mark.parametrize(("step", "waits"), [(0, False), (3, False), (4, True)])
def test_an_origin_about_to_start_is_waited_for_where_it_will_begin(step: int, waits: bool) -> None:
    tracker = tracker_at(5)
    tracker.reported(5, A, [])
    over = tracker.over([origin("a"), origin("b", step, Phase.READY)], 0.0)
    assert (over is None) == waits


def heard_in_the_call(tracker: IterationTracker) -> None:
    tracker.began(StageCallKey(5, B, 0))


def heard_in_what_is_counted(tracker: IterationTracker) -> None:
    tracker.counted(StageCallKey(5, B, 0))


def heard_in_the_report(tracker: IterationTracker) -> None:
    tracker.reported(4, B, [])


@pytest.mark.parametrize(
    ("heard", "mine"),
    [(heard_in_the_call, []), (heard_in_what_is_counted, [0]), (heard_in_the_report, [])],
)
def test_an_origin_that_gossip_has_not_yet_told_to_have_started_is_waited_for(
    heard: Callable[[IterationTracker], None], mine: list[int]
) -> None:
    tracker = tracker_at(a=set())
    heard(tracker)
    tracker.reported(5, A, [])
    origins = [origin("a"), origin("b", 0, Phase.READY)]
    assert tracker.over(origins, 0.0) is None
    tracker.reported(5, B, mine)
    assert tracker.over(origins, 0.0) == IterationOver(5)


def goes_on(tracker: IterationTracker, iteration: int) -> IterationOver | None:
    """What a and b say of it in the incarnations that gossip tells of."""
    tracker.reported(iteration, A, [])
    tracker.reported(iteration, B, [])
    return tracker.over([origin("a", iteration - 1), origin("b", iteration - 1)], 20.0)


def test_an_incarnation_that_gossip_never_tells_of_is_waited_for_once() -> None:
    """Its only word was forged or damaged on the way; the origin itself goes on."""
    tracker = tracker_at(5)
    origins = [origin("a", 4), origin("b", 4)]
    for word in (A, B, Incarnation("b", 2**63), Incarnation("b", 2**62)):
        tracker.reported(5, word, [])
    assert tracker.over(origins, 0.0) == IterationOver(5)
    tracker.begin(6)
    tracker.reported(6, A, [])
    tracker.reported(6, B, [])
    assert tracker.over(origins, 1.9) is None
    assert tracker.over(origins, 2.0) == IterationOver(6)
    for iteration in range(7, 20):
        tracker.begin(iteration)
        assert goes_on(tracker, iteration) == IterationOver(iteration)


@pytest.mark.parametrize("begun", [0, 5], ids=["before", "after"])
def test_word_from_far_ahead_holds_nothing_up(begun: int) -> None:
    """Nor does it have this iteration left out, as that of an origin that has gone on."""
    tracker = IterationTracker()
    if begun:
        tracker.begin(begun)
    for incarnation in (A, Incarnation("a", 2**63), Incarnation("b", 2**63)):
        tracker.reported(2**60, incarnation, [])
    if not begun:
        tracker.begin(5)
    tracker.counted(StageCallKey(5, A, 0))
    origins = [origin("a", 4), origin("b", 4, Phase.STARTING)]
    assert tracker.over(origins, 0.0) is None
    tracker.reported(5, A, [0])
    assert tracker.over(origins, 0.0) == IterationOver(5, discard=False)


def test_what_is_counted_of_an_origin_further_on_is_left_out_after_a_while() -> None:
    tracker = tracker_at(5, a={0}, b={1})
    origins = [origin("a", step=5), origin("b", step=6)]
    assert tracker.over(origins, 10.0) is None
    assert tracker.over(origins, 11.9) is None
    assert tracker.over(origins, 12.0) == IterationOver(5, discard=True)  # both in the same time


def test_the_report_on_a_later_iteration_tells_that_one_was_lost() -> None:
    tracker = tracker_at(5, a={0})
    tracker.reported(6, A, [])
    assert tracker.over([origin(step=4)], 0.0) == IterationOver(5, discard=True)


# --------------------------------------------------------------------- origins that are gone


def orphaned_at(iteration: int = 5) -> IterationTracker:
    """b had sent microbatches 0 and 1 here, and 2 by way of another; of 1 and 2 it is too late."""
    tracker = tracker_at(iteration, b={1, 2})
    for microbatch in (0, 1, 1):
        tracker.began(StageCallKey(iteration, B, microbatch))
    tracker.began(StageCallKey(iteration, A, 0))
    tracker.reported(iteration, A, [])
    return tracker


def test_an_origin_that_is_back_tells_itself_what_it_has_lost() -> None:
    tracker = orphaned_at()
    tracker.over([origin("a"), origin("b", step=4, health=Health.DEAD)], 0.0)
    tracker.begin(7)
    tracker.reported(5, B, [1])
    assert (tracker.orphaned, tracker.orphans(5)) == (0, {})
