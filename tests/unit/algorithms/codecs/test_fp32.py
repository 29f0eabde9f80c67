import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.codecs.fp32 import FP32


@given(st.lists(st.floats(width=32), max_size=50))
def test_the_bytes_are_little_endian_and_come_back_exactly(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    raw = FP32().encode(tensor)
    back = FP32().decode(raw, len(values))
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))  # NaN and -0.0 too
    kept = [value for value in values if value == value]
    packed = FP32().encode(torch.tensor(kept, dtype=torch.float32)).numpy().tobytes()
    assert packed == struct.pack(f"<{len(kept)}f", *kept)


def test_encoding_and_decoding_are_views() -> None:
    values = torch.ones(4)
    raw = FP32().encode(values)
    assert raw.data_ptr() == values.data_ptr()
    assert FP32().decode(raw, 4).data_ptr() == values.data_ptr()
