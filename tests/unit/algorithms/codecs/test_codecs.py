"""Laws of every codec, those that are still to come too."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from algorithms.codecs import CODECS, Codec, codec_by_id, codec_by_name
from algorithms.fragments import shard_bounds

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def values_of(elements: int, seed: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), values.numel())


def test_names_and_wire_ids_are_unique() -> None:
    assert len({codec.name for codec in CODECS}) == len(CODECS)
    assert len({codec.wire_id for codec in CODECS}) == len(CODECS)
    assert 0 not in {codec.wire_id for codec in CODECS}, "0 is what an absent field reads as"


def test_wire_ids_never_change() -> None:
    assert {codec.name: codec.wire_id for codec in CODECS}.items() >= {"fp32": 1, "bf16": 2}.items()


@every_codec
def test_a_codec_is_found_by_name_and_by_id(codec: Codec) -> None:
    assert codec_by_name(codec.name) is codec
    assert codec_by_id(codec.wire_id) is codec


def test_unknown_codecs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^unknown codec 'fp7'; use one of fp32, bf16"):
        codec_by_name("fp7")
    with pytest.raises(ValueError, match="codec 250 is unknown to this version"):
        codec_by_id(250)


@every_codec
@given(elements=st.integers(0, 3000), seed=st.integers(0, 99))
def test_sizes_are_as_announced(codec: Codec, elements: int, seed: int) -> None:
    raw = codec.encode(values_of(elements, seed))
    assert raw.dtype == torch.uint8
    assert raw.shape == (codec.encoded_bytes(elements),)
    decoded = codec.decode(raw, elements)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (elements,)


@every_codec
@given(elements=st.integers(1, 3000), shards=st.integers(1, 9), seed=st.integers(0, 99))
def test_shards_encode_as_parts_of_the_whole(
    codec: Codec, elements: int, shards: int, seed: int
) -> None:
    values = values_of(elements, seed)
    bounds = shard_bounds(elements, shards, codec.block_elements)
    pieces = [codec.encode(values[start:stop].clone()) for start, stop in bounds]
    assert torch.equal(torch.cat(pieces), codec.encode(values))
    decoded = [
        codec.decode(piece, stop - start)
        for piece, (start, stop) in zip(pieces, bounds, strict=True)
    ]
    assert torch.equal(torch.cat(decoded), round_trip(codec, values))


@every_codec
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert torch.equal(round_trip(codec, torch.zeros(1000)), torch.zeros(1000))


@every_codec
def test_encoding_does_not_change_the_values(codec: Codec) -> None:
    values = values_of(500, 1)
    before = values.clone()
    codec.encode(values)
    assert torch.equal(values, before)


@every_codec
@given(seed=st.integers(0, 99))
def test_what_was_decoded_encodes_to_the_same_bytes(codec: Codec, seed: int) -> None:
    raw = codec.encode(values_of(700, seed)).clone()
    assert torch.equal(codec.encode(codec.decode(raw, 700)), raw)


@every_codec
@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_number_of_bytes_is_refused(codec: Codec, extra: int) -> None:
    expected = codec.encoded_bytes(8)
    with pytest.raises(ValueError, match=f"8 values take {expected} bytes, got {expected + extra}"):
        codec.decode(torch.zeros(expected + extra, dtype=torch.uint8), 8)
