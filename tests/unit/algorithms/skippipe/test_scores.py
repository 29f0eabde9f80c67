"""Slots, and scores that are simulated once."""

from murmuration.algorithms.skippipe.route import Route
from murmuration.algorithms.skippipe.scores import Budget, Scores, slots_of
from murmuration.algorithms.skippipe.simulator import simulate
from tests.unit.algorithms.skippipe.pipelines import even_pipeline


def test_an_origin_takes_as_many_slots_in_turns_as_it_has_memory() -> None:
    pipeline = even_pipeline((2, 2), memory=2)
    slots, origins = slots_of([0, 1, 0, 1, 0, 1, 0], pipeline)
    assert slots == (0, 1, 2, 3, 0, 1, 2)
    assert origins == (0, 1, 0, 1)


def test_waves_repeat_the_slots_and_known_routes_cost_nothing() -> None:
    pipeline, budget = even_pipeline((1, 2)), Budget(1.0)
    scores = Scores(pipeline, (0, 1, 0, 1), budget)
    routes = (Route((0, 1)), Route((0, 2)))
    score = scores.score(routes)
    assert score[0] == simulate(pipeline, [*routes, *routes]).iteration_s
    spent_s = budget.spent_s
    assert spent_s > 0
    assert scores.score(routes) == score
    assert budget.spent_s == spent_s
