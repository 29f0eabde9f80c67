"""The four presets over one signature."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.skippipe import routing
from algorithms.skippipe.draws import Draws
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.route import Route, Rules, stage_refusals
from algorithms.skippipe.routing import PRESETS, full, random, stochastic
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline

Case = tuple[Pipeline, Rules, list[int], int]
COMPLETE = Rules(stages=3, visited=3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_routes_every_microbatch_the_same_way_each_time(name: str) -> None:
    pipeline = even_pipeline((2, 3, 2))
    origins = [0, 1, 0, 1]
    routes = PRESETS[name](pipeline, COMPLETE, origins, 7)
    assert routes == PRESETS[name](pipeline, COMPLETE, origins, 7)
    assert [route.origin for route in routes] == origins
    assert all(stage_refusals(route.stages(pipeline), COMPLETE) == () for route in routes)


@pytest.mark.parametrize("name", ["full", "stochastic"])
def test_who_cannot_skip_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"routing '{name}' visits all 3 stages, not 2"):
        PRESETS[name](even_pipeline((1, 1, 1)), Rules(stages=3, visited=2), [0], 0)


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

    monkeypatch.setattr(routing, "Draws", Counted)
    counts = []
    for memory in (4, 10_000):
        drawn = 0
        random(even_pipeline((2, 3), memory=memory), Rules(stages=2, visited=2), [0, 1] * 2, 0)
        counts.append(drawn)
    assert counts[0] == counts[1] > 0


@given(cases())
def test_random_keeps_the_rules_and_even_loads(case: Case) -> None:
    pipeline, rules, origins, seed = case
    routes = random(pipeline, rules, origins, seed)
    assert all(stage_refusals(route.stages(pipeline), rules) == () for route in routes)


@given(cases(), st.booleans())
def test_swaps_are_drawn_only_where_allowed(case: Case, swaps: bool) -> None:
    pipeline, rules, origins, seed = case
    rules = replace(rules, swaps=swaps)
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
