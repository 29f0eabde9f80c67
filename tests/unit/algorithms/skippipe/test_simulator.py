"""The event simulator: closed forms, what holds on every timeline, and deadlocks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given

from murmuration.algorithms.skippipe.pipeline import Costs, Pipeline
from murmuration.algorithms.skippipe.route import Route, Rules
from murmuration.algorithms.skippipe.search import random
from murmuration.algorithms.skippipe.simulator import IterationRun, finish_times
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline


class Span(NamedTuple):
    """One visit of one microbatch on one peer."""

    peer: int
    microbatch: int
    kind: str
    start_s: float
    end_s: float


def simulate(
    pipeline: Pipeline, routes: Sequence[Route]
) -> tuple[list[list[Span]], tuple[float, ...]]:
    """Runs one iteration: the spans of each peer, in order; when each microbatch ended (-1)."""
    run = IterationRun(pipeline, routes)
    spans: list[list[Span]] = [[] for _ in range(pipeline.peers)]

    def started(peer: int, microbatch: int, step: int, start_s: float, end_s: float) -> None:
        after = step - len(routes[microbatch].peers)
        kind = "forward" if after < 0 else "backward" if after else "loss"
        spans[peer].append(Span(peer, microbatch, kind, start_s, end_s))

    run.run(started)
    return spans, tuple(run.finish_s)


Case = tuple[Pipeline, Rules, list[int], int]


@given(cases())
def test_every_microbatch_is_computed_in_order_with_its_hops_between(case):
    pipeline, *rest = case
    routes = random(pipeline, *rest)
    by_peer, finish_s = simulate(pipeline, routes)
    assert min(finish_s) >= 0  # ascending visits never wait for each other in a circle
    for microbatch, route in enumerate(routes):
        spans = sorted(
            (span for spans in by_peer for span in spans if span.microbatch == microbatch),
            key=lambda span: span.start_s,
        )
        assert [span.peer for span in spans] == [*route.peers, route.origin, *route.peers[::-1]]
        kinds = Counter(span.kind for span in spans)
        assert kinds["forward"] == kinds["backward"] == len(route.peers)
        assert kinds["loss"] == 1
        for before, after in pairwise(spans):
            arrives_s = before.end_s + pipeline.costs.edge_s[before.peer, after.peer]
            assert after.start_s >= arrives_s - 1e-9
        assert spans[-1].end_s == finish_s[microbatch]


@given(cases())
def test_no_peer_computes_two_visits_at_a_time_or_holds_more_than_its_memory(case):
    pipeline, *rest = case
    for peer, spans in enumerate(simulate(pipeline, random(pipeline, *rest))[0]):
        assert all(before.end_s <= after.start_s for before, after in pairwise(spans))
        taken = [(s.start_s, 1) for s in spans if s.kind == "forward"]
        given_back = [(s.end_s, -1) for s in spans if s.kind == "backward"]
        held = np.cumsum([change for _, change in sorted(taken + given_back)])
        assert max(held, default=0) <= pipeline.memory[peer]


def test_messages_of_a_shared_uplink_leave_one_after_another():
    """Stage 0 sends to two peers at once when the forwards cost next to nothing."""
    pipeline, hops = even_pipeline((1, 2)), 1.0 - np.eye(3)
    tiny = np.full(3, 1e-6)
    costs = Costs(delay_s=0 * hops, transfer_s=hops, forward_s=tiny, backward_s=tiny, loss_s=tiny)
    pipeline = replace(pipeline, costs=costs)
    routes = [Route((0, 1)), Route((0, 2))]
    assert max(finish_times(pipeline, routes[:1])) == pytest.approx(4.0, abs=1e-3)
    assert max(finish_times(pipeline, routes)) == pytest.approx(5.0, abs=1e-3)


def test_visits_in_another_order_may_wait_for_each_other_for_ever():
    """At memory 1, peers 2 and 3 are full of what the other is to compute next."""
    pipeline, routes = even_pipeline((2, 1, 1), memory=1), [Route((0, 2, 3)), Route((1, 3, 2))]
    assert simulate(pipeline, routes)[1] == (-1, -1)
    with pytest.raises(AssertionError, match="deadlocks"):
        finish_times(pipeline, routes)
