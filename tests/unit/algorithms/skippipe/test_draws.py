"""Draws are the same everywhere, and coverage is equal, whatever the numbers."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.skippipe.draws import Draws, even_stage_sets, peer_limits, stage_quota
from murmuration.algorithms.skippipe.route import Rules, stage_refusals
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


@given(st.integers(1, 40), rules(), st.integers(0, 100), st.booleans())
def test_sets_are_allowed_and_meet_a_quota_that_is_even(
    routes: int, rules: Rules, seed: int, shortest_jumps: bool
) -> None:
    """The shortest jumps that reach the last stage are enough."""
    if shortest_jumps and rules.visited > 1:
        rules = replace(rules, max_jump=-(-(rules.stages - 1) // (rules.shortest - 1)))
    first, *others = quota = stage_quota(routes, rules, seed)
    assert first == routes
    assert sum(others) == routes * (rules.visited - 1)
    assert not others or max(others) - min(others) <= 1
    chosen = even_stage_sets(routes, rules, seed)
    assert all(stage_refusals(stages, rules) == () for stages in chosen)
    visits = Counter(stage for stages in chosen for stage in stages)
    assert tuple(visits[stage] for stage in range(rules.stages)) == tuple(quota)


@given(st.integers(1, 40), rules())
def test_over_as_many_seeds_as_stages_every_stage_is_visited_equally_often(
    routes: int, rules: Rules
) -> None:
    others = max(1, rules.stages - 1)
    quotas = [stage_quota(routes, rules, seed)[1:] for seed in range(others)]
    assert len({sum(each) for each in zip(*quotas, strict=True)}) <= 1


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


@pytest.mark.parametrize(
    ("sizes", "memory", "quota", "limits"),
    [
        ((2, 2), 3, (4, 4), (3, 3, 3, 3)),  # as often as it has memory
        ((1, 2), 2**40, (4, 3), (4, 3, 3)),  # not more often than its stage
        ((1, 2), 1, (5, 5), (5, 3, 2)),  # evenly what memory does not hold
    ],
)
def test_how_often_a_peer_may_be_visited(
    sizes: tuple[int, ...], memory: int, quota: tuple[int, ...], limits: tuple[int, ...]
) -> None:
    assert peer_limits(even_pipeline(sizes, memory=memory), quota) == limits
