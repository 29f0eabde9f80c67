"""Where planned visits collide, and how conflict-based search moves them apart."""

from hypothesis import given, settings

from algorithms.skippipe.draws import peer_limits, stage_quota
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Route, Rules
from algorithms.skippipe.routing import random
from algorithms.skippipe.scores import Journal, Scores
from algorithms.skippipe.untangle import Timetable, Untangling
from tests.unit.algorithms.skippipe.pipelines import assert_fit_together, cases, even_pipeline


def test_slots_of_one_origin_begin_a_forward_apart() -> None:
    pipeline = even_pipeline((2, 2))
    table = Timetable(pipeline, [Route((0, 2)), Route((0, 3)), Route((1, 2))], {})
    assert [visits[0].start_s for visits in table.visits] == [0.0, 1.0, 0.0]
    assert table.length_s(0) == 7.25


def test_two_visits_of_one_peer_at_a_time_collide() -> None:
    pipeline = even_pipeline((2, 2))
    table = Timetable(pipeline, [Route((0, 2)), Route((1, 2))], {})
    found = table.collisions()
    assert [(each.first.slot, each.second.slot, each.first.peer) for each in found] == [
        (0, 1, 2),
        (0, 1, 2),
    ]
    assert [each.first.returning for each in found] == [False, True]
    unreachable = Timetable(pipeline, [Route((0, 2)), Route((1, 3))], {})
    assert unreachable.collisions() == []


def test_a_wait_moves_a_visit_and_all_after_it() -> None:
    pipeline = even_pipeline((2, 2))
    table = Timetable(pipeline, [Route((0, 2)), Route((1, 2))], {(1, 2, False): 5.5})
    assert table.visits[1][1].start_s == 5.5
    assert table.length_s(1) == 7.25 + 4.0
    assert table.collisions() == []


def untangled(
    pipeline: Pipeline, rules: Rules, routes: list[Route], limits: tuple[int, ...]
) -> tuple[tuple[Route, ...], Scores]:
    journal = Journal(0.05)
    scores = Scores(pipeline, range(len(routes)), journal)
    untangling = Untangling(pipeline, Planner(pipeline, rules), scores, limits, journal)
    stages = [set(route.stages(pipeline)) for route in routes]
    banned = tuple(
        frozenset(peer for peer, stage in enumerate(pipeline.stage_of) if stage not in visited)
        for visited in stages
    )
    return untangling.run(tuple(routes), banned), scores


def test_who_would_wait_goes_by_a_free_replica() -> None:
    pipeline = even_pipeline((2, 2))
    crowded = [Route((0, 2)), Route((1, 2))]
    found, _ = untangled(pipeline, Rules(stages=2, visited=2), crowded, (3, 3, 3, 3))
    assert {route.peers[1] for route in found} == {2, 3}
    assert Timetable(pipeline, found, {}).collisions() == []


def test_where_no_replica_has_room_two_microbatches_trade() -> None:
    """Two of one origin arrive a forward apart; those of two origins arrive together."""
    pipeline = even_pipeline((2, 2))
    crowded = [Route((0, 2)), Route((1, 2)), Route((0, 3)), Route((1, 3))]
    found, scores = untangled(pipeline, Rules(stages=2, visited=2), crowded, (2, 2, 2, 2))
    assert scores.score(found) < scores.score(tuple(crowded))
    assert {route.peers[1] for route in found[:2]} == {2, 3}


@given(cases())
@settings(max_examples=40)
def test_constraints_stay_and_the_time_never_grows(
    case: tuple[Pipeline, Rules, list[int], int],
) -> None:
    pipeline, rules, origins, seed = case
    routes = random(pipeline, rules, origins, seed)
    limits = peer_limits(pipeline, stage_quota(len(routes), rules, seed))
    found, scores = untangled(pipeline, rules, routes, limits)
    assert_fit_together(found, pipeline, rules, limits)
    assert scores.score(found) <= scores.score(tuple(routes))
    for before, after in zip(routes, found, strict=True):
        assert after.stages(pipeline) == before.stages(pipeline)
