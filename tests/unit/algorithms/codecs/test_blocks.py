"""The codecs with a scale for every 128 values: stated bounds, bytes, and their noise."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.codecs import Codec, codec_by_name
from algorithms.codecs.blocks import BLOCK, fill

block_codec = pytest.mark.parametrize(
    "codec",
    [codec_by_name(name) for name in ("int8", "int4", "e3m0", "sign", "ternary")],
    ids=lambda codec: codec.name,
)
LIMIT = 2.0**127
magnitudes = st.floats(0, LIMIT, width=32)
blocks = st.lists(
    st.one_of(
        st.floats(-1, 1, width=32),
        st.floats(-LIMIT, LIMIT, width=32),
        st.sampled_from([0.0, -0.0, 2.0**-149, 1.5, -1.5, 2.0**-119, LIMIT, -LIMIT]),
    ),
    min_size=1,
    max_size=BLOCK,
)


def bound(codec: Codec, values: Tensor, seed: int | None) -> Tensor:
    """The largest error that the class promises, in fp64."""
    largest = values.abs().max().item()
    if codec.name in ("sign", "ternary"):
        return torch.full_like(values, largest * (1 + 2**-7) + 2.0**-126)
    if codec.name == "e3m0":
        relative, absolute, least = (
            (1 / 3, 1 / 96, 2.0**-126) if seed is None else (1, 1 / 63, 2.0**-125)
        )
        return torch.clamp(values.abs() * relative, min=max(largest * absolute, least))
    steps = {"int8": 254, "int4": 14}[codec.name] / (1 if seed is None else 2)
    error = max(largest / steps * 1.01, 2.0**-121 * (1 if seed is None else 2))
    return torch.full_like(values, error)


@block_codec
@given(values=blocks, seed=st.one_of(st.none(), st.integers(0, 2**64)))
def test_the_error_is_bounded(codec: Codec, values: list[float], seed: int | None) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    decoded = codec.decode(codec.encode(tensor, seed), len(values)).to(torch.float64)
    exact = tensor.to(torch.float64)
    assert ((decoded - exact).abs() <= bound(codec, exact, seed)).all()


@block_codec
@given(values=blocks)
def test_what_was_decoded_encodes_to_the_same_bytes(codec: Codec, values: list[float]) -> None:
    raw = codec.encode(torch.tensor(values, dtype=torch.float32))
    decoded = codec.decode(raw, len(values))
    if decoded.abs().max() <= LIMIT:
        assert torch.equal(codec.encode(decoded), raw)


@block_codec
@given(values=blocks)
def test_magnitudes_are_coded_alike_on_both_sides(codec: Codec, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    plus, minus = (codec.decode(codec.encode(each), len(values)) for each in (tensor, -tensor))
    assert torch.equal(plus, -minus)


@block_codec
@pytest.mark.parametrize("seed", [None, 1])
def test_too_large_values_are_refused(codec: Codec, seed: int | None) -> None:
    codec.encode(torch.tensor([LIMIT, -LIMIT]), seed)
    for value in (math.nextafter(LIMIT, math.inf) * 1.001, -3e38):
        with pytest.raises(ValueError, match=r"or too large \(at most 1.70141e\+38\)"):
            codec.encode(torch.tensor([1.0, value]), seed)


@pytest.mark.parametrize(
    "codec", [codec_by_name(n) for n in ("int8", "int4", "e3m0", "ternary")], ids=lambda c: c.name
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
        ("int4", 0.107, 0.21),
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
        ("int8", [127.0, -1.0, 2.0], [0x80, 0x3F, 127, 255, 2]),
        ("int4", [8.0, -1.0, 2.0], [0x80, 0x3F, 0xF8, 0x02]),
        ("int4", [-8.0, 1.0, -2.0], [0x80, 0xBF, 0xF8, 0x02]),
        ("e3m0", [1.0, -0.5, 0.0, 1 / 64, -1 / 32], [0x80, 0x3F, 0xE7, 0x10, 0x0A]),
        ("sign", [0.5, -0.5, 0.5, 0.5, -0.5, 0.5, 0.5, 0.5, -0.5], [0, 0x3F, 0x12, 0x01]),
        ("ternary", [0.5, -0.5, 0.0, 0.5, 0.0, -0.5], [0, 0x3F, 1 + 2 * 3 + 27, 2]),
    ],
    ids=["int8", "int4", "int4, turned", "e3m0", "sign", "ternary"],
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


def noise(seed: int, start: int, count: int, bits: int = 16) -> Tensor:
    words = torch.empty(count, dtype=torch.int32)
    fill(words, seed, start, bits, torch.empty_like(words))
    return words


def test_the_noise_never_changes() -> None:
    assert noise(1, 0, 4, 23).tolist() == [4290693, 2960830, 1540899, 7095695]


def test_a_value_depends_on_seed_and_place_only() -> None:
    assert torch.equal(noise(5, 0, 1000)[300:], noise(5, 300, 700))
    assert torch.equal(noise(5, 2**32 - 2, 4)[2:], noise(5, 0, 2))
    assert torch.equal(noise(5, 2**31 - 2, 4)[2:], noise(5, 2**31, 2))


@pytest.mark.parametrize("bits", [1, 15, 23, 31])
def test_it_is_uniform(bits: int) -> None:
    words = noise(7, 0, 100_000, bits).to(torch.float64) / 2.0**bits
    assert words.min() >= 0
    assert words.max() < 1
    assert abs(words.mean() - (0.5 - 0.5 / 2**bits)) < 0.005
    for bit in range(bits):
        assert abs((noise(7, 0, 100_000, bits) >> bit & 1).float().mean() - 0.5) < 0.01


@pytest.mark.parametrize("other", ["next value", "next seed", "far seed", "seed 2^32 on"])
def test_it_is_not_correlated(other: str) -> None:
    first = noise(7, 0, 100_000).to(torch.float64)
    second = {
        "next value": noise(7, 1, 100_000),
        "next seed": noise(8, 0, 100_000),
        "far seed": noise(-(2**40), 0, 100_000),
        "seed 2^32 on": noise(7 + 2**32, 0, 100_000),
    }[other].to(torch.float64)
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.015


def test_no_two_seeds_run_through_one_sequence() -> None:
    values = [set(noise(seed, 0, 20_000, 31).tolist()) for seed in range(4)]
    shared = [len(values[a] & values[b]) for a in range(4) for b in range(a)]
    assert max(shared) < 10  # 0.2 by chance
