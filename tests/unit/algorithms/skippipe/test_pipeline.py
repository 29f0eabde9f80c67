"""Which layers go to which stage."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.skippipe.pipeline import stage_layers

# ------------------------------------------------------------------ which layers to which stage

MOST_LAYERS = 8
SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=MOST_LAYERS)
# Binary fractions, whose sums are exact: which of two cuts is better is then beyond doubt.
SECONDS = st.lists(st.integers(1, 2**20).map(lambda n: n / 2**22), min_size=1, max_size=MOST_LAYERS)

Span = tuple[int, int]


def all_cuts(layers: int, stages: int) -> list[list[Span]]:
    """Every way to cut, by brute force."""
    inner = combinations(range(1, layers), stages - 1)
    return [[(a, b - 1) for a, b in pairwise((0, *ends, layers))] for ends in inner]


def score(costs: Sequence[float], outer_cost: float, cut: list[Span]) -> tuple[float, float]:
    """(the largest stage, the sum of squares)."""
    stages = [sum(costs[first : last + 1]) for first, last in cut]
    stages[0] += outer_cost
    return max(stages), sum(stage**2 for stage in stages)


@given(SIZES | SECONDS, st.integers(0, 10**12), st.data())
def test_no_other_cut_has_a_smaller_largest_stage_or_is_more_even(
    costs: list[float], outer_cost: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = stage_layers(costs, outer_cost, stages)
    cuts = all_cuts(len(costs), stages)
    assert found in cuts
    assert score(costs, outer_cost, found) == min(score(costs, outer_cost, cut) for cut in cuts)


@pytest.mark.parametrize("stages", [0, 5])
def test_each_stage_needs_a_layer(stages: int) -> None:
    with pytest.raises(ValueError, match=f"4 layers cannot be cut into {stages} stages"):
        stage_layers([10] * 4, 0, stages)
