"""The cut into stages: contiguous, complete, with the least largest stage that memory allows."""

import re
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.skippipe.partition import StageMemory, spans, stage_layers

MOST_LAYERS = 8
SIZES = st.lists(st.integers(1, 10**12), min_size=1, max_size=MOST_LAYERS)
# Binary fractions, whose sums are exact: which of two cuts is better is then beyond doubt.
SECONDS = st.lists(st.integers(1, 2**20).map(lambda n: n / 2**22), min_size=1, max_size=MOST_LAYERS)
MIB = 2**20

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


def test_stage_0_has_fewer_layers_where_the_embedding_is_large() -> None:
    assert stage_layers([10] * 6, 0, 3) == [(0, 1), (2, 3), (4, 5)]
    assert stage_layers([10] * 6, 15, 3) == [(0, 0), (1, 2), (3, 5)]
    assert stage_layers([1] * 7, 3, 2) == [(0, 1), (2, 6)]


def test_of_equally_large_cuts_the_most_even_is_taken() -> None:
    assert stage_layers([4, 1, 1, 1, 1], 0, 3) == [(0, 0), (1, 2), (3, 4)]
    assert stage_layers([5, 1, 1, 1, 1, 1, 1], 0, 3) == [(0, 0), (1, 3), (4, 6)]
    # The largest comes last, and those before it are even all the same.
    assert stage_layers([3, 1, 2, 2, 9], 0, 3) == [(0, 1), (2, 3), (4, 4)]


def test_seconds_are_costs_as_parameters_are() -> None:
    assert stage_layers([0.25, 0.25, 0.5, 0.25], 0.5, 2) == [(0, 0), (1, 3)]
    assert stage_layers([0.25, 0.25, 0.5, 0.25], 0.25, 2) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("stages", [0, 5])
def test_each_stage_needs_a_layer(stages: int) -> None:
    with pytest.raises(ValueError, match=f"4 layers cannot be cut into {stages} stages"):
        stage_layers([10] * 4, 0, stages)


# ---------------------------------------------------------------------------------------- memory


def memory(
    layer_bytes: Sequence[int], limit_bytes: int, outer_bytes: int = 0, stage_bytes: int = 0
) -> StageMemory:
    return StageMemory(
        layer_bytes=layer_bytes,
        outer_bytes=outer_bytes,
        stage_bytes=stage_bytes,
        limit_bytes=limit_bytes,
    )


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99)), min_size=1, max_size=MOST_LAYERS),
    st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 30), st.integers(0, 400)),
    st.data(),
)
def test_the_best_of_the_cuts_that_fit_is_taken_and_none_is_refused_that_fits(
    layers: list[tuple[int, int]], other: tuple[int, int, int, int], data: st.DataObject
) -> None:
    costs, sizes = (list(each) for each in zip(*layers, strict=True))
    outer_cost, outer_bytes, stage_bytes, limit_bytes = other
    stages = data.draw(st.integers(1, len(costs)))
    bound = memory(sizes, limit_bytes, outer_bytes, stage_bytes)
    fitting = [
        cut
        for cut in all_cuts(len(costs), stages)
        if score(sizes, outer_bytes, cut)[0] + stage_bytes <= limit_bytes
    ]
    if fitting:
        found = stage_layers(costs, outer_cost, stages, bound)
        assert found in fitting
        assert score(costs, outer_cost, found) == min(
            score(costs, outer_cost, cut) for cut in fitting
        )
    else:
        with pytest.raises(ValueError, match="MiB"):
            stage_layers(costs, outer_cost, stages, bound)


def test_memory_can_ask_for_a_cut_that_is_slower() -> None:
    costs, sizes = [1, 1, 1, 1], [30, 10, 10, 10]
    assert stage_layers(costs, 0, 2) == [(0, 1), (2, 3)]
    assert stage_layers(costs, 0, 2, memory(sizes, 40)) == [(0, 1), (2, 3)]
    assert stage_layers(costs, 0, 2, memory(sizes, 35)) == [(0, 0), (1, 3)]
    assert stage_layers(costs, 0, 2, memory(sizes, 35, stage_bytes=5)) == [(0, 0), (1, 3)]


def test_what_a_stage_needs_is_told() -> None:
    bound = memory([3, 4, 5], 99, outer_bytes=10, stage_bytes=1)
    assert bound.of_stage(0, 0, 1) == 18
    assert bound.of_stage(1, 0, 1) == 8
    assert bound.of_stage(1, 2, 2) == 6


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (
            memory([MIB] * 3, 3 * MIB, outer_bytes=2 * MIB, stage_bytes=MIB),
            "stage 0 with embedding, norm, head and layer 0 alone needs 4 MiB, but has 3 MiB",
        ),
        (
            memory([MIB, 5 * MIB, MIB], 4 * MIB, stage_bytes=MIB),
            "stage 1 with layer 1 alone needs 6 MiB, but has 4 MiB",
        ),
        (
            memory([MIB, 2 * MIB, MIB], 2 * MIB),
            "2 stages of 2 MiB hold layers 0 to 1 at most: layer 2 of 0 to 2 does not fit",
        ),
    ],
    ids=["outer", "layer", "all"],
)
def test_what_does_not_fit_is_named(bound: StageMemory, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        stage_layers([1, 1, 1], 0, 2, bound)


# ----------------------------------------------------------------------------------------- spans


def test_counts_of_layers_are_spans() -> None:
    assert spans([3, 1, 2]) == [(0, 2), (3, 3), (4, 5)]
