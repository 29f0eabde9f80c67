"""The mean in a fixed order: the same bits for whoever computes it, in whatever blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.diloco import mean_in_order
from algorithms.fragments import shard_bounds


def contributions(count: int, elements: int, seed: int) -> list[torch.Tensor]:
    """Of very different sizes, so that the order of the sum shows in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(elements, generator=generator) * 10.0 ** (index % 7 - 3)
        for index in range(count)
    ]


@given(st.integers(1, 9), st.integers(0, 3))
def test_it_is_the_left_to_right_sum_over_the_count(count: int, seed: int) -> None:
    values = contributions(count, 50, seed)
    expected = values[0].clone()
    for value in values[1:]:
        expected = expected + value
    assert torch.equal(mean_in_order(iter(values)), expected / count)


@given(
    st.integers(1, 7),
    st.integers(1, 5000),
    st.integers(1, 7),
    st.integers(1, 64),
    st.integers(0, 9),
)
def test_the_mean_of_blocks_is_the_means_blocks_bit_for_bit(
    count: int, elements: int, shards: int, align: int, seed: int
) -> None:
    values = contributions(count, elements, seed)
    blocks = [
        mean_in_order(value[start:stop] for value in values)
        for start, stop in shard_bounds(elements, shards, align)
    ]
    assert torch.equal(torch.cat(blocks), mean_in_order(values))


def test_the_order_matters_to_the_last_bits_so_it_must_be_fixed() -> None:
    big, small = torch.tensor([1e8]), torch.tensor([1.0])
    assert mean_in_order([big, small, -big]).item() == 0.0
    assert mean_in_order([big, -big, small]).item() == pytest.approx(1 / 3)


def test_the_result_is_fresh_and_the_inputs_are_left_alone() -> None:
    value = torch.tensor([1.0, 2.0])
    mean = mean_in_order([value])
    assert torch.equal(mean, value)
    mean.zero_()
    mean_in_order([value, value]).zero_()
    assert value.tolist() == [1.0, 2.0]


def test_the_mean_of_equal_pairs_is_exact() -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean_in_order([value] * 4), value)


def test_there_must_be_something_to_average() -> None:
    with pytest.raises(ValueError, match="the mean of no contributions"):
        mean_in_order([])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 3))
def test_weights_count_what_they_say(weights: list[int], seed: int) -> None:
    values = contributions(len(weights), 50, seed)
    repeated = [value for value, weight in zip(values, weights, strict=True) for _ in range(weight)]
    expected = torch.stack(repeated).double().mean(0)
    found = mean_in_order(values, weights).double()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@given(st.integers(1, 6), st.integers(1, 50))
def test_equal_weights_change_no_bit(count: int, weight: int) -> None:
    values = contributions(count, 50, seed=0)
    assert torch.equal(mean_in_order(values, [weight] * count), mean_in_order(values))
