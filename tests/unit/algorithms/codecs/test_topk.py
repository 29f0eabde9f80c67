import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.codecs.topk import CHUNK, TopK

codec = TopK()
KEPT = {"topk32": 32, "topk": 64, "topk128": 128, "topk256": 256}
every_topk = pytest.mark.parametrize("name", KEPT)


def values_of(elements: int, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def round_trip(values: Tensor, name: str = "topk") -> Tensor:
    codec = codec_by_name(name)
    return codec.decode(codec.encode(values), values.numel())


@every_topk
@given(elements=st.integers(1, CHUNK), power=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_largest_are_kept_and_bounds_hold(name, elements, power, seed):
    values = values_of(elements, seed) ** power
    decoded = round_trip(values, name).to(torch.float64)
    kept = math.ceil(elements * KEPT[name] / CHUNK)
    largest, nonzero = values.abs().topk(kept).indices, decoded.nonzero().view(-1)
    assert set(nonzero.tolist()) <= set(largest.tolist())
    assert torch.equal(decoded[nonzero].sign(), values[nonzero].sign().to(torch.float64))
    exact = values.to(torch.float64)
    left, energy = (exact - decoded).square().sum(), decoded.square().sum()
    assert left <= exact.square().sum() - energy * (1 - 2**-6)
    assert energy >= exact[largest].abs().sum() ** 2 / kept * (1 - 2**-6)


@every_topk
def test_of_equal_magnitudes_the_earlier_are_kept(name):
    values = torch.ones(2 * CHUNK)
    values[::2] = -1.0
    values[CHUNK + 100] = 1.5  # before them is room for one less
    decoded, kept = round_trip(values, name), KEPT[name]
    assert torch.equal(decoded[:kept], values[:kept])
    assert not decoded[kept:CHUNK].any()
    there = decoded[CHUNK:].nonzero().view(-1).tolist()
    assert there == sorted({*range(kept - (kept <= 100)), 100})


@every_topk
def test_chunks_are_encoded_as_each_would_be_alone(name):
    kept = KEPT[name]
    few, equal = torch.zeros(2, CHUNK)
    few[7 : 7 * kept : 7] = values_of(kept - 1, 1)  # one fewer than are kept, and one more
    equal[5 : 5 * kept + 6 : 5] = 2.0
    chunks, codec = [few, equal, values_of(CHUNK, 2)], codec_by_name(name)
    alone = torch.cat([codec.encode(chunk) for chunk in chunks])
    assert torch.equal(codec.encode(torch.cat(chunks)), alone)


@every_topk
@pytest.mark.parametrize("place", [0, CHUNK - 1])
def test_the_first_and_the_last_place_are_as_good_as_any(name, place):
    values = torch.zeros(3 * CHUNK)
    values[place::CHUNK] = -2.0
    assert torch.equal(round_trip(values, name), values)
    values[CHUNK - KEPT[name] : CHUNK] = 2.0
    values[: CHUNK - KEPT[name]] = 0.0
    assert torch.equal(round_trip(values, name), values)


def test_two_magnitudes_come_back_exactly_and_the_levels_are_the_best_two():
    values = torch.zeros(2 * CHUNK)
    values[10:40], values[50], values[5000] = 0.25, -3.0, 7.0
    assert torch.equal(round_trip(values), values)
    values = torch.zeros(300)
    values[[3, 70, 150, 200, 299]] = torch.tensor([1.0, -1.25, 1.5, 8.0, -9.0])
    assert round_trip(values)[[3, 70, 150, 200, 299]].tolist() == [1.25, -1.25, 1.25, 8.5, -8.5]


def test_the_bytes_are_as_documented():
    values = torch.zeros(130)  # 3 are kept
    values[5], values[129] = -2.0, 1.0
    raw, levels = codec.encode(values), [0x80, 0x3F, 0x00, 0x40]
    # 5, 5 again and 129; -high, -high, low; of 000101, 000101 and 000001 the lowest bits first;
    # and of 0, 0 and 2 the bits 0 + 0, 0 + 1 and 2 + 2 of six.
    planes = ["011", "011", "111", "000", "011", "000", "000", "000"]
    written = "".join(plane[::-1] for plane in planes) + "110010"
    expected = [int(written[at : at + 8][::-1], 2) for at in range(0, len(written), 8)]
    assert raw.tolist() == levels + expected
    assert torch.equal(codec.decode(raw, 130), values)


@pytest.mark.parametrize(
    ("elements", "size"), [(0, 0), (1, 6), (64, 6), (65, 7), (CHUNK, 84), (CHUNK + 1, 90)]
)
def test_the_size_follows_from_the_number_of_values(elements, size):
    assert codec.encoded_bytes(elements) == size


def test_a_place_past_the_end_counts_as_the_last():
    raw = codec.encode(torch.ones(10))
    raw[4] |= 0b11111100  # the six low bits
    assert codec.decode(raw, 10).tolist() == [0.0] * 9 + [1.0]


@every_topk
def test_more_or_fewer_places_than_are_kept_are_refused(name):
    codec = codec_by_name(name)
    raw = codec.encode(values_of(CHUNK, 1))
    fewer, more = raw.clone(), raw.clone()
    where = next(at for at in range(raw.numel() - 1, 0, -1) if 0 < raw[at] < 255)
    fewer[where], more[where] = 0, 255
    for damaged in (fewer, more):
        with pytest.raises(ValueError, match=f"{name}: the bits do not say {KEPT[name]} places"):
            codec.decode(damaged, CHUNK)
