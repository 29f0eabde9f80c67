"""Documents: round trips, and refusals of whatever does not fit, in bounded memory."""

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from worker.wire import WireError, pack_document, unpack_document

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def compress(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


@given(DOCUMENTS)
def test_a_document_survives_the_wire(document: object) -> None:
    assert unpack_document(pack_document(document)) == document


@given(st.binary(max_size=100))
def test_garbage_is_no_document(raw: bytes) -> None:
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(raw)


@given(st.binary(max_size=100))
def test_compressed_garbage_is_a_document_or_a_wire_error(plain: bytes) -> None:
    with suppress(WireError):
        unpack_document(compress(plain))


def test_a_document_cut_short_anywhere_is_refused() -> None:
    raw = pack_document({"name": "murmuration", "steps": list(range(300))})
    for length in range(len(raw)):
        with pytest.raises(WireError):
            unpack_document(raw[:length])


@pytest.mark.parametrize("plain_bytes", [9 << 20, 256 << 20], ids=["9 MiB", "256 MiB"])
def test_a_bomb_is_refused_in_bounded_memory(plain_bytes: int) -> None:
    bomb = compress(bytes(plain_bytes))
    assert len(bomb) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="more than 1048576 bytes"):
            unpack_document(bomb)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_small_document_cannot_become_a_heap_of_objects() -> None:
    """Two million empty lists: 2 MB of msgpack, 200 bytes compressed, over 130 MB as objects."""
    count = 2 << 20
    raw = compress(b"\xdd" + struct.pack(">I", count) + b"\x90" * count)
    with pytest.raises(WireError):
        unpack_document(raw)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"k": inner}])
def test_nesting_is_bounded(wrap: Callable[[object], object]) -> None:
    def nested(depth: int) -> bytes:
        document: object = 1
        for _ in range(depth):
            document = wrap(document)
        return pack_document(document)

    unpack_document(nested(15))
    for depth in (16, 100, 600):
        with pytest.raises(WireError, match="a document nested deeper than 16"):
            unpack_document(nested(depth))


def test_the_length_of_lists_and_maps_is_bounded() -> None:
    longest = 16 * 1024
    for document in ([0] * longest, {str(i): i for i in range(longest)}):
        assert unpack_document(pack_document(document)) == document
    for document in ([0] * (longest + 1), {str(i): i for i in range(longest + 1)}):
        with pytest.raises(WireError, match="a damaged document"):
            unpack_document(pack_document(document))


def test_keys_are_text() -> None:
    with pytest.raises(WireError, match="a document with the key b'x'"):
        unpack_document(pack_document([{"ok": {b"x": 1}}]))


@pytest.mark.parametrize("claimed_bytes", [1, 1 << 40])
def test_the_size_in_the_header_is_not_trusted(claimed_bytes: int) -> None:
    """A zstd frame whose header says 1 byte or 1 TiB, around a raw block of three."""
    last_raw_block = (1 | 3 << 3).to_bytes(3, "little") + b"\x92\x01\x02"
    forged = b"\x28\xb5\x2f\xfd\xc0\x50" + struct.pack("<Q", claimed_bytes) + last_raw_block
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(forged)


def test_a_window_over_the_limit_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=24, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    raw = compressor.compress(msgpack.packb("x")) + compressor.flush()
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(raw)


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xa2\xff\xff",
        b"\x81\x01\x02",
        b"\x01\x02",
    ],
    ids=[
        "empty", "no such type", "deep", "long array", "long map", "no utf-8", "a number as key",
        "two documents",
    ],
)  # fmt: skip
def test_hostile_msgpack_is_refused(plain: bytes) -> None:
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(compress(plain))
