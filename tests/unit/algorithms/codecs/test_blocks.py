"""The codecs with a scale for every 128 values: stated bounds and bytes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.codecs.blocks import BLOCK

block_codec = pytest.mark.parametrize(
    "codec",
    [codec_by_name(name) for name in ("int8", "e3m0", "sign", "ternary")],
    ids=lambda codec: codec.name,
)
LIMIT = 2.0**127
blocks = st.lists(
    st.one_of(
        st.floats(-1, 1, width=32),
        st.floats(-LIMIT, LIMIT, width=32),
        st.sampled_from([0.0, -0.0, 2.0**-149, 1.5, -1.5, 2.0**-119, LIMIT, -LIMIT]),
    ),
    min_size=1,
    max_size=BLOCK,
)


def bound(codec: Codec, values: Tensor) -> Tensor:
    """The largest error that the class promises, in fp64."""
    largest = values.abs().max().item()
    if codec.name in ("sign", "ternary"):
        return torch.full_like(values, largest * (1 + 2**-7) + 2.0**-126)
    if codec.name == "e3m0":
        return torch.clamp(values.abs() / 3, min=max(largest / 96, 2.0**-126))
    error = max(largest / 254 * 1.01, 2.0**-121)
    return torch.full_like(values, error)


@block_codec
@given(values=blocks)
def test_the_error_is_bounded(codec: Codec, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    decoded = codec.decode(codec.encode(tensor), len(values)).to(torch.float64)
    exact = tensor.to(torch.float64)
    assert ((decoded - exact).abs() <= bound(codec, exact)).all()


@block_codec
@given(values=blocks)
def test_magnitudes_are_coded_alike_on_both_sides(codec: Codec, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    plus, minus = (codec.decode(codec.encode(each), len(values)) for each in (tensor, -tensor))
    assert torch.equal(plus, -minus)


@block_codec
def test_too_large_values_are_refused(codec: Codec) -> None:
    codec.encode(torch.tensor([LIMIT, -LIMIT]))
    for value in (math.nextafter(LIMIT, math.inf) * 1.001, -3e38):
        with pytest.raises(ValueError, match=r"or too large \(at most 1.70141e\+38\)"):
            codec.encode(torch.tensor([1.0, value]))


@pytest.mark.parametrize(
    "codec", [codec_by_name(n) for n in ("int8", "e3m0", "ternary")], ids=lambda c: c.name
)
def test_one_huge_value_spoils_its_block_only(codec: Codec) -> None:
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(1))
    values[BLOCK] = 1e30
    decoded = codec.decode(codec.encode(values), 3 * BLOCK)
    assert decoded[BLOCK].item() == pytest.approx(1e30, rel=0.25)
    for block in (slice(0, BLOCK), slice(2 * BLOCK, 3 * BLOCK)):
        assert torch.equal(decoded[block], codec.decode(codec.encode(values[block]), BLOCK))


@pytest.mark.parametrize(
    ("name", "gaussian", "heavy"),
    [
        ("int8", 0.0066, 0.0145),
        ("e3m0", 0.183, 0.163),
        ("sign", 0.61, 0.77),
        ("ternary", 0.44, 0.64),
    ],
)
def test_the_error_is_what_was_measured(name: str, gaussian: float, heavy: float) -> None:
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(4, 2**17, generator=generator)
    student = normal[0] / normal[1:].square().mean(0).sqrt()
    for values, most in ((normal[0], gaussian), (student, heavy)):
        decoded = codec_by_name(name).decode(codec_by_name(name).encode(values), 2**17)
        assert 0.9 * most < (decoded - values).norm() / values.norm() < most


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("bf16", [1.0, -2.0], [0x80, 0x3F, 0x00, 0xC0]),
        ("int8", [127.0, -1.0, 2.0], [0x80, 0x3F, 127, 255, 2]),
        ("e3m0", [1.0, -0.5, 0.0, 1 / 64, -1 / 32], [0x80, 0x3F, 0xE7, 0x10, 0x0A]),
        ("sign", [0.5, -0.5, 0.5, 0.5, -0.5, 0.5, 0.5, 0.5, -0.5], [0, 0x3F, 0x12, 0x01]),
        ("ternary", [0.5, -0.5, 0.0, 0.5, 0.0, -0.5], [0, 0x3F, 1 + 2 * 3 + 27, 2]),
    ],
)
def test_the_bytes_are_as_documented(name: str, values: list[float], expected: list[int]) -> None:
    raw = codec_by_name(name).encode(torch.tensor(values))
    assert raw.tolist() == expected
    assert codec_by_name(name).decode(raw, len(values)).tolist() == values


def test_e3m0_rounds_to_the_nearest_power() -> None:
    values = [1.0, 0.74, 0.76, 0.126, 2.0**-7, 2.0**-7.1, -0.51]
    filler = [2.0**-k for k in range(6)] * 8  # the powers of the largest value fit best
    codec = codec_by_name("e3m0")
    decoded = codec.decode(codec.encode(torch.tensor(values + filler)), len(values + filler))
    assert decoded[:7].tolist() == [1.0, 0.5, 1.0, 0.125, 2.0**-6, 0.0, -0.5]
