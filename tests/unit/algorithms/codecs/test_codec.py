"""fp32 and bf16: stated bounds, ties, limits and bytes."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.codecs import Codec
from murmuration.algorithms.codecs.codec import BF16, FP32


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
def test_the_bytes_are_little_endian_and_come_back_exactly(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    raw = FP32().encode(tensor)
    back = FP32().decode(raw, len(values))
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))  # -0.0 too
    assert raw.numpy().tobytes() == struct.pack(f"<{len(values)}f", *values)


def test_encoding_and_decoding_are_views() -> None:
    values = torch.ones(4)
    raw = FP32().encode(values)
    assert raw.data_ptr() == values.data_ptr()
    assert FP32().decode(raw, 4).data_ptr() == values.data_ptr()


def round_trip(codec: Codec, value: float) -> float:
    return codec.decode(codec.encode(torch.tensor([value])), 1).item()


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_the_error_of_bf16_is_bounded(value: float) -> None:
    assert abs(round_trip(BF16(), value) - value) <= max(abs(value), 2.0**-126) * 2.0**-8


@given(st.integers(-128, 128), st.integers(-100, 100))
def test_eight_bits_of_precision_are_exact_in_bf16(mantissa: int, exponent: int) -> None:
    assert round_trip(BF16(), mantissa * 2.0**exponent) == mantissa * 2.0**exponent


@pytest.mark.parametrize(
    ("value", "rounded"), [(1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-8, 1 + 2.0**-6), (-1 - 2.0**-8, -1.0)]
)
def test_ties_go_to_even(value: float, rounded: float) -> None:
    assert round_trip(BF16(), value) == rounded


def test_finite_values_never_become_infinite() -> None:
    assert round_trip(BF16(), 2.0**128 - 2.0**119 - 2.0**104) == 2.0**128 - 2.0**120
    beyond = 2.0**128 - 2.0**119
    for value in (beyond, -beyond, -(2.0**128) + 2.0**104, math.inf, math.nan):
        with pytest.raises(ValueError, match="bf16: the values are NaN, infinite or too"):
            round_trip(BF16(), value)
