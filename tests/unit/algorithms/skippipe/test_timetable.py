"""Planned visits without anybody waiting, and where they collide."""

from algorithms.skippipe.route import Route
from algorithms.skippipe.timetable import Timetable
from tests.unit.algorithms.skippipe.pipelines import even_pipeline


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
