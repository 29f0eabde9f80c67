import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.codecs.floats import FP16


def round_trip(value: float) -> float:
    return FP16().decode(FP16().encode(torch.tensor([value])), 1).item()


@given(st.floats(-65504, 65504, width=32))
def test_the_error_is_bounded(value: float) -> None:
    assert abs(round_trip(value) - value) <= max(abs(value) * 2.0**-11, 2.0**-25)


def test_values_beyond_its_range_are_refused() -> None:
    assert round_trip(65519.99) == 65504
    for value in (65520.0, -65520.0, 1e38, math.inf, math.nan):
        with pytest.raises(ValueError, match="fp16: the values are NaN, infinite or too large"):
            round_trip(value)


def test_the_bytes_are_little_endian() -> None:
    assert FP16().encode(torch.tensor([1.0, -2.0])).tolist() == [0x00, 0x3C, 0x00, 0xC0]
