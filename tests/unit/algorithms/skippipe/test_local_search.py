"""Drawn steps keep rules and limits; trades leave every peer as often visited as before."""

from collections import Counter

from hypothesis import given

from murmuration.algorithms.skippipe.draws import Draws, peer_limits, stage_quota
from murmuration.algorithms.skippipe.local_search import random_step
from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Route, Rules, move_visit
from murmuration.algorithms.skippipe.routing import random
from tests.unit.algorithms.skippipe.pipelines import assert_fit_together, cases, even_pipeline

PIPELINE = even_pipeline((2, 2, 2, 2))
RULES = Rules(stages=4, visited=3)
ONE, OTHER = Route((0, 2, 4)), Route((1, 3, 6))


def test_a_route_has_no_stage_to_trade_for_one_of_fewer_stages_that_it_visits_too() -> None:
    routes, rules = [Route((0, 2, 4, 6)), Route((0, 2))], Rules(stages=4, visited=3, spread=1)
    full = (0,) * PIPELINE.peers
    drawn = [random_step(routes, 0, PIPELINE, rules, full, Draws(seed)) for seed in range(40)]
    steps = [step for step in drawn if step]
    assert steps
    assert all(step == {0: routes[1], 1: routes[0]} for step in steps)


def test_a_visit_moves_to_a_replica_with_room() -> None:
    assert move_visit(ONE, 3, PIPELINE) == Route((0, 3, 4))
    routes, rules = [ONE], Rules(stages=4, visited=3)
    room = (1, 1, 1, 1, 1, 0, 1, 1)
    drawn = [random_step(routes, 0, PIPELINE, rules, room, Draws(seed)) for seed in range(40)]
    steps = [step for step in drawn if step]
    assert steps
    assert all(step == {0: Route((0, 3, 4))} for step in steps)


@given(cases())
def test_drawn_steps_keep_rules_and_limits(
    case: tuple[Pipeline, Rules, list[int], int],
) -> None:
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
