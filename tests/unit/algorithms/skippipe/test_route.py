"""Constraints on routes, each with its reason, and trades of two routes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.skippipe.route import (
    Route,
    Rules,
    stage_refusals,
    trade_all,
    trade_replica,
    trade_stage,
    visited_stages,
)
from tests.unit.algorithms.skippipe.pipelines import even_pipeline

RULES = Rules(stages=8, visited=4)


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ((1, 2, 3, 4), "does not begin on stage 0"),
        ((), "does not begin on stage 0"),
        ((0, 2, 2, 4), "stage 2 is visited 2 times"),
        ((0, 2, 3), "visits 3 stages instead of 4"),
        ((0, 5, 6, 7), "jumps from stage 0 to 5"),
        ((0, 3, 2, 5), "goes back from stage 3 to 2"),
    ],
)
def test_what_a_route_may_not_do_is_told(stages: tuple[int, ...], reason: str) -> None:
    assert any(reason in each for each in stage_refusals(stages, RULES))


def test_unequal_routes_are_as_long_as_the_spread_allows() -> None:
    rules = Rules(stages=8, visited=5, spread=2)
    assert stage_refusals((0, 3, 6), rules) == ()
    assert stage_refusals((0, 1, 2, 3, 4, 5, 6), rules) == ()
    assert stage_refusals((0, 3), rules) == ("it visits 2 stages instead of 3 to 7",)
    assert stage_refusals(tuple(range(8)), rules) == ("it visits 8 stages instead of 3 to 7",)


@pytest.mark.parametrize(
    ("stages", "visited", "spread", "reason"),
    [
        (6, 6, 1, "routes of 6 of 6 stages cannot be unequal by 1"),
        (6, 3, 2, "each visits at least 2 and at most 6"),
        (6, 4, -1, "cannot be unequal by -1"),
        (12, 5, 2, "2 steps of at most 4 stages do not reach stage 11"),
    ],
)
def test_a_spread_that_no_routes_can_have_is_refused(
    stages: int, visited: int, spread: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Rules(stages=stages, visited=visited, spread=spread)


def test_ascending_routes_are_allowed() -> None:
    assert stage_refusals((0, 1, 4, 7), RULES) == ()


@given(st.lists(st.integers(0, 7), max_size=8))
def test_what_is_allowed_begins_on_stage_0_and_ascends_without_long_jumps(
    stages: list[int],
) -> None:
    if stage_refusals(stages, RULES) == ():
        assert stages[0] == 0
        assert len(stages) == 4
        steps = [there - here for here, there in pairwise(stages)]
        assert all(1 <= step <= 4 for step in steps)


@pytest.mark.parametrize(
    ("stages", "visited", "reason"),
    [
        (4, 5, "cannot visit 5 of 4"),
        (4, 0, "cannot visit 0 of 4"),
        (4, 1, "untrained"),
        (12, 3, "do not reach stage 11"),
    ],
)
def test_rules_that_no_route_can_keep_are_refused(stages: int, visited: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Rules(stages=stages, visited=visited)


@pytest.mark.parametrize(
    ("stages", "skip", "visited"), [(6, 0.33, 4), (6, 0.17, 5), (4, 0.25, 3), (6, 0, 6), (1, 0, 1)]
)
def test_a_skip_ratio_counts_stage_0(stages: int, skip: float, visited: int) -> None:
    assert visited_stages(stages, skip) == visited
    assert Rules(stages=stages, visited=visited).skip_ratio == pytest.approx(skip, abs=0.01)


def test_a_skip_ratio_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="skip ratio of 1"):
        visited_stages(6, 1.0)


PIPELINE = even_pipeline((2, 2, 2, 2))
THREE_OF_FOUR = Rules(stages=4, visited=3)
ONE, OTHER = Route((0, 2, 4)), Route((1, 3, 6))


def test_replicas_of_a_stage_are_exchanged() -> None:
    assert trade_replica(ONE, OTHER, 1, PIPELINE) == (Route((0, 3, 4)), Route((1, 2, 6)))
    assert trade_replica(ONE, OTHER, 2, PIPELINE) is None
    assert trade_replica(ONE, ONE, 1, PIPELINE) is None


def test_stages_are_exchanged_where_each_lacks_the_others() -> None:
    traded = trade_stage(ONE, OTHER, 2, 3, PIPELINE, THREE_OF_FOUR)
    assert traded == (Route((0, 2, 6)), Route((1, 3, 4)))
    assert trade_stage(ONE, OTHER, 1, 3, PIPELINE, THREE_OF_FOUR) is None


def test_a_trade_after_which_a_route_jumps_too_far_is_none() -> None:
    line = even_pipeline((1, 1, 1, 1, 1))
    one, other = Route((0, 2, 4)), Route((0, 1, 3))
    near, far = (Rules(stages=5, visited=3, max_jump=jump) for jump in (2, 3))
    assert trade_stage(one, other, 2, 1, line, near) is None
    assert trade_stage(one, other, 2, 1, line, far) == (Route((0, 1, 4)), Route((0, 2, 3)))


def test_whole_ways_are_exchanged_but_not_origins() -> None:
    assert trade_all(ONE, OTHER) == (Route((0, 3, 6)), Route((1, 2, 4)))
