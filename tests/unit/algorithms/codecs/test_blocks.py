"""The codecs with a scale for every 128 values: bounds, bytes, and which scales they choose."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.codecs.blocks import BLOCK, SCALE_BYTES


def codecs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", [codec_by_name(name) for name in names], ids=names)


block_codec = codecs("int8", "e3m0", "sign", "ternary")
LIMIT = 2.0**127
HARD = [0.0, -0.0, 2.0**-149, 1.5, -1.5, 2.0**-119, LIMIT, -LIMIT]
blocks = st.lists(
    st.floats(-1, 1, width=32) | st.floats(-LIMIT, LIMIT, width=32) | st.sampled_from(HARD),
    min_size=1,
    max_size=BLOCK,
)


def bound(codec: Codec, values: Tensor) -> Tensor:
    """The largest error that the class promises, in fp64."""
    largest = values.abs().max().item()
    if codec.name == "bf16":
        return values.abs().clamp(min=2.0**-126) * 2.0**-8
    if codec.name in ("sign", "ternary"):
        return torch.full_like(values, largest * (1 + 2**-7) + 2.0**-126)
    if codec.name == "e3m0":
        return torch.clamp(values.abs() / 3, min=max(largest / 96, 2.0**-126))
    return torch.full_like(values, max(largest / 254 * 1.01, 2.0**-121))


@codecs("bf16", "int8", "e3m0", "sign", "ternary")
@given(values=blocks)
def test_the_error_is_bounded(codec, values):
    tensor = torch.tensor(values, dtype=torch.float32)
    decoded = codec.decode(codec.encode(tensor), len(values)).to(torch.float64)
    exact = tensor.to(torch.float64)
    assert ((decoded - exact).abs() <= bound(codec, exact)).all()


@block_codec
@given(values=blocks)
def test_magnitudes_are_coded_alike_on_both_sides(codec, values):
    tensor = torch.tensor(values, dtype=torch.float32)
    plus, minus = (codec.decode(codec.encode(each), len(values)) for each in (tensor, -tensor))
    assert torch.equal(plus, -minus)


@block_codec
def test_too_large_values_are_refused(codec):
    codec.encode(torch.tensor([LIMIT, -LIMIT]))
    for value in (math.nextafter(LIMIT, math.inf) * 1.001, -3e38):
        with pytest.raises(ValueError, match=r"or too large \(at most 1.70141e\+38\)"):
            codec.encode(torch.tensor([1.0, value]))


@codecs("int8", "e3m0", "ternary")
def test_one_huge_value_spoils_its_block_only(codec):
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
def test_the_error_is_what_was_measured(name, gaussian, heavy):
    normal = torch.randn(4, 2**17, generator=torch.Generator().manual_seed(2))
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
def test_the_bytes_are_as_documented(name, values, expected):
    raw = codec_by_name(name).encode(torch.tensor(values))
    assert raw.tolist() == expected
    assert codec_by_name(name).decode(raw, len(values)).tolist() == values


def test_e3m0_rounds_to_the_nearest_power():
    values = [1.0, 0.74, 0.76, 0.126, 2.0**-7, 2.0**-7.1, -0.51]
    filler = [2.0**-k for k in range(6)] * 8  # the powers of the largest value fit best
    codec = codec_by_name("e3m0")
    decoded = codec.decode(codec.encode(torch.tensor(values + filler)), len(values + filler))
    assert decoded[:7].tolist() == [1.0, 0.5, 1.0, 0.125, 2.0**-6, 0.0, -0.5]


SIGN, TERNARY = codec_by_name("sign"), codec_by_name("ternary")
ROUNDING = 2.0**-8 + 2.0**-9  # of the scale to bf16, and of magnitudes to steps
MODEST = st.lists(
    st.floats(-1, 1, width=32) | st.floats(-(2.0**100), 2.0**100, width=32),
    min_size=1,
    max_size=BLOCK,
)


@given(values=MODEST)
def test_a_sign_stands_for_the_mean_magnitude(values):
    exact = torch.tensor(values, dtype=torch.float64)
    decoded = SIGN.decode(SIGN.encode(torch.tensor(values, dtype=torch.float32)), len(values))
    mean = exact.abs().mean().item()
    assert torch.equal(torch.signbit(decoded), torch.signbit(exact))
    for value in decoded.abs().tolist():
        assert value == pytest.approx(mean, rel=ROUNDING, abs=2.0**-126)


@given(values=MODEST)
def test_ternary_values_are_the_nearest_of_three(values):
    given = torch.tensor(values, dtype=torch.float32)
    decoded = TERNARY.decode(TERNARY.encode(given), len(values))
    level = decoded.abs().max()
    assert set(decoded.abs().tolist()) <= {0.0, level.item()}
    assert torch.equal(decoded != 0, (given.abs() > level / 2) & (level > 0))
    assert torch.equal(decoded[decoded != 0] < 0, given[decoded != 0] < 0)


@given(values=MODEST)
def test_ternary_levels_are_the_mean_of_the_large(values):
    magnitudes = torch.tensor(values, dtype=torch.float64).abs()
    raw = TERNARY.encode(torch.tensor(values, dtype=torch.float32))
    level, mean = raw[:SCALE_BYTES].clone().view(torch.bfloat16).item(), magnitudes.mean()
    near = ((magnitudes - 0.75 * mean).abs() <= magnitudes.max() * 2.0**-16).any()
    if not near:  # at the threshold itself, rounding decides
        large = magnitudes[magnitudes > 0.75 * mean].mean().item()
        assert level == pytest.approx(large, rel=ROUNDING, abs=2.0**-126)


@codecs("sign", "ternary")
@given(seed=st.integers(0, 99), elements=st.integers(1, BLOCK))
def test_the_order_of_a_block_does_not_change_its_scale(codec, seed, elements):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator).exp()
    shuffled = values[torch.randperm(elements, generator=generator)]
    scales = [codec.encode(each)[:SCALE_BYTES].tolist() for each in (values, shuffled)]
    assert scales[0] == scales[1]


def test_every_byte_of_ternary_has_five_digits():
    """All 243 of them, and each once."""
    digits = torch.cartesian_prod(*[torch.tensor([0.0, 1.0, -1.0])] * 5).flip(1)
    values = torch.cat((digits.flatten(), torch.ones(1)))  # a block has its own scale
    found = []
    for start in range(0, 243 * 5, 125):  # whole bytes of one block each
        part = values[start : min(start + 125, 243 * 5)]
        raw = TERNARY.encode(part)
        assert torch.equal(TERNARY.decode(raw, len(part)), part)
        found += raw[SCALE_BYTES:].tolist()
    assert found == list(range(243))
