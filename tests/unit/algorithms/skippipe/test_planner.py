"""The best route of one microbatch against all routes there are."""

from itertools import product

import pytest
from hypothesis import given

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.planner import Planner
from murmuration.algorithms.skippipe.route import Route, Rules, stage_refusals
from murmuration.algorithms.skippipe.simulator import simulate
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline

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


def test_banned_peers_are_avoided() -> None:
    pipeline = even_pipeline((1, 2, 1))
    planner = Planner(pipeline, Rules(stages=3, visited=3))
    assert planner.best(0) == Route((0, 1, 3))
    assert planner.best(0, banned=[1]) == Route((0, 2, 3))
    assert planner.best(0, banned=[1, 2]) is None
