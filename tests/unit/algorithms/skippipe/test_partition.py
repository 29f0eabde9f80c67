"""The cut into stages: contiguous, complete, with the least slowest stage."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.skippipe.partition import Layer, partition_layers, stage_layers

LAYERS = st.lists(
    st.builds(Layer, st.floats(0.01, 10.0), st.integers(1, 100)), min_size=1, max_size=8
)
OUTSIDE = st.builds(Layer, st.floats(0.0, 10.0), st.integers(0, 100))


def slowest_s(layers: list[Layer], cuts: tuple[int, ...], outside: Layer) -> float:
    ends = (0, *cuts, len(layers))
    parts = [sum(layer.forward_s for layer in layers[a:b]) for a, b in pairwise(ends)]
    parts[0] += outside.forward_s
    return max(parts)


@given(LAYERS, OUTSIDE, st.data())
def test_no_other_cut_has_a_faster_slowest_stage(
    layers: list[Layer], outside: Layer, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(layers)))
    found = partition_layers(layers, stages, outside=outside)
    assert [stage.first for stage in found] == [0, *(stage.last for stage in found[:-1])]
    assert found[-1].last == len(layers)
    assert all(stage.first < stage.last for stage in found)
    all_cuts = combinations(range(1, len(layers)), stages - 1)
    best_s = min(slowest_s(layers, cuts, outside) for cuts in all_cuts)
    assert max(stage.forward_s for stage in found) == pytest.approx(best_s)


def test_stage_0_gets_fewer_layers_as_it_holds_the_head_too() -> None:
    found = partition_layers([Layer(1.0, 1)] * 7, 2, outside=Layer(3.0, 10))
    assert [(stage.first, stage.last) for stage in found] == [(0, 2), (2, 7)]
    assert [stage.bytes for stage in found] == [12, 5]


def test_of_equally_slow_cuts_the_most_even_is_taken() -> None:
    found = partition_layers([Layer(4.0, 1), *[Layer(1.0, 1)] * 4], 3)
    assert [(stage.first, stage.last) for stage in found] == [(0, 1), (1, 3), (3, 5)]


def test_of_two_cuts_with_one_slowest_stage_the_squares_decide() -> None:
    found = partition_layers([Layer(5.0, 1), *[Layer(1.0, 1)] * 6], 3)
    assert [stage.last - stage.first for stage in found] == [1, 3, 3]


def test_memory_moves_the_cut() -> None:
    layers = [Layer(1.0, 10)] * 4
    found = partition_layers(layers, 2, limit_bytes=[10, 30])
    assert [(stage.first, stage.last) for stage in found] == [(0, 1), (1, 4)]


@pytest.mark.parametrize(
    ("stages", "limit_bytes", "reason"),
    [
        (5, None, "4 layers cannot be cut into 5"),
        (2, [10], "1 memory limits for 2 stages"),
        (2, [5, 100], "stage 0 can hold 5 bytes"),
        (2, [10, 10], "the model takes 40 bytes"),
    ],
)
def test_why_there_is_no_cut(stages: int, limit_bytes: list[int] | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        partition_layers([Layer(1.0, 10)] * 4, stages, limit_bytes=limit_bytes)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=8), st.integers(0, 10**12), st.data())
def test_stages_by_size_cover_all_layers_in_order(
    sizes: list[int], outer_size: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(sizes)))
    found = stage_layers(sizes, outer_size, stages)
    assert len(found) == stages
    assert [layer for first, last in found for layer in range(first, last + 1)] == list(
        range(len(sizes))
    )
    assert all(first <= last for first, last in found)


def test_stage_0_has_fewer_layers_where_the_embedding_is_large() -> None:
    assert stage_layers([10] * 6, 0, 3) == [(0, 1), (2, 3), (4, 5)]
    assert stage_layers([10] * 6, 15, 3) == [(0, 0), (1, 2), (3, 5)]
