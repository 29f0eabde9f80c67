"""Searched routes keep every constraint, are the same each time, and are worth the search."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings

from murmuration.algorithms.skippipe.local_search import random_step, slots_of
from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import (
    Draws,
    Route,
    Rules,
    keeps_rules,
    peer_limits,
    stage_quota,
)
from murmuration.algorithms.skippipe.search import Planner, random, search_routes
from murmuration.algorithms.skippipe.simulator import finish_times
from tests.unit.algorithms.skippipe.pipelines import assert_fit_together, cases, uneven_pipeline

Case = tuple[Pipeline, Rules, list[int], int]


@given(cases())
def test_no_route_is_faster(case):
    pipeline, rules, origins, _ = case
    planner = Planner(pipeline, rules)
    best = planner.best(origins[0])
    assert best is not None
    choices = product(*((None, *replicas) for replicas in pipeline.stages[1:]))
    routes = [Route((origins[0], *filter(None, each))) for each in choices]
    allowed = [each for each in routes if keeps_rules(each.stages(pipeline), rules)]
    assert planner.loop_s(best) == pytest.approx(min(map(planner.loop_s, allowed)))


@given(cases())
def test_drawn_steps_keep_rules_and_limits(case):
    pipeline, rules, origins, seed = case
    draws, routes = Draws(seed), random(pipeline, rules, origins, seed)
    limits = peer_limits(pipeline, stage_quota(len(routes), rules, seed))
    visits = [Counter(stage for route in routes for stage in route.stages(pipeline))]
    for index in range(len(routes)):
        before = Counter(peer for route in routes for peer in route.peers)
        changes = random_step(routes, index, pipeline, rules, limits, draws)
        for slot, route in changes.items():
            routes[slot] = route
        if len(changes) == 2:
            assert Counter(peer for route in routes for peer in route.peers) == before
        visits.append(Counter(stage for route in routes for stage in route.stages(pipeline)))
    assert_fit_together(routes, pipeline, rules, limits)
    assert all(each == visits[0] for each in visits)
    assert [route.origin for route in routes] == origins


TWENTY = uneven_pipeline((5, 3, 3, 3, 3, 3), np.random.default_rng(0), latency_s=0.5)
TWENTY = replace(TWENTY, memory=(3,) * TWENTY.peers)
ORIGINS = list(TWENTY.stages[0]) * 6
FOUR_OF_SIX = Rules(stages=6, visited=4)


@pytest.fixture(scope="module")
def found() -> list[Route]:
    """By some effort, for 20 peers."""
    return search_routes(TWENTY, FOUR_OF_SIX, ORIGINS, effort_s=0.3)


@given(cases())
@settings(max_examples=40)
def test_routes_keep_the_constraints(case):
    pipeline, rules, origins, seed = case
    found = search_routes(pipeline, rules, origins, seed=seed, effort_s=0.02)
    assert [route.origin for route in found] == origins
    slots, _ = slots_of(origins, pipeline)
    first = dict(zip(reversed(slots), reversed(found), strict=True))  # of each slot
    together = [first[slot] for slot in sorted(first)]  # what is in flight together
    quota = stage_quota(len(together), rules, seed)
    assert_fit_together(together, pipeline, rules, peer_limits(pipeline, quota))
    visits = Counter(stage for route in together for stage in route.stages(pipeline))
    assert tuple(visits[stage] for stage in range(rules.stages)) == quota


def least_s(pipeline: Pipeline, rules: Rules, origins: list[int]) -> float:
    """The least time of all routes that keep coverage and limits, by trying each."""
    slots, slot_origins = slots_of(origins, pipeline)
    quota = stage_quota(len(slot_origins), rules)
    limits = peer_limits(pipeline, quota)
    ways = [
        way
        for chosen in combinations(range(1, rules.stages), rules.visited - 1)
        if keeps_rules((0, *chosen), rules)
        for way in product(*(pipeline.stages[stage] for stage in chosen))
    ]
    least = math.inf
    for choice in product(ways, repeat=len(slot_origins)):
        loads = Counter(peer for way in choice for peer in way)
        covered = [sum(loads[peer] for peer in stage) for stage in pipeline.stages[1:]]
        if covered == list(quota[1:]) and all(loads[peer] <= limits[peer] for peer in loads):
            routes = [Route((slot_origins[slot], *choice[slot])) for slot in slots]
            least = min(least, max(finish_times(pipeline, routes)))
    return least


def small_case(seed: int) -> tuple[Pipeline, Rules, list[int]]:
    """Unequal links, speeds and memories; 2 to 4 stages, of which routes may skip some."""
    draws = np.random.default_rng(seed)
    stages = int(draws.integers(2, 5))
    sizes = (*draws.integers(1, 3, 1).tolist(), *draws.integers(1, 4, stages - 1).tolist())
    pipeline = uneven_pipeline(sizes, draws, latency_s=0.5)
    rules = Rules(stages=stages, visited=int(draws.integers(2, stages + 1)))
    return pipeline, rules, list(pipeline.stages[0]) * int(draws.integers(2, 4))


def choices_of(pipeline: Pipeline, rules: Rules, origins: list[int]) -> float:
    """How many choices of routes there are at most, whatever their loads."""
    replicas = max(map(len, pipeline.stages[1:]))
    ways = math.comb(rules.stages - 1, rules.visited - 1) * replicas ** (rules.visited - 1)
    return float(ways ** (max(slots_of(origins, pipeline)[0]) + 1))


@pytest.mark.parametrize(
    "seed", [seed for seed in range(40) if 8 <= choices_of(*small_case(seed)) <= 1000]
)
def test_no_choice_of_routes_is_faster_in_cases_that_can_be_tried_out(seed):
    pipeline, rules, origins = small_case(seed)
    found_s = max(finish_times(pipeline, search_routes(pipeline, rules, origins, effort_s=0.1)))
    assert found_s == pytest.approx(least_s(pipeline, rules, origins), rel=1e-12)


def test_the_same_seed_gives_the_same_routes_and_another_others(found):
    again, other = (
        search_routes(TWENTY, FOUR_OF_SIX, ORIGINS, seed=seed, effort_s=0.3) for seed in (0, 2)
    )
    assert again == found
    assert other != found


def test_more_effort_is_never_worse_and_without_any_the_answer_is_complete(found):
    none, little = (
        search_routes(TWENTY, FOUR_OF_SIX, ORIGINS, effort_s=effort_s) for effort_s in (0.0, 0.1)
    )
    assert all(keeps_rules(route.stages(TWENTY), FOUR_OF_SIX) for route in none)
    assert len(none) == 30
    found_s, little_s, none_s = (max(finish_times(TWENTY, each)) for each in (found, little, none))
    assert found_s <= little_s <= none_s


def test_searched_routes_beat_random_ones_by_far_on_unequal_links(found):
    drawn = [random(TWENTY, FOUR_OF_SIX, ORIGINS, seed) for seed in range(10)]
    random_s = [max(finish_times(TWENTY, each)) for each in drawn]
    assert max(finish_times(TWENTY, found)) < 0.85 * np.mean(random_s)
