import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.codecs.floats import BF16

SMALLEST_NORMAL = 2.0**-126


def round_trip(value: float) -> float:
    return BF16().decode(BF16().encode(torch.tensor([value])), 1).item()


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_the_error_is_bounded(value: float) -> None:
    error = abs(round_trip(value) - value)
    assert error <= max(abs(value), SMALLEST_NORMAL) * 2.0**-8


@given(st.integers(-128, 128), st.integers(-100, 100))
def test_eight_bits_of_precision_are_exact(mantissa: int, exponent: int) -> None:
    assert round_trip(mantissa * 2.0**exponent) == mantissa * 2.0**exponent


@pytest.mark.parametrize(
    ("value", "rounded"), [(1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-8, 1 + 2.0**-6), (-1 - 2.0**-8, -1.0)]
)
def test_ties_go_to_even(value: float, rounded: float) -> None:
    assert round_trip(value) == rounded


def test_finite_values_never_become_infinite() -> None:
    largest = 2.0**128 - 2.0**119 - 2.0**104
    assert round_trip(largest) == 2.0**128 - 2.0**120
    for value in (2.0**128 - 2.0**119, -(2.0**128) + 2.0**104, math.inf, math.nan):
        with pytest.raises(ValueError, match="bf16: the values are NaN, infinite or too large"):
            round_trip(value)


def test_the_bytes_are_little_endian() -> None:
    assert BF16().encode(torch.tensor([1.0, -2.0])).tolist() == [0x80, 0x3F, 0x00, 0xC0]
