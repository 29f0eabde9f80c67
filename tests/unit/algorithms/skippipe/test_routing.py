"""The four presets over one signature, and one iteration by each."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given

from murmuration.algorithms.skippipe import routing as routings
from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Draws, Route, Rules, stage_refusals
from murmuration.algorithms.skippipe.routing import (
    ROUTINGS,
    ReplicaQueue,
    full,
    origins_in_turns,
    random,
    stochastic,
)
from murmuration.algorithms.skippipe.search import search_routes
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline

Case = tuple[Pipeline, Rules, list[int], int]
COMPLETE = Rules(stages=3, visited=3)
EFFORT_S = 0.02


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_preset_routes_every_microbatch_the_same_way_each_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routings, "search_routes", partial(search_routes, effort_s=EFFORT_S))
    pipeline = even_pipeline((2, 3, 2))
    origins = [0, 1, 0, 1]
    routes = ROUTINGS[name](pipeline, COMPLETE, origins, 7)
    assert routes == ROUTINGS[name](pipeline, COMPLETE, origins, 7)
    assert [route.origin for route in routes] == origins
    assert all(stage_refusals(route.stages(pipeline), COMPLETE) == () for route in routes)


@pytest.mark.parametrize("name", ["full", "stochastic"])
def test_who_cannot_skip_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"routing '{name}' visits all 3 stages, not 2"):
        ROUTINGS[name](even_pipeline((1, 1, 1)), Rules(stages=3, visited=2), [0], 0)


def test_full_uses_every_replica_equally_and_ignores_the_seed() -> None:
    pipeline = even_pipeline((2, 3, 2))
    routes = full(pipeline, COMPLETE, [0, 1] * 3, 1)
    assert routes == full(pipeline, COMPLETE, [0, 1] * 3, 2)
    loads = Counter(peer for route in routes for peer in route.peers)
    assert [loads[peer] for peer in range(7)] == [3, 3, 2, 2, 2, 3, 3]


def test_random_permutes_the_replicas_of_every_batch() -> None:
    pipeline = even_pipeline((3, 3, 3))
    seen = set()
    for seed in range(50):
        routes = random(pipeline, COMPLETE, [0, 1, 2], seed)
        for stage in (1, 2):
            assert {route.peers[stage] for route in routes} == set(pipeline.stages[stage])
        seen.add(tuple(route.peers[1] for route in routes))
    assert len(seen) == 6  # all permutations


def test_how_much_is_drawn_is_no_matter_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer says itself how much it has."""
    drawn = 0

    class Counted(Draws):
        def below(self, bound: int) -> int:
            nonlocal drawn
            drawn += 1
            return super().below(bound)

    monkeypatch.setattr(routings, "Draws", Counted)
    counts = []
    for memory in (4, 10_000):
        drawn = 0
        random(even_pipeline((2, 3), memory=memory), Rules(stages=2, visited=2), [0, 1] * 2, 0)
        counts.append(drawn)
    assert counts[0] == counts[1] > 0


@given(cases())
def test_random_keeps_the_rules(case: Case) -> None:
    pipeline, rules, origins, seed = case
    routes = random(pipeline, rules, origins, seed)
    assert all(stage_refusals(route.stages(pipeline), rules) == () for route in routes)


def test_stochastic_sends_slow_replicas_less() -> None:
    pipeline = even_pipeline((1, 2))
    costs = pipeline.costs
    forward_s = costs.forward_s.copy()
    forward_s[1] = 4.0
    slow = replace(pipeline, costs=replace(costs, forward_s=forward_s, backward_s=1.5 * forward_s))
    routes = stochastic(slow, Rules(stages=2, visited=2), [0] * 10, 0)
    assert Counter(routes) == {Route((0, 1)): 2, Route((0, 2)): 8}


def test_microbatches_follow_throughput_and_ties_go_to_the_lower_peer() -> None:
    queue = ReplicaQueue({1: 1.0, 2: 3.0})
    assert Counter(queue.choose() for _ in range(40)) == {1: 30, 2: 10}
    queue = ReplicaQueue({5: 1.0, 2: 1.0, 9: 1.0})
    assert [queue.choose() for _ in range(6)] == [2, 5, 9, 2, 5, 9]


def test_origins_take_turns_and_may_have_unequal_shares() -> None:
    pipeline, rules = even_pipeline((2, 1, 1)), Rules(stages=3, visited=2)
    assert origins_in_turns(pipeline, 3) == [0, 1, 0, 1, 0, 1]
    found = search_routes(pipeline, rules, [0, 1, 0, 0], effort_s=EFFORT_S)
    assert Counter(route.origin for route in found.routes) == {0: 3, 1: 1}
