import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.codecs.topk import CHUNK, TopK

codec = TopK()


def values_of(elements: int, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def round_trip(values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), values.numel())


@given(elements=st.integers(1, CHUNK), power=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_largest_are_kept_and_bounds_hold(elements: int, power: int, seed: int) -> None:
    values = values_of(elements, seed) ** power
    decoded = round_trip(values).to(torch.float64)
    kept = math.ceil(elements / 64)
    largest = values.abs().topk(kept).indices
    nonzero = decoded.nonzero().view(-1)
    assert set(nonzero.tolist()) <= set(largest.tolist())
    assert torch.equal(decoded[nonzero].sign(), values[nonzero].sign().to(torch.float64))
    exact = values.to(torch.float64)
    left, energy = (exact - decoded).square().sum(), decoded.square().sum()
    assert left <= exact.square().sum() - energy * (1 - 2**-6)
    assert energy >= exact[largest].abs().sum() ** 2 / kept * (1 - 2**-6)


@given(
    values=st.lists(
        st.one_of(
            st.floats(-(2.0**127), 2.0**127, width=32),
            st.sampled_from([0.0, 1.0, -1.0, 3.0, 2.0**-126, 2.0**-149, 2.0**-38]),
        ),
        max_size=300,
    )
)
def test_what_was_decoded_encodes_to_the_same_bytes(values: list[float]) -> None:
    raw = codec.encode(torch.tensor(values))
    assert torch.equal(codec.encode(codec.decode(raw, len(values))), raw)


def test_of_equal_magnitudes_the_earlier_are_kept() -> None:
    values = torch.ones(CHUNK)
    values[::2] = -1.0
    decoded = round_trip(values)
    assert torch.equal(decoded[:64], values[:64])
    assert not decoded[64:].any()


def test_two_magnitudes_come_back_exactly() -> None:
    values = torch.zeros(2 * CHUNK)
    values[10:40], values[50], values[5000] = 0.25, -3.0, 7.0
    assert torch.equal(round_trip(values), values)


def test_the_levels_are_the_best_two() -> None:
    values = torch.zeros(300)
    values[[3, 70, 150, 200, 299]] = torch.tensor([1.0, -1.25, 1.5, 8.0, -9.0])
    decoded = round_trip(values)
    assert decoded[[3, 70, 150, 200, 299]].tolist() == [1.25, -1.25, 1.25, 8.5, -8.5]


def test_the_bytes_are_as_documented() -> None:
    values = torch.zeros(130)  # 3 are kept
    values[5], values[129] = -2.0, 1.0
    raw = codec.encode(values)
    levels, index, codes = [0x80, 0x3F, 0x00, 0x40], [0x05, 0x10, 0x08, 0x05, 0x00], [0b110011]
    assert raw.tolist() == levels + index + codes  # 5, 129 and 5 again; -high, low, -high
    assert torch.equal(codec.decode(raw, 130), values)


@pytest.mark.parametrize(
    ("elements", "size"), [(0, 0), (1, 7), (64, 7), (65, 8), (CHUNK, 116), (CHUNK + 1, 123)]
)
def test_the_size_follows_from_the_number_of_values(elements: int, size: int) -> None:
    assert codec.encoded_bytes(elements) == size


def test_an_index_past_the_end_counts_as_the_last() -> None:
    raw = codec.encode(torch.ones(10))
    raw[4:6] = torch.tensor([0xFF, 0x0F], dtype=torch.uint8)
    assert codec.decode(raw, 10).tolist() == [0.0] * 9 + [1.0]
