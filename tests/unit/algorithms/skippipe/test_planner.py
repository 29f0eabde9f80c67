"""The best route of one microbatch against all routes there are, and lower bounds."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings

from algorithms.skippipe.draws import fewest_visits
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.planner import Planner, uplink_bound_s
from algorithms.skippipe.route import Route, Rules, stage_refusals
from algorithms.skippipe.routing import predict, random
from algorithms.skippipe.search import search_routes
from algorithms.skippipe.simulator import simulate
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline, whole_waves

Case = tuple[Pipeline, Rules, list[int], int]


def all_routes(pipeline: Pipeline, rules: Rules, origin: int) -> list[Route]:
    choices = [(None, *replicas) for replicas in pipeline.stages[1:]]
    routes = [
        Route((origin, *(peer for peer in chosen if peer is not None)))
        for chosen in product(*choices)
    ]
    return [route for route in routes if stage_refusals(route.stages(pipeline), rules) == ()]


@given(cases())
def test_no_route_is_faster(case: Case) -> None:
    pipeline, rules, origins, _ = case
    planner = Planner(pipeline, rules)
    routes = all_routes(pipeline, rules, origins[0])
    for visited in range(rules.shortest, rules.longest + 1):
        best = planner.best(origins[0], visited=visited)
        assert best is not None
        loops_s = [planner.loop_s(route) for route in routes if len(route.peers) == visited]
        assert planner.loop_s(best) == pytest.approx(min(loops_s))


@given(cases())
def test_a_loop_takes_what_the_simulator_says(case: Case) -> None:
    pipeline, rules, origins, _ = case
    planner = Planner(pipeline, rules)
    for route in all_routes(pipeline, rules, origins[0])[:5]:
        simulated_s = simulate(pipeline, [route]).iteration_s
        assert planner.loop_s(route) == pytest.approx(simulated_s)


def test_banned_peers_are_avoided_and_penalties_weighed() -> None:
    pipeline = even_pipeline((1, 2, 1))
    planner = Planner(pipeline, Rules(stages=3, visited=3))
    assert planner.best(0) == Route((0, 1, 3))
    assert planner.best(0, banned=[1]) == Route((0, 2, 3))
    assert planner.best(0, penalty_s={1: 0.1}) == Route((0, 2, 3))
    assert planner.best(0, banned=[2], penalty_s={1: 9.0}) == Route((0, 1, 3))
    assert planner.best(0, banned=[1, 2]) is None


@given(whole_waves())
@settings(max_examples=60)
def test_no_routes_beat_the_bound_of_shared_uplinks(
    case: tuple[Pipeline, Rules, list[int], int],
) -> None:
    pipeline, rules, origins, seed = case
    routes = random(pipeline, rules, origins, seed)
    timeline = simulate(pipeline, routes, shared_uplinks=True)
    assert timeline.iteration_s >= uplink_bound_s(pipeline, rules, origins) - 1e-9


def test_an_origin_sends_twice_for_each_microbatch_on_its_line() -> None:
    """Forwards next to nothing, a second of line for each message: 6 messages, and the way back."""
    pipeline = even_pipeline((1, 1), forward_s=1e-6)
    hop_s = 2 * pipeline.costs.delay_s
    costs = replace(pipeline.costs, delay_s=0 * hop_s, transfer_s=hop_s)
    pipeline = replace(pipeline, costs=costs)
    rules = Rules(stages=2, visited=2)
    assert uplink_bound_s(pipeline, rules, [0] * 3) == pytest.approx(7.0, abs=1e-4)
    told = predict(pipeline, rules, [0] * 3, "full", shared_uplinks=True)
    assert told.iteration_s == pytest.approx(7.0, abs=1e-4)
    assert told.of_bound == pytest.approx(1.0, abs=1e-4)


@given(cases())
@settings(max_examples=60)
def test_no_stage_is_visited_less_often_than_that(
    case: tuple[Pipeline, Rules, list[int], int],
) -> None:
    """By searched routes, which repeat in waves that may not be whole."""
    pipeline, rules, origins, seed = case
    found = search_routes(pipeline, rules, origins, seed=seed, effort_s=0.0)
    least = 0 if rules.visited == 1 else fewest_visits(pipeline, rules, origins)
    for stage in range(1, rules.stages):
        assert sum(stage in route.stages(pipeline) for route in found.routes) >= least


def test_a_model_in_one_stage_sends_nothing() -> None:
    assert uplink_bound_s(even_pipeline((2,)), Rules(stages=1, visited=1), [0, 1]) == 0.0
