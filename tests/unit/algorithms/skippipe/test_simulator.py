"""The event simulator: closed forms, what holds on every timeline, and deadlocks."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.skippipe.pipeline import Costs, Pipeline
from murmuration.algorithms.skippipe.route import Route, Rules
from murmuration.algorithms.skippipe.routing import random
from murmuration.algorithms.skippipe.simulator import finish_times
from tests.lab.skippipe_deadlock import schedule_deadlock
from tests.lab.timeline import Kind, Timeline, simulate
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline

Case = tuple[Pipeline, Rules, list[int], int]


def simulated(case: Case) -> tuple[Pipeline, list[Route], Timeline]:
    pipeline, rules, origins, seed = case
    routes = random(pipeline, rules, origins, seed)
    return pipeline, routes, simulate(pipeline, routes)


def test_one_microbatch_takes_its_visits_and_hops() -> None:
    """Two forwards, the loss, two backwards, and four hops of half a second."""
    timeline = simulate(even_pipeline((1, 1)), [Route((0, 1))])
    assert timeline.iteration_s == 2 * 1 + 0.25 + 2 * 1.5 + 4 * 0.5 - 2 * 0.5 + 1.0
    kinds = [(span.peer, span.kind, span.start_s) for spans in timeline.spans for span in spans]
    assert kinds == [
        (0, Kind.FORWARD, 0.0),
        (0, Kind.LOSS, 3.0),
        (0, Kind.BACKWARD, 5.75),
        (1, Kind.FORWARD, 1.5),
        (1, Kind.BACKWARD, 3.75),
    ]


def test_a_route_of_stage_0_alone_has_no_hops_and_nothing_to_do_takes_no_time() -> None:
    assert simulate(even_pipeline((1,)), [Route((0,))] * 3).iteration_s == 3 * 2.75
    assert simulate(even_pipeline((1, 1)), []).iteration_s == 0.0


def test_a_backward_goes_before_a_forward_that_came_earlier() -> None:
    """The second forward reaches stage 0's only peer first, yet the loss of the first runs."""
    timeline = simulate(even_pipeline((1, 1), hop_s=0.0), [Route((0, 1))] * 3)
    order = [(span.kind, span.microbatch) for span in timeline.spans[0]]
    assert order[:4] == [
        (Kind.FORWARD, 0),
        (Kind.FORWARD, 1),
        (Kind.LOSS, 0),
        (Kind.FORWARD, 2),
    ]


def test_full_memory_defers_forwards_in_order_of_arrival() -> None:
    timeline = simulate(even_pipeline((1, 1), memory=1), [Route((0, 1))] * 3)
    forwards = [span.microbatch for span in timeline.spans[0] if span.kind is Kind.FORWARD]
    assert forwards == [0, 1, 2]
    assert timeline.iteration_s == 3 * 7.25  # one after the other
    assert timeline.peak == (1, 1)


@given(cases())
def test_every_microbatch_is_computed_in_order_with_its_hops_between(case: Case) -> None:
    pipeline, routes, timeline = simulated(case)
    assert timeline.deadlock is None
    for microbatch, route in enumerate(routes):
        spans = sorted(
            (span for spans in timeline.spans for span in spans if span.microbatch == microbatch),
            key=lambda span: span.start_s,
        )
        assert [span.peer for span in spans] == [*route.peers, route.origin, *route.peers[::-1]]
        kinds = Counter(span.kind for span in spans)
        assert kinds[Kind.FORWARD] == kinds[Kind.BACKWARD] == len(route.peers)
        assert kinds[Kind.LOSS] == 1
        for before, after in pairwise(spans):
            arrives_s = before.end_s + pipeline.costs.edge_s[before.peer, after.peer]
            assert after.start_s >= arrives_s - 1e-9
        assert spans[-1].end_s == timeline.finish_s[microbatch]


@given(cases())
def test_no_peer_computes_two_visits_at_a_time_or_holds_more_than_its_memory(case: Case) -> None:
    pipeline, _, timeline = simulated(case)
    for peer, spans in enumerate(timeline.spans):
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))
        taken = [(s.start_s, 1) for s in spans if s.kind is Kind.FORWARD]
        given_back = [(s.end_s, -1) for s in spans if s.kind is Kind.BACKWARD]
        held = np.cumsum([change for _, change in sorted(taken + given_back)])
        assert max(held, default=0) <= pipeline.memory[peer]
        assert timeline.peak[peer] == max(held, default=0)


@given(cases())
def test_a_backward_waits_only_while_its_peer_computes(case: Case) -> None:
    """Memory pressure may defer a forward, never a backward."""
    pipeline, routes, timeline = simulated(case)
    for spans in timeline.spans:
        for position, span in enumerate(spans):
            if span.kind is Kind.FORWARD:
                continue
            before = _previous(timeline, routes[span.microbatch], span.microbatch, span.start_s)
            arrives_s = before[1] + pipeline.costs.edge_s[before[0], span.peer]
            busy_until_s = spans[position - 1].end_s if position else 0.0
            assert span.start_s == pytest.approx(max(arrives_s, busy_until_s)) or (
                busy_until_s == pytest.approx(span.start_s)
            )


def _previous(
    timeline: Timeline, route: Route, microbatch: int, before_s: float
) -> tuple[int, float]:
    """(peer, end) of a microbatch's last visit before that time."""
    spans = [
        span
        for peer in route.peers
        for span in timeline.spans[peer]
        if span.microbatch == microbatch and span.start_s < before_s
    ]
    last = max(spans, key=lambda span: span.end_s)
    return last.peer, last.end_s


@given(cases())
def test_the_same_schedule_gives_the_same_times_and_the_fast_simulation_too(case: Case) -> None:
    pipeline, routes, timeline = simulated(case)
    assert simulated(case)[2] == timeline
    assert finish_times(pipeline, routes) == list(timeline.finish_s)
    shared = simulate(pipeline, routes, shared_uplinks=True).finish_s
    assert finish_times(pipeline, routes, shared_uplinks=True) == list(shared)
    assert timeline.iteration_s == max(finish_times(pipeline, routes))


def test_messages_of_a_shared_uplink_leave_one_after_another() -> None:
    """Stage 0 sends to two peers at once when the forwards cost next to nothing."""
    pipeline = even_pipeline((1, 2))
    hops = 1.0 - np.eye(3)
    tiny = np.full(3, 1e-6)
    costs = Costs(delay_s=0 * hops, transfer_s=hops, forward_s=tiny, backward_s=tiny, loss_s=tiny)
    pipeline = replace(pipeline, costs=costs)
    routes = [Route((0, 1)), Route((0, 2))]
    alone = simulate(pipeline, routes).iteration_s
    shared = simulate(pipeline, routes, shared_uplinks=True).iteration_s
    assert alone == pytest.approx(4.0, abs=1e-3)
    assert shared == pytest.approx(5.0, abs=1e-3)


def test_busy_time_is_the_sum_of_the_visits() -> None:
    timeline = simulate(even_pipeline((1, 1)), [Route((0, 1))] * 2)
    assert timeline.busy_s(0) == 2 * (1 + 0.25 + 1.5)
    assert timeline.busy_s(1) == 2 * (1 + 1.5)


def test_swaps_at_memory_1_deadlock_and_the_circle_is_named() -> None:
    pipeline = even_pipeline((2, 1, 1), memory=1)
    timeline = simulate(pipeline, [Route((0, 2, 3)), Route((1, 3, 2))])
    assert timeline.deadlock is not None
    assert timeline.finish_s == (None, None)
    assert set(timeline.deadlock.cycle) == {(2, 0), (3, 1)}
    assert "peer 2 is full and holds microbatch 0, which waits for peer 3" in (
        timeline.deadlock.reason
    )
    with pytest.raises(ValueError, match="never ends"):
        _ = timeline.iteration_s


@pytest.mark.parametrize("memory", [1, 2, 3])
def test_ascending_schedules_never_deadlock_and_those_with_swaps_do(memory: int) -> None:
    assert all(schedule_deadlock(memory, False, seed) is None for seed in range(150))
    swapped = [schedule_deadlock(memory, True, seed) for seed in range(150)]
    assert memory > 1 or sum(deadlock is not None for deadlock in swapped) >= 5


@given(st.integers(0, 10**6))
def test_a_deadlock_names_a_circle_of_full_peers(seed: int) -> None:
    deadlock = schedule_deadlock(1, True, seed)
    if deadlock is not None:
        peers = [peer for peer, _ in deadlock.cycle]
        assert len(peers) >= 2
        assert len(set(peers)) == len(peers)
