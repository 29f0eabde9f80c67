"""Which layers go to which stage; routes, their refusals and trades; coverage; the four presets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from murmuration.algorithms.skippipe import search as routings
from murmuration.algorithms.skippipe.local_search import trade_stage
from murmuration.algorithms.skippipe.pipeline import stage_layers
from murmuration.algorithms.skippipe.route import (
    Draws,
    Route,
    Rules,
    even_stage_sets,
    keeps_rules,
    stage_quota,
    visited_stages,
)
from murmuration.algorithms.skippipe.search import ROUTINGS, random, search_routes, stochastic
from tests.unit.algorithms.skippipe.pipelines import even_pipeline

RULES = Rules(stages=8, visited=4)


@pytest.mark.parametrize(
    "stages", [(1, 2, 3, 4), (), (0, 2, 2, 4), (0, 2, 3), (0, 5, 6, 7), (0, 3, 2, 5)]
)
def test_what_a_route_may_not_do(stages):
    assert not keeps_rules(stages, RULES)
    assert keeps_rules((0, 2, 3, 5), RULES)


@pytest.mark.parametrize(
    ("stages", "visited", "reason"),
    [
        (4, 5, "cannot visit 5 of 4"),
        (4, 0, "cannot visit 0 of 4"),
        (4, 1, "untrained"),
        (12, 3, "do not reach stage 11"),
    ],
)
def test_rules_that_no_route_can_keep_are_refused(stages, visited, reason):
    with pytest.raises(ValueError, match=reason):
        Rules(stages=stages, visited=visited)


@pytest.mark.parametrize(
    ("stages", "skip", "visited"), [(6, 0.33, 4), (6, 0.17, 5), (4, 0.25, 3), (6, 0, 6), (1, 0, 1)]
)
def test_a_skip_ratio_counts_stage_0(stages, skip, visited):
    assert visited_stages(stages, skip) == visited


PIPELINE = even_pipeline((2, 2, 2, 2))
THREE_OF_FOUR = Rules(stages=4, visited=3)
ONE, OTHER = Route((0, 2, 4)), Route((1, 3, 6))


def test_stages_are_exchanged_where_each_lacks_the_others():
    traded = trade_stage(ONE, OTHER, PIPELINE, THREE_OF_FOUR, Draws(0))
    assert traded == (Route((0, 2, 6)), Route((1, 3, 4)))
    assert trade_stage(ONE, ONE, PIPELINE, THREE_OF_FOUR, Draws(0)) is None


def test_a_trade_after_which_a_route_jumps_too_far_is_none():
    line = even_pipeline((1, 1, 1, 1, 1))
    one, other = Route((0, 2, 4)), Route((0, 1, 3))
    near, far = (Rules(stages=5, visited=3, max_jump=jump) for jump in (2, 3))
    drawn = Mock(one_of=Mock(side_effect=[2, 1, 2, 1]))
    assert trade_stage(one, other, line, near, drawn) is None
    assert trade_stage(one, other, line, far, drawn) == (Route((0, 1, 4)), Route((0, 2, 3)))


def test_draws_are_the_same_on_every_machine_and_version():
    draws = Draws(7)
    assert [draws.below(100) for _ in range(5)] == [32, 15, 65, 7, 53]
    assert draws.shuffled(range(6)) == [1, 3, 4, 5, 0, 2]


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    stages = draw(st.integers(1, 12))
    return Rules(stages=stages, visited=draw(st.integers(min(2, stages), stages)), max_jump=11)


@given(st.integers(1, 40), rules(), st.integers(0, 100), st.booleans())
def test_sets_are_allowed_and_meet_a_quota_that_is_even(routes, rules, seed, shortest_jumps):
    """The shortest jumps that reach the last stage are enough."""
    if shortest_jumps and rules.visited > 1:
        rules = replace(rules, max_jump=-(-(rules.stages - 1) // (rules.visited - 1)))
    first, *others = quota = stage_quota(routes, rules, seed)
    assert first == routes
    assert sum(others) == routes * (rules.visited - 1)
    assert not others or max(others) - min(others) <= 1
    chosen = even_stage_sets(routes, rules, seed)
    assert all(keeps_rules(stages, rules) for stages in chosen)
    visits = Counter(stage for stages in chosen for stage in stages)
    assert tuple(visits[stage] for stage in range(rules.stages)) == tuple(quota)


def test_which_stages_go_together_changes_with_the_seed():
    for rules in (Rules(stages=6, visited=4), Rules(stages=9, visited=4)):
        assert len({tuple(sorted(even_stage_sets(10, rules, seed))) for seed in range(8)}) >= 6


# ----------------------------------------------------------------------------------- the presets


COMPLETE = Rules(stages=3, visited=3)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_preset_routes_every_microbatch_the_same_way_each_time(name, monkeypatch):
    monkeypatch.setattr(routings, "search_routes", partial(search_routes, effort_s=0.02))
    pipeline, origins = even_pipeline((2, 3, 2)), [0, 1, 0, 1]
    routes = ROUTINGS[name](pipeline, COMPLETE, origins, 7)
    assert routes == ROUTINGS[name](pipeline, COMPLETE, origins, 7)
    assert [route.origin for route in routes] == origins
    assert all(keeps_rules(route.stages(pipeline), COMPLETE) for route in routes)


def test_how_much_is_drawn_is_no_matter_of_memory(monkeypatch):
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


def test_stochastic_sends_slow_replicas_less():
    pipeline = even_pipeline((1, 2))
    costs = pipeline.costs
    forward_s = costs.forward_s.copy()
    forward_s[1] = 4.0
    slow = replace(pipeline, costs=replace(costs, forward_s=forward_s, backward_s=1.5 * forward_s))
    routes = stochastic(slow, Rules(stages=2, visited=2), [0] * 10, 0)
    assert Counter(routes) == {Route((0, 1)): 2, Route((0, 2)): 8}


# ----------------------------------------------------------------- which layers to which stage


MOST_LAYERS = 8
SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=MOST_LAYERS)
# Binary fractions, whose sums are exact: which of two cuts is better is then beyond doubt.
SECONDS = st.lists(st.integers(1, 2**20).map(lambda n: n / 2**22), min_size=1, max_size=MOST_LAYERS)

Span = tuple[int, int]


def score(costs: Sequence[float], outer_cost: float, cut: list[Span]) -> tuple[float, float]:
    """(the largest stage, the sum of squares)."""
    stages = [sum(costs[first : last + 1]) for first, last in cut]
    stages[0] += outer_cost
    return max(stages), sum(stage**2 for stage in stages)


@given(SIZES | SECONDS, st.integers(0, 10**12), st.data())
def test_no_other_cut_has_a_smaller_largest_stage_or_is_more_even(costs, outer_cost, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = stage_layers(costs, outer_cost, stages)
    inner = combinations(range(1, len(costs)), stages - 1)
    cuts = [[(a, b - 1) for a, b in pairwise((0, *ends, len(costs)))] for ends in inner]
    assert found in cuts
    assert score(costs, outer_cost, found) == min(score(costs, outer_cost, cut) for cut in cuts)


@pytest.mark.parametrize("stages", [0, 5])
def test_each_stage_needs_a_layer(stages):
    with pytest.raises(ValueError, match=f"4 layers cannot be cut into {stages} stages"):
        stage_layers([10] * 4, 0, stages)
