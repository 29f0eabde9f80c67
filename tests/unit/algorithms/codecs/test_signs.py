"""One bit, and three values: which scales they choose, and that the order of a sum is no matter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.codecs.blocks import BLOCK, SCALE_BYTES

SIGN, TERNARY = codec_by_name("sign"), codec_by_name("ternary")
ROUNDING = 2.0**-8 + 2.0**-9  # of the scale to bf16, and of magnitudes to steps
blocks = st.lists(
    st.one_of(st.floats(-1, 1, width=32), st.floats(-(2.0**100), 2.0**100, width=32)),
    min_size=1,
    max_size=BLOCK,
)


@given(values=blocks)
def test_a_sign_stands_for_the_mean_magnitude(values: list[float]) -> None:
    exact = torch.tensor(values, dtype=torch.float64)
    decoded = SIGN.decode(SIGN.encode(torch.tensor(values, dtype=torch.float32)), len(values))
    mean = exact.abs().mean().item()
    assert torch.equal(torch.signbit(decoded), torch.signbit(exact))
    for value in decoded.abs().tolist():
        assert value == pytest.approx(mean, rel=ROUNDING, abs=2.0**-126)


@given(values=blocks)
def test_ternary_values_are_the_nearest_of_three(values: list[float]) -> None:
    given = torch.tensor(values, dtype=torch.float32)
    decoded = TERNARY.decode(TERNARY.encode(given), len(values))
    level = decoded.abs().max()
    assert set(decoded.abs().tolist()) <= {0.0, level.item()}
    assert torch.equal(decoded != 0, (given.abs() > level / 2) & (level > 0))
    assert torch.equal(decoded[decoded != 0] < 0, given[decoded != 0] < 0)


@given(values=blocks)
def test_ternary_levels_are_the_mean_of_the_large(values: list[float]) -> None:
    magnitudes = torch.tensor(values, dtype=torch.float64).abs()
    raw = TERNARY.encode(torch.tensor(values, dtype=torch.float32))
    level = raw[:SCALE_BYTES].clone().view(torch.bfloat16).item()
    mean = magnitudes.mean()
    near = ((magnitudes - 0.75 * mean).abs() <= magnitudes.max() * 2.0**-16).any()
    if not near:  # at the threshold itself, rounding decides
        large = magnitudes[magnitudes > 0.75 * mean].mean().item()
        assert level == pytest.approx(large, rel=ROUNDING, abs=2.0**-126)


@pytest.mark.parametrize("codec", [SIGN, TERNARY], ids=lambda codec: codec.name)
@given(seed=st.integers(0, 99), elements=st.integers(1, BLOCK))
def test_the_order_of_a_block_does_not_change_its_scale(
    codec: Codec, seed: int, elements: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator).exp()
    shuffled = values[torch.randperm(elements, generator=generator)]
    scales = [codec.encode(each)[:SCALE_BYTES].tolist() for each in (values, shuffled)]
    assert scales[0] == scales[1]


def test_every_byte_of_ternary_has_five_digits() -> None:
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
