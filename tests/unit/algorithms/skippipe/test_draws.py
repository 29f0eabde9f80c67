"""Draws are the same everywhere, and coverage is equal, whatever the numbers."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.skippipe.draws import Draws, even_stage_sets, peer_limits, stage_quota
from algorithms.skippipe.route import Rules, stage_refusals
from tests.unit.algorithms.skippipe.pipelines import even_pipeline


def test_draws_are_the_same_on_every_machine_and_version() -> None:
    draws = Draws(7)
    assert [draws.below(100) for _ in range(5)] == [32, 15, 65, 7, 53]
    assert draws.shuffled(range(6)) == [1, 3, 4, 5, 0, 2]


@given(st.integers(0, 2**64), st.lists(st.integers(), min_size=1, max_size=20))
def test_a_shuffle_keeps_all_and_a_choice_is_one_of_them(seed: int, values: list[int]) -> None:
    draws = Draws(seed)
    assert sorted(draws.shuffled(values)) == sorted(values)
    assert draws.one_of(values) in values
    assert all(0 <= draws.below(3) < 3 for _ in range(20))


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    stages = draw(st.integers(1, 12))
    visited = draw(st.integers(min(2, stages), stages))
    spread = draw(st.integers(0, max(0, min(visited - 2, stages - visited))))
    return Rules(stages=stages, visited=visited, spread=spread, max_jump=11)


@given(st.integers(1, 40), rules(), st.integers(0, 100))
def test_sets_are_allowed_and_meet_the_quota(routes: int, rules: Rules, seed: int) -> None:
    chosen = even_stage_sets(routes, rules, seed)
    assert all(stage_refusals(stages, rules) == () for stages in chosen)
    visits = Counter(stage for stages in chosen for stage in stages)
    assert tuple(visits[stage] for stage in range(rules.stages)) == stage_quota(routes, rules, seed)


@given(st.integers(1, 40), rules(), st.integers(0, 100))
def test_the_quota_is_even_and_adds_up(routes: int, rules: Rules, seed: int) -> None:
    first, *others = stage_quota(routes, rules, seed)
    assert first == routes
    assert sum(others) == routes * (rules.visited - 1)
    assert not others or max(others) - min(others) <= 1


@given(st.integers(1, 40), rules())
def test_over_as_many_seeds_as_stages_every_stage_is_visited_equally_often(
    routes: int, rules: Rules
) -> None:
    others = max(1, rules.stages - 1)
    quotas = [stage_quota(routes, rules, seed)[1:] for seed in range(others)]
    assert len({sum(each) for each in zip(*quotas, strict=True)}) <= 1


@given(st.integers(1, 40), rules(), st.integers(0, 100))
def test_the_shortest_jumps_that_reach_the_last_stage_are_enough(
    routes: int, rules: Rules, seed: int
) -> None:
    if rules.visited > 1:
        rules = replace(rules, max_jump=-(-(rules.stages - 1) // (rules.shortest - 1)))
    chosen = even_stage_sets(routes, rules, seed)
    assert all(stage_refusals(stages, rules) == () for stages in chosen)
    visits = Counter(stage for stages in chosen for stage in stages)
    assert tuple(visits[stage] for stage in range(rules.stages)) == stage_quota(routes, rules, seed)


@pytest.mark.parametrize(("stages", "visited", "spread"), [(6, 4, 1), (8, 5, 2), (12, 8, 1)])
def test_half_of_unequal_routes_visit_more_stages_and_half_fewer(
    stages: int, visited: int, spread: int
) -> None:
    rules = Rules(stages=stages, visited=visited, spread=spread)
    for seed in range(20):
        lengths = Counter(map(len, even_stage_sets(20, rules, seed)))
        assert lengths[rules.shortest] == lengths[rules.longest] >= 8


def test_unequal_routes_leave_out_every_choice_of_stages_about_equally_often() -> None:
    """Of 6 stages 3 are left out: ten choices, three of them in a row among those."""
    rules = Rules(stages=6, visited=4, spread=1)
    drawn = Counter(stages for seed in range(400) for stages in even_stage_sets(10, rules, seed))
    short = [count for stages, count in drawn.items() if len(stages) == 3]
    assert len(short) == 10
    assert min(short) > 0.8 * max(short)


def test_which_stages_go_together_changes_with_the_seed() -> None:
    for rules in (Rules(stages=6, visited=4), Rules(stages=9, visited=4)):
        drawn = {tuple(sorted(even_stage_sets(10, rules, seed))) for seed in range(8)}
        assert len(drawn) >= 6


def test_a_peer_may_be_visited_as_often_as_it_has_memory() -> None:
    assert peer_limits(even_pipeline((2, 2), memory=3), (4, 4)) == (3, 3, 3, 3)


def test_no_peer_is_visited_more_often_than_its_stage() -> None:
    assert peer_limits(even_pipeline((1, 2), memory=2**40), (4, 3)) == (4, 3, 3)


def test_peers_share_evenly_what_memory_does_not_hold() -> None:
    assert peer_limits(even_pipeline((1, 2), memory=1), (5, 5)) == (5, 3, 2)
