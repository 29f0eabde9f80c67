"""The cut into stages: contiguous, complete, with the least largest stage."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.skippipe.partition import stage_layers

SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=8)


def largest(sizes: list[int], cuts: tuple[int, ...], outer_size: int) -> int:
    ends = (0, *cuts, len(sizes))
    parts = [sum(sizes[a:b]) for a, b in pairwise(ends)]
    parts[0] += outer_size
    return max(parts)


@given(SIZES, st.integers(0, 10**12), st.data())
def test_no_other_cut_has_a_smaller_largest_stage(
    sizes: list[int], outer_size: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(sizes)))
    found = stage_layers(sizes, outer_size, stages)
    assert len(found) == stages
    assert [layer for first, last in found for layer in range(first, last + 1)] == list(
        range(len(sizes))
    )
    assert all(first <= last for first, last in found)
    all_cuts = combinations(range(1, len(sizes)), stages - 1)
    best = min(largest(sizes, cuts, outer_size) for cuts in all_cuts)
    assert largest(sizes, tuple(first for first, _ in found[1:]), outer_size) == best


def test_stage_0_has_fewer_layers_where_the_embedding_is_large() -> None:
    assert stage_layers([10] * 6, 0, 3) == [(0, 1), (2, 3), (4, 5)]
    assert stage_layers([10] * 6, 15, 3) == [(0, 0), (1, 2), (3, 5)]
    assert stage_layers([1] * 7, 3, 2) == [(0, 1), (2, 6)]


def test_of_equally_large_cuts_the_most_even_is_taken() -> None:
    assert stage_layers([4, 1, 1, 1, 1], 0, 3) == [(0, 0), (1, 2), (3, 4)]
    assert stage_layers([5, 1, 1, 1, 1, 1, 1], 0, 3) == [(0, 0), (1, 3), (4, 6)]


@pytest.mark.parametrize("stages", [0, 5])
def test_each_stage_needs_a_layer(stages: int) -> None:
    with pytest.raises(ValueError, match=f"4 layers cannot be cut into {stages} stages"):
        stage_layers([10] * 4, 0, stages)
