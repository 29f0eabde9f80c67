"""Laws of every codec, on every device."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from murmuration.algorithms.codecs import (
    CODECS,
    Codec,
    bits_per_value,
    blocks,
    codec_by_name,
    has_few_bits,
    topk,
)
from murmuration.algorithms.codecs.codec import BF16, FP32
from murmuration.algorithms.fragments import shard_bounds
from murmuration.worker.wire.tensors import BLOCK_ELEMENTS

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
WIRE_IDS = {
    **{"fp32": 1, "bf16": 2, "int8": 4, "e3m0": 6, "topk": 7},
    **{"sign": 8, "ternary": 9, "topk32": 10, "topk128": 11, "topk256": 12},
}
MOST_BITS = {
    **{"int8": 8.125, "e3m0": 4.125, "ternary": 1.75, "sign": 1.125},
    **{"topk": 0.165, "topk32": 0.094, "topk128": 0.29, "topk256": 0.508},
}


def values_of(elements: int, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), values.numel())


def test_names_and_wire_ids_never_change():
    assert {codec.name: codec.wire_id for codec in CODECS} == WIRE_IDS
    assert all(codec_by_name(codec.name) is codec for codec in CODECS)


@every_codec
@settings(max_examples=20)
@given(elements=st.integers(0, 9000), seed=st.integers(0, 99))
def test_sizes_are_as_announced(codec, elements, seed):
    raw = codec.encode(values_of(elements, seed))
    assert raw.dtype == torch.uint8
    assert raw.shape == (codec.encoded_bytes(elements),)
    decoded = codec.decode(raw, elements)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (elements,)
    assert BLOCK_ELEMENTS % codec.block_elements == 0  # what the worker codes at a time


def test_few_bits_are_few_and_those_that_something_must_keep_the_rest_of():
    for name, bits in MOST_BITS.items():
        assert codec_by_name(name).encoded_bytes(BLOCK_ELEMENTS) * 8 <= bits * BLOCK_ELEMENTS
    few = {codec.name for codec in CODECS if has_few_bits(codec.name)}
    assert few == {"ternary", "sign", "topk256", "topk128", "topk", "topk32"}
    assert bits_per_value("bf16") == 16


@every_codec
@settings(max_examples=15)
@given(elements=st.integers(1, 20000), shards=st.integers(1, 9), seed=st.integers(0, 99))
def test_shards_encode_as_parts_of_the_whole(codec, elements, shards, seed):
    values, bounds = values_of(elements, seed), shard_bounds(elements, shards, codec.block_elements)
    pieces = [codec.encode(values[start:stop].clone()) for start, stop in bounds]
    assert torch.equal(torch.cat(pieces), codec.encode(values))
    decoded = torch.cat(list(map(codec.decode, pieces, [stop - start for start, stop in bounds])))
    assert torch.equal(decoded, round_trip(codec, values))


@every_codec
@settings(max_examples=10)
@given(seed=st.integers(0, 99), share=st.floats(0.0, 1.0))
def test_zeros_stay_zeros(codec, seed, share):
    values = values_of(5000, seed)
    zeros = torch.rand(5000, generator=torch.Generator().manual_seed(seed)) < share
    if codec.name == "sign":  # which knows no zero among others
        zeros[:] = True
    values[zeros] = 0.0
    assert torch.equal(round_trip(codec, values)[zeros], torch.zeros(int(zeros.sum())))


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("elements", "at"), [(1, 0), (130, 5), (130, 129), (270_000, 262_200)])
def test_what_is_not_finite_is_refused(codec, bad, elements, at):
    values = values_of(elements, 1)
    values[at] = bad
    with pytest.raises(ValueError, match=f"{codec.name}: the values are NaN, infinite or too"):
        codec.encode(values)


@every_codec
@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**-119, 2.0**-60, 2.0**10])
def test_any_scale_is_decoded_to_finite_values(codec, scale):
    values = values_of(1000, 2).mul_(scale)
    decoded = codec.decode(codec.encode(values), 1000)
    assert torch.isfinite(decoded).all()
    assert decoded.abs().max() <= 1.17 * values.abs().max() + 2.0**-119
    assert torch.equal(codec.decode(codec.encode(decoded), 1000), decoded)


@every_codec
def test_the_same_bytes_come_each_time_and_in_pieces_of_any_size(codec, monkeypatch):
    values = values_of(270_001, 3)
    before, raw = values.clone(), codec.encode(values).clone()
    decoded = codec.decode(raw, 270_001)
    assert torch.equal(values, before)
    assert torch.equal(codec.encode(values), raw)
    monkeypatch.setattr(blocks, "_CACHED_ELEMENTS", 3 * 4096)
    assert torch.equal(codec.encode(values), raw)
    assert torch.equal(codec.decode(raw, 270_001), decoded)


@every_codec
def test_any_bytes_of_the_right_size_decode_or_are_refused(codec):
    size = codec.encoded_bytes(5001)
    raw = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(1))
    if codec.name.startswith("topk"):  # places have a number
        with pytest.raises(ValueError, match="the bits do not say"):
            codec.decode(raw.to(torch.uint8), 5001)
        return
    decoded = codec.decode(raw.to(torch.uint8), 5001)
    assert decoded.shape == (5001,)
    assert decoded.dtype == torch.float32


@every_codec
@pytest.mark.parametrize("elements", [1, 64, 65, 4096, 4097])
def test_payloads_may_lie_anywhere_in_a_buffer(codec, elements):
    values = values_of(elements + 3, 6)[3:]
    raw = codec.encode(values)
    buffer = torch.zeros(raw.numel() + 9, dtype=torch.uint8)
    offset = 8 if codec.block_elements == 1 else 7  # whole values are viewed where they are
    buffer[offset : offset + raw.numel()] = raw
    decoded = codec.decode(buffer[offset : offset + raw.numel()], elements)
    assert torch.equal(decoded, round_trip(codec, values))


LARGEST = 2.0**127
HARD = [0.0, -0.0, 1.0, -1.0, 1.5, 3.0, *(2.0**-k for k in (38, 119, 126, 149)), LARGEST, -LARGEST]


@every_codec
@given(
    values=st.lists(
        st.floats(-1, 1, width=32) | st.floats(-LARGEST, LARGEST, width=32) | st.sampled_from(HARD),
        min_size=1,
        max_size=300,
    )
)
def test_what_was_decoded_encodes_to_the_same_bytes(codec, values):
    raw = codec.encode(torch.tensor(values)).clone()
    decoded = codec.decode(raw, len(values))
    if decoded.abs().max() <= LARGEST:
        assert torch.equal(codec.encode(decoded), raw)


@every_codec
@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_number_of_bytes_is_refused(codec, extra):
    expected = codec.encoded_bytes(8)
    with pytest.raises(ValueError, match=f"8 values take {expected} bytes, got {expected + extra}"):
        codec.decode(torch.zeros(expected + extra, dtype=torch.uint8), 8)


@pytest.mark.parametrize("elements", [5, 4097, 30_000])
@pytest.mark.parametrize("name", ["topk32", "topk256"])
def test_torch_alone_keeps_what_numpy_keeps(monkeypatch, name, elements):
    codec, values = codec_by_name(name), values_of(elements, 1)
    values[elements // 3 : elements // 2] = 0.0
    values[elements // 2 : -elements // 4] = -(2.0**-130)
    here = codec.encode(values)
    decoded = codec.decode(here, elements)
    monkeypatch.setattr(topk, "_is_on_host", lambda values: False)
    assert torch.equal(codec.encode(values), here)
    assert torch.equal(codec.decode(here, elements), decoded)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
def test_the_bytes_are_little_endian_and_come_back_exactly(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    raw = FP32().encode(tensor)
    back = FP32().decode(raw, len(values))
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))  # -0.0 too
    assert raw.numpy().tobytes() == struct.pack(f"<{len(values)}f", *values)


def test_encoding_and_decoding_are_views():
    values = torch.ones(4)
    raw = FP32().encode(values)
    assert raw.data_ptr() == values.data_ptr()
    assert FP32().decode(raw, 4).data_ptr() == values.data_ptr()


def in_bf16(value: float) -> float:
    return round_trip(BF16(), torch.tensor([value])).item()


@given(st.integers(-128, 128), st.integers(-100, 100))
def test_eight_bits_of_precision_are_exact_in_bf16(mantissa, exponent):
    assert in_bf16(mantissa * 2.0**exponent) == mantissa * 2.0**exponent


@pytest.mark.parametrize(
    ("value", "rounded"), [(1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-8, 1 + 2.0**-6), (-1 - 2.0**-8, -1.0)]
)
def test_ties_go_to_even(value, rounded):
    assert in_bf16(value) == rounded


def test_finite_values_never_become_infinite():
    assert in_bf16(2.0**128 - 2.0**119 - 2.0**104) == 2.0**128 - 2.0**120
    beyond = 2.0**128 - 2.0**119
    for value in (beyond, -beyond, -(2.0**128) + 2.0**104, math.inf, math.nan):
        with pytest.raises(ValueError, match="bf16: the values are NaN, infinite or too"):
            in_bf16(value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_codec
def test_cuda_gives_what_the_cpu_gives(codec):
    elements = 3 * 4096 + 77
    values = values_of(elements, 1) * 1e-3
    here, there = codec.encode(values), codec.encode(values.cuda())
    assert torch.equal(there.cpu(), here)
    assert torch.equal(codec.decode(there, elements).cpu(), codec.decode(here, elements))
