import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.codecs.floats import FP32


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
