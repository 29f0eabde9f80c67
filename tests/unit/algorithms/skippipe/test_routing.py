"""The four presets over one signature, and one iteration by each."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from murmuration.algorithms.skippipe import routing as routings
from murmuration.algorithms.skippipe.route import Draws, Route, Rules, keeps_rules
from murmuration.algorithms.skippipe.routing import (
    ROUTINGS,
    random,
    stochastic,
)
from murmuration.algorithms.skippipe.search import search_routes
from tests.unit.algorithms.skippipe.pipelines import even_pipeline

COMPLETE = Rules(stages=3, visited=3)
EFFORT_S = 0.02


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_preset_routes_every_microbatch_the_same_way_each_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routings, "search_routes", partial(search_routes, effort_s=EFFORT_S))
    pipeline = even_pipeline((2, 3, 2))
    origins = [0, 1, 0, 1]
    routes = ROUTINGS[name](pipeline, COMPLETE, origins, 7)
    assert routes == ROUTINGS[name](pipeline, COMPLETE, origins, 7)
    assert [route.origin for route in routes] == origins
    assert all(keeps_rules(route.stages(pipeline), COMPLETE) for route in routes)


def test_how_much_is_drawn_is_no_matter_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_stochastic_sends_slow_replicas_less() -> None:
    pipeline = even_pipeline((1, 2))
    costs = pipeline.costs
    forward_s = costs.forward_s.copy()
    forward_s[1] = 4.0
    slow = replace(pipeline, costs=replace(costs, forward_s=forward_s, backward_s=1.5 * forward_s))
    routes = stochastic(slow, Rules(stages=2, visited=2), [0] * 10, 0)
    assert Counter(routes) == {Route((0, 1)): 2, Route((0, 2)): 8}
