"""The bound of lines that a peer's messages share: a closed form, and that nothing beats it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.skippipe.bound import uplink_bound_s
from algorithms.skippipe.coverage import fewest_visits
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.prediction import origins_in_turns, predict
from algorithms.skippipe.route import Rules
from algorithms.skippipe.routing import random
from algorithms.skippipe.search import search_routes
from algorithms.skippipe.simulator import simulate
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline, pipelines, rules_for


@st.composite
def whole_waves(draw: st.DrawFn) -> tuple[Pipeline, Rules, list[int], int]:
    """(pipeline, rules, origins, seed), each origin with a multiple of its memory."""
    pipeline = draw(pipelines())
    memory = draw(st.integers(1, 3))
    pipeline = replace(pipeline, memory=(memory,) * pipeline.peers)
    rules = draw(rules_for(len(pipeline.stages)))
    origins = origins_in_turns(pipeline, memory * draw(st.integers(1, 3)))
    return pipeline, rules, origins, draw(st.integers(0, 2**32))


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
