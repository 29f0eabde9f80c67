"""Documents: round trips, and refusals of whatever does not fit, in bounded memory."""

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgpack
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from murmuration.protos.documents import (
    MANIFEST_BYTES,
    PROFILE_BYTES,
    STATUS_BYTES,
    BadDocument,
    first_difference,
    manifest_difference,
    pack,
    run_name,
    unpack,
    unpack_plain,
)

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def compress(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


@settings(max_examples=25)
@given(DOCUMENTS)
def test_a_document_survives_the_wire(document):
    assert unpack(pack({"it": document}), MANIFEST_BYTES) == {"it": document}


@given(st.binary(max_size=100))
def test_garbage_is_no_document(raw):
    with pytest.raises(BadDocument, match=r"damaged|not msgpack"):
        unpack(raw, MANIFEST_BYTES)


@given(st.binary(max_size=100))
def test_compressed_garbage_is_a_document_or_refused(plain):
    with suppress(BadDocument):
        unpack(compress(plain), MANIFEST_BYTES)


def test_a_document_cut_short_anywhere_is_refused():
    raw = pack({"name": "murmuration", "steps": list(range(300))})
    for length in range(len(raw)):
        with pytest.raises(BadDocument):
            unpack(raw[:length], MANIFEST_BYTES)


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """Checks that what is done inside takes no more memory than that at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("limit_bytes", [MANIFEST_BYTES, STATUS_BYTES])
def test_a_bomb_is_refused_in_bounded_memory(limit_bytes):
    bomb = compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    with at_most(20 << 20), pytest.raises(BadDocument, match="larger than"):
        unpack(bomb, limit_bytes)


@pytest.mark.parametrize("container", [b"\x90", b"\x80"], ids=["lists", "maps"])
@pytest.mark.parametrize("count", [1_000_000, 190_000, 10_000])
def test_a_small_document_cannot_become_a_heap_of_objects(container, count):
    """Empty containers: about 50 to 130 bytes compressed, up to 64 MB as objects."""
    raw = compress(b"\x81\xa1x\xdd" + struct.pack(">I", count) + container * count)
    assert len(raw) < 140
    refused = pytest.raises(BadDocument, match=r"larger than|lists and maps")
    with at_most(2 << 20), refused as refusal:
        unpack(raw, MANIFEST_BYTES)
    assert "\n" not in str(refusal.value)


def test_what_a_list_claims_to_hold_is_not_made_room_for():
    """Each of 500 nested lists says that it has a million items."""
    plain = b"\x81\xa1x" + b"\xdd\x00\x0f\xff\xff" * 500
    for _ in range(2):
        with at_most(2 << 20), pytest.raises(BadDocument, match="not msgpack"):
            unpack(compress(plain), MANIFEST_BYTES)
        plain += bytes(1 << 16)


def test_a_profile_takes_the_same_limits_uncompressed():
    assert unpack_plain(msgpack.packb({"x": [1.5]}), PROFILE_BYTES) == {"x": [1.5]}
    for plain, says in (
        (msgpack.packb({"x": "y" * 1_000_000}), "larger than 16384 bytes"),
        (b"\x81\xa1x" + b"\x91" * 100 + b"\xc0", "nested deeper"),
        (msgpack.packb({"x": msgpack.ExtType(5, b"yy")}), "not msgpack"),
    ):
        with pytest.raises(BadDocument, match=says):
            unpack_plain(plain, PROFILE_BYTES)


def test_a_large_document_of_plain_use_is_read():
    """A manifest of 3,000 tensors; the status of 4,000 peers."""
    tensors = {f"model.layers.{n}.self_attn.q_proj.weight": [4096, 4096] for n in range(3000)}
    assert unpack(pack({"tensors": tensors}), MANIFEST_BYTES) == {"tensors": tensors}
    members = [{"peer": f"w{n}", "address": f"10.0.{n >> 8}.{n & 255}:7700"} for n in range(4000)]
    members = [{**member, "versions": [7] * 4} for member in members]
    assert unpack(pack({"members": members}), STATUS_BYTES) == {"members": members}


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"k": inner}])
def test_nesting_is_bounded(wrap):
    def nested(depth: int) -> bytes:
        document: object = 1
        for _ in range(depth - 1):
            document = wrap(document)
        return pack({"root": document})

    unpack(nested(15), MANIFEST_BYTES)
    for depth in (16, 100, 500):
        with pytest.raises(BadDocument, match=r"nested deeper than 16|not msgpack"):
            unpack(nested(depth), MANIFEST_BYTES)


@pytest.mark.parametrize(
    "document", [{"x": [{"ok": {b"x": 1}}]}, {b"x": 1}, {1: 2}, [1, 2], 3, None, "text"], ids=repr
)
def test_only_maps_with_text_keys_are_documents(document):
    with pytest.raises(BadDocument, match=r"not a map with text keys|not msgpack: int is not"):
        unpack(pack(document), MANIFEST_BYTES)


@pytest.mark.parametrize("claimed_bytes", [1, 1 << 40])
def test_the_size_in_the_header_is_not_trusted(claimed_bytes):
    """A zstd frame whose header says 1 byte or 1 TiB, around a raw block of three."""
    last_raw_block = (1 | 3 << 3).to_bytes(3, "little") + b"\x92\x01\x02"
    forged = b"\x28\xb5\x2f\xfd\xc0\x50" + struct.pack("<Q", claimed_bytes) + last_raw_block
    with pytest.raises(BadDocument, match="damaged"):
        unpack(forged, MANIFEST_BYTES)


def test_a_window_over_the_limit_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=24, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(BadDocument, match="damaged"):
        unpack(compressor.compress(msgpack.packb({"x": 1})) + compressor.flush(), MANIFEST_BYTES)


HOSTILE = {
    "empty": b"", "no such type": b"\xc1", "deep": b"\x91" * 100_000 + b"\xc0",
    "long array": b"\xdd\xff\xff\xff\xff", "long map": b"\xdf\xff\xff\xff\xff",
    "no utf-8": b"\xa2\xff\xff", "a number as key": b"\x81\x01\x02", "two documents": b"\x01\x02",
}  # fmt: skip


@pytest.mark.parametrize("plain", HOSTILE.values(), ids=HOSTILE)
def test_hostile_msgpack_is_refused(plain):
    with pytest.raises(BadDocument, match=r"not msgpack|not a map|larger than"):
        unpack(compress(plain), MANIFEST_BYTES)


RUN = {"diloco": {"inner_steps": 50, "preset": "diloco"}, "tensors": {"a.weight": [4, 8]}}


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (RUN | {"diloco": {"inner_steps": 25}}, "diloco.inner_steps: 50 here, 25 there"),
        ({**RUN, "tensors": {"a.weight": [4, 9]}}, "tensors.a.weight[1]: 8 here, 9 there"),
        ({**RUN, "tensors": {"a.weight": [4]}},
         "tensors.a.weight: a list of 2 here, a list of 1 there"),
        ({**RUN, "extra": {"x": 1}}, "extra: missing here, a table of 1 there"),
        ({"diloco": RUN["diloco"]}, "tensors: a table of 1 here, missing there"),
        ({**RUN, "diloco": None}, "diloco: a table of 2 here, None there"),
    ],
)  # fmt: skip
def test_names_the_first_key_and_both_values(other, line):
    assert first_difference(RUN, other) == line


def test_a_number_of_another_type_differs_and_values_are_shown_shortened():
    assert first_difference({"x": 1}, {"x": 1.0}) == "x: 1 here, 1.0 there"
    assert first_difference({"x": 1}, {"x": True}) == "x: 1 here, True there"
    found = first_difference({"x": "a" * 1000}, {"x": "b"})
    assert found is not None
    assert found.endswith("... here, 'b' there")
    assert len(found) < 100


def test_the_same_document_in_other_bytes_is_the_same_run():
    packed = pack(RUN)
    plain = zstandard.ZstdDecompressor().decompress(packed)
    other = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(plain)
    assert packed != other
    assert manifest_difference(packed, other) is None

    assert run_name(packed) == run_name(other)


def test_damaged_bytes_are_refused():
    with pytest.raises(BadDocument, match="damaged"):
        run_name(b"junk")
    line = manifest_difference(pack(RUN), b"junk")
    assert line is not None
    assert line.startswith("the manifest cannot be read: damaged")
