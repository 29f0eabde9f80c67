"""When an iteration of a stage is over, and when what was counted in it is discarded."""

import asyncio
from dataclasses import replace
from unittest.mock import Mock

import pytest

from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline.barrier import IterationTracker, report_iteration
from murmuration.worker.pipeline.stage_call import PeerProcess, StageCallKey
from murmuration.worker.training.mailbox import IterationOver
from tests.protocol.virtual_time import run
from tests.unit.worker.pipeline.members import context_of

A, B = PeerProcess("a", 1), PeerProcess("b", 1)


def origin(peer: str = "a", step: int = 0, phase: Phase = Phase.TRAINING) -> Member:
    return Member(peer, peer, start_ms=1, phase=phase, step=step)


def tracker_at(iteration: int = 5, **counted: set[int]) -> IterationTracker:
    tracker = IterationTracker()
    tracker.begin(iteration)
    for peer, microbatches in counted.items():
        for microbatch in microbatches:
            tracker.counted(StageCallKey(iteration, PeerProcess(peer, 1), microbatch))
    return tracker


def test_a_later_report_tells_that_one_was_lost_but_not_one_from_far_ahead():
    """Nobody is that far ahead of a peer that it waits for; card by card it is told to be."""
    tracker = tracker_at(5, a={0})
    tracker.reported(6, A, [])
    assert tracker.over([origin(step=4)], 0.0) == IterationOver(5, discard=True)
    tracker.reported(5000, A, [])
    tracker.begin(5000)
    assert tracker.over([origin(step=4999)], 0.0) is None


def test_an_origin_about_to_start_is_waited_for_where_it_will_begin():
    for step, waits in ((0, False), (3, False), (4, True)):
        tracker = tracker_at(5)
        tracker.reported(5, A, [])
        over = tracker.over([origin("a"), origin("b", step, Phase.READY)], 0.0)
        assert (over is None) == waits


def test_an_origin_that_gossip_has_not_yet_told_to_have_started_is_waited_for():
    """It is heard of in a call, in what is counted, or in a report."""
    for heard, what, mine in [
        (IterationTracker.began, (StageCallKey(5, B, 0),), []),
        (IterationTracker.counted, (StageCallKey(5, B, 0),), [0]),
        (IterationTracker.reported, (4, B, []), []),
    ]:
        tracker = tracker_at(5)
        heard(tracker, *what)
        tracker.reported(5, A, [])
        origins = [origin("a"), origin("b", 0, Phase.READY)]
        assert tracker.over(origins, 0.0) is None, what
        tracker.reported(5, B, mine)
        assert tracker.over(origins, 0.0) == IterationOver(5), what


def test_processes_that_others_make_up_hold_up_one_iteration_in_many():
    tracker, now = IterationTracker(), 0.0
    for iteration in range(1, 40):
        tracker.begin(iteration)
        for process in (A, B):
            tracker.reported(iteration, process, [])
        while True:
            for start in (2**63 + iteration, 2**62):
                tracker.counted(StageCallKey(iteration, PeerProcess("b", start), 0), "x")
            if tracker.over([origin("a", iteration - 1), origin("b", iteration - 1)], now):
                break
            now += 0.05
    assert now == pytest.approx(2.0)
    assert not tracker.given_up


@pytest.mark.parametrize("begun", [0, 5], ids=["before", "after"])
def test_word_from_far_ahead_holds_nothing_up(begun):
    """Nor does it have this iteration left out, as that of an origin that has gone on."""
    tracker = tracker_at(5) if begun else IterationTracker()
    for process in (A, PeerProcess("a", 2**63), PeerProcess("b", 2**63)):
        tracker.reported(2**60, process, [])
    if not begun:
        tracker.begin(5)
    tracker.counted(StageCallKey(5, A, 0))
    origins = [origin("a", 4), origin("b", 4, Phase.STARTING)]
    assert tracker.over(origins, 0.0) is None
    tracker.reported(5, A, [0])
    assert tracker.over(origins, 0.0) == IterationOver(5, discard=False)


def test_an_origin_that_reports_what_never_came_stops_nobody():
    tracker = tracker_at(5, b={0})
    tracker.reported(5, A, [0])
    tracker.reported(5, B, [0, 1])
    assert tracker.over([origin("a"), origin("b")], 0.0) == IterationOver(5, discard=False)


@pytest.mark.parametrize("by", ["a", "x"])
def test_what_is_counted_and_not_reported_is_soon_refused_that_way(by):
    """Its origin leaves it out of the report, or who has handed it on out of the path."""
    tracker, discarded = IterationTracker(), []
    for iteration in range(1, 60):
        tracker.begin(iteration)
        if ("a", by) not in tracker.left_out:
            tracker.counted(StageCallKey(iteration, A, 0), by)
        tracker.reported(iteration, A, [])
        over = tracker.over([origin("a", iteration - 1)], 0.0)
        discarded += [iteration] if over is not None and over.discard else []
    assert discarded == [1, 2, 3, 4, 56]


def test_what_is_counted_of_an_origin_further_on_is_left_out_after_a_while():
    tracker, origins = tracker_at(5, a={0}, b={1}), [origin("a", step=5), origin("b", step=6)]
    assert tracker.over(origins, 10.0) is None
    assert tracker.over(origins, 11.9) is None
    assert tracker.over(origins, 12.0) == IterationOver(5, discard=True)  # both in the same time


def test_an_origin_that_is_back_tells_itself_what_it_has_lost():
    """b had sent microbatches 0 and 1 here, and 2 by way of another; of 1 and 2 it is too late."""
    tracker = tracker_at(5, b={1, 2})
    for microbatch in (0, 1, 1):
        tracker.began(StageCallKey(5, B, microbatch))
    tracker.began(StageCallKey(5, A, 0))
    tracker.reported(5, A, [])
    tracker.over([origin("a"), replace(origin("b", step=4), health=Health.DEAD)], 0.0)
    tracker.begin(7)
    tracker.reported(5, B, [1])
    assert (tracker.orphaned, tracker.orphans(5)) == (0, {})


def test_a_report_that_is_never_confirmed_is_repeated_at_intervals_and_not_for_ever():
    asked: list[float] = []

    async def call(*_given: object) -> bytes:
        asked.append(asyncio.get_running_loop().time())
        assert len(asked) < 100
        return b""  # it is not over, though this peer goes on

    def members() -> list[Member]:
        return [origin("a", 5 + len(asked) // 4), origin("b", 4)]

    context = context_of("a", members, transport=Mock(call=call))
    run(report_iteration(context, A, "b", 5, [0]))
    assert (asked[-1] - asked[0], context.counts.lost) == (0.25 * (len(asked) - 1), 1)
