"""The four presets over one signature, and one iteration by each."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.algorithms.skippipe import routing as routings
from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Draws, Route, Rules, stage_refusals
from murmuration.algorithms.skippipe.routing import (
    ROUTINGS,
    ReplicaQueue,
    full,
    origins_in_turns,
    random,
    stochastic,
)
from murmuration.algorithms.skippipe.search import search_routes
from tests.lab.placement import NEVER_SKIP, predict, rules_of
from tests.lab.skippipe_routes import lower_bound_s
from tests.lab.timeline import simulate
from tests.unit.algorithms.skippipe.pipelines import cases, even_pipeline, whole_waves

Case = tuple[Pipeline, Rules, list[int], int]
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
    assert all(stage_refusals(route.stages(pipeline), COMPLETE) == () for route in routes)


@pytest.mark.parametrize("name", ["full", "stochastic"])
def test_who_cannot_skip_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"routing '{name}' visits all 3 stages, not 2"):
        ROUTINGS[name](even_pipeline((1, 1, 1)), Rules(stages=3, visited=2), [0], 0)


def test_full_uses_every_replica_equally_and_ignores_the_seed() -> None:
    pipeline = even_pipeline((2, 3, 2))
    routes = full(pipeline, COMPLETE, [0, 1] * 3, 1)
    assert routes == full(pipeline, COMPLETE, [0, 1] * 3, 2)
    loads = Counter(peer for route in routes for peer in route.peers)
    assert [loads[peer] for peer in range(7)] == [3, 3, 2, 2, 2, 3, 3]


def test_random_permutes_the_replicas_of_every_batch() -> None:
    pipeline = even_pipeline((3, 3, 3))
    seen = set()
    for seed in range(50):
        routes = random(pipeline, COMPLETE, [0, 1, 2], seed)
        for stage in (1, 2):
            assert {route.peers[stage] for route in routes} == set(pipeline.stages[stage])
        seen.add(tuple(route.peers[1] for route in routes))
    assert len(seen) == 6  # all permutations


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


@given(cases())
def test_random_keeps_the_rules_and_is_not_below_the_bound(case: Case) -> None:
    pipeline, rules, origins, seed = case
    routes = random(pipeline, rules, origins, seed)
    assert all(stage_refusals(route.stages(pipeline), rules) == () for route in routes)
    bound_s = lower_bound_s(pipeline, rules, origins)
    assert simulate(pipeline, routes).iteration_s >= bound_s - 1e-9


def test_stochastic_sends_slow_replicas_less() -> None:
    pipeline = even_pipeline((1, 2))
    costs = pipeline.costs
    forward_s = costs.forward_s.copy()
    forward_s[1] = 4.0
    slow = replace(pipeline, costs=replace(costs, forward_s=forward_s, backward_s=1.5 * forward_s))
    routes = stochastic(slow, Rules(stages=2, visited=2), [0] * 10, 0)
    assert Counter(routes) == {Route((0, 1)): 2, Route((0, 2)): 8}


def test_microbatches_follow_throughput_and_ties_go_to_the_lower_peer() -> None:
    queue = ReplicaQueue({1: 1.0, 2: 3.0})
    assert Counter(queue.choose() for _ in range(40)) == {1: 30, 2: 10}
    queue = ReplicaQueue({5: 1.0, 2: 1.0, 9: 1.0})
    assert [queue.choose() for _ in range(6)] == [2, 5, 9, 2, 5, 9]


@given(whole_waves(), st.sampled_from(sorted(ROUTINGS)), st.booleans())
@settings(max_examples=60)
def test_every_routing_is_told_as_it_is(
    case: tuple[Pipeline, Rules, list[int], int], routing: str, shared: bool
) -> None:
    pipeline, rules, origins, seed = case
    told = predict(
        pipeline, rules, origins, routing, seed, shared_uplinks=shared, effort_s=EFFORT_S
    )
    assert [route.origin for route in told.routes] == origins
    assert not any(stage_refusals(route.stages(pipeline), told.rules) for route in told.routes)
    assert told.timeline == simulate(pipeline, told.routes, shared_uplinks=shared)
    assert told.iteration_s == max(end_s for end_s in told.timeline.finish_s if end_s)
    assert all(0 <= share <= 1 + 1e-9 for share in told.utilization)


def test_utilization_is_the_share_of_computing_and_waves_follow_where_memory_is_short() -> None:
    """One microbatch on two stages: 2.75 s of stage 0 and 2.5 s of stage 1."""
    rules = Rules(stages=2, visited=2)
    told = predict(even_pipeline((1, 1)), rules, [0], "full")
    assert told.iteration_s == 7.25
    assert told.utilization == (2.75 / 7.25, 2.5 / 7.25)
    told = predict(even_pipeline((1, 1), memory=1), rules, [0] * 4, "full")
    assert told.iteration_s == 4 * 7.25
    assert told.timeline.peak == (1, 1)


def test_origins_take_turns_and_may_have_unequal_shares() -> None:
    pipeline = even_pipeline((2, 1, 1))
    assert origins_in_turns(pipeline, 3) == [0, 1, 0, 1, 0, 1]
    told = predict(pipeline, Rules(stages=3, visited=2), [0, 1, 0, 0], "skip", effort_s=EFFORT_S)
    assert Counter(route.origin for route in told.routes) == {0: 3, 1: 1}


def test_some_routings_visit_all_stages_whatever_may_be_skipped() -> None:
    pipeline, rules = even_pipeline((2, 2, 2, 2)), Rules(stages=4, visited=3, spread=1)
    origins, complete = origins_in_turns(pipeline, 3), Rules(stages=4, visited=4)
    for routing in ROUTINGS:
        told = predict(pipeline, rules, origins, routing, effort_s=EFFORT_S)
        skips = routing not in NEVER_SKIP
        assert told.rules == rules_of(routing, rules) == (rules if skips else complete)
        lengths = {len(route.peers) for route in told.routes}
        assert {2, 4} <= lengths if skips else lengths == {4}
        assert (told.found is not None) == (routing == "skip")


def test_the_search_is_judged_on_the_uplinks_that_are_asked_for() -> None:
    pipeline, rules = even_pipeline((2, 2, 2)), Rules(stages=3, visited=2)
    hop_s = pipeline.costs.delay_s
    costs = replace(pipeline.costs, delay_s=0 * hop_s, transfer_s=hop_s)
    pipeline = replace(pipeline, costs=costs)
    origins = origins_in_turns(pipeline, 3)
    alone = predict(pipeline, rules, origins, "skip", effort_s=EFFORT_S)
    shared = predict(pipeline, rules, origins, "skip", shared_uplinks=True, effort_s=EFFORT_S)
    for told in (alone, shared):
        assert told.found is not None
        assert told.found.iteration_s == told.iteration_s
    assert shared.iteration_s >= alone.iteration_s


def test_the_same_seed_gives_the_same_prediction() -> None:
    pipeline, rules = even_pipeline((2, 2, 2, 2)), Rules(stages=4, visited=3)
    origins = origins_in_turns(pipeline, 3)
    for routing in ("random", "skip"):
        one, again, other = (
            predict(pipeline, rules, origins, routing, seed, effort_s=EFFORT_S)
            for seed in (1, 1, 2)
        )
        assert one == again
        assert one.routes != other.routes


def test_what_does_not_fit_is_refused() -> None:
    pipeline, rules = even_pipeline((1, 1)), Rules(stages=2, visited=2)
    with pytest.raises(ValueError, match="no routing 'fast'; use one of full, random"):
        predict(pipeline, rules, [0], "fast")
    with pytest.raises(ValueError, match="no microbatch"):
        predict(pipeline, rules, [], "full")
