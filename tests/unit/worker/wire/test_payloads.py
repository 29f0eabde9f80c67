"""Payloads in frames, plain and packed, and put together again."""

import random
from contextlib import suppress
from itertools import product

import pytest
import zstandard
from hypothesis import given, strategies as st

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.wire import Again, Incoming, Payload, WireError, hash64
from murmuration.worker.wire.payloads import frame_message
from tests.support.frames import frames, frames_of, incoming_of

PARTS = st.lists(st.binary(max_size=70), max_size=5)


@given(PARTS, st.integers(0, 400), st.integers(1, 40))
def test_frames_carry_every_byte_from_the_offset_on(parts, offset, limit):
    whole = b"".join(parts)
    with frames_of(limit):
        sent = list(frames(map(memoryview, parts), offset))
    assert b"".join(frame.payload for frame in sent) == whole[offset:]
    position = offset
    for frame in sent:
        assert frame.offset == position
        assert 0 < len(frame.payload) <= limit
        assert frame.hash == hash64(frame.payload)
        position += len(frame.payload)


@given(st.integers(0, 2**64 - 1))
def test_only_the_next_offset_is_taken(offset):
    incoming = incoming_of(b"0123456789")
    incoming.add(pb.Frame(offset=0, payload=b"0123", hash=hash64(b"0123")))
    frame = pb.Frame(offset=offset, payload=b"456", hash=hash64(b"456"))
    if offset == 4:
        incoming.add(frame)
    else:
        with pytest.raises(WireError, match=f"^a frame at {offset}, expected 4$"):
            incoming.add(frame)


@pytest.mark.parametrize("size", [0, 11, 2**20 + 1])
def test_a_frame_that_is_empty_or_larger_than_what_is_left_is_refused(size):
    payload = bytes(size)
    with pytest.raises(WireError, match=f"^a frame of {size} bytes at 0 of 10$"):
        Incoming(10, 0).add(pb.Frame(offset=0, payload=payload, hash=hash64(payload)))


def test_an_unfinished_payload_does_not_verify():
    incoming = incoming_of(b"abcd")
    incoming.add(pb.Frame(offset=0, payload=b"ab", hash=hash64(b"ab")))
    assert not incoming.complete
    with pytest.raises(WireError, match="2 of 4 bytes arrived"):
        incoming.verify()


@given(
    st.sampled_from([pb.ExchangeUp, pb.ExchangeDown, pb.FetchReply]),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=1, max_size=400),
    st.integers(0, 2**32 - 1),
)
def test_what_is_written_by_hand_is_what_the_generated_code_writes(kind, offset, piece, raw_bytes):
    raw = frame_message(kind, offset, memoryview(piece), raw_bytes)
    found = kind.FromString(raw).frame
    assert (found.offset, found.payload, found.hash) == (offset, piece, hash64(piece))
    assert found.raw_bytes == raw_bytes
    assert kind(frame=found).SerializeToString(deterministic=True) == raw


MIB = 2**20
PAYLOADS = st.lists(
    st.one_of(st.binary(max_size=60), st.integers(1, 90).map(lambda n: b"\x07" * n)), max_size=6
).map(b"".join)
KINDS = st.sampled_from([pb.ExchangeUp, pb.ExchangeDown])


def packed(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(plain)


def frame(carried: bytes, raw_bytes: int, **more: int) -> pb.Frame:
    return pb.Frame(payload=carried, hash=hash64(carried), raw_bytes=raw_bytes, **more)


@given(PAYLOADS, st.integers(1, 64), st.booleans(), KINDS)
def test_a_payload_arrives_whole_and_is_counted_as_it_travels(raw, limit, compress, kind):
    with frames_of(limit):
        payload = Payload.of(memoryview(raw), compress=compress)
        assert payload.hash == hash64(raw)
        incoming, travelled = incoming_of(raw), 0
        for message, size, stands_for in wire.payload_messages(kind, payload):
            assert incoming.add(kind.FromString(message).frame) == (size, stands_for)
            travelled += size
        incoming.verify()
        assert travelled == payload.packed_bytes <= len(raw)
    assert bytes(incoming.raw) == raw
    assert compress or (payload.packed, travelled) == ((), len(raw))


def test_frames_stand_for_a_mebibyte_and_only_those_that_shrink_are_packed():
    raw = bytes(MIB) + random.Random(0).randbytes(MIB) + b"\x01" * 5 * 1000
    payload = Payload.of(memoryview(raw), compress=True)
    assert [piece is None for piece in payload.packed] == [False, True, False]
    sent = list(wire.payload_messages(pb.ExchangeUp, payload))
    assert [stands_for for _, _, stands_for in sent] == [MIB, MIB, 5000]
    frames = [pb.ExchangeUp.FromString(message).frame for message, _, _ in sent]
    assert [f.raw_bytes for f in frames] == [MIB, 0, 5000]
    assert [f.offset for f in frames] == [0, MIB, 2 * MIB]
    assert payload.packed_bytes == sum(len(f.payload) for f in frames) < MIB + 1000


@given(st.binary(max_size=300), st.sampled_from([1, 2, 4]), st.integers(16, 80))
def test_bytes_of_like_meaning_travel_together_and_come_apart_again(raw, unit_bytes, limit):
    with frames_of(limit):
        payload = Payload.of(memoryview(raw * 3), compress=True, unit_bytes=unit_bytes)
        incoming = Incoming(len(raw) * 3, payload.hash)
        for message, _, _ in wire.payload_messages(pb.ExchangeUp, payload):
            incoming.add(pb.ExchangeUp.FromString(message).frame)
        incoming.verify()
    assert bytes(incoming.raw) == raw * 3


PLAIN = bytes(range(200)) + bytes(200)
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"
WRONG = {
    "a byte less": frame(packed(PLAIN), 399),
    "a byte more": frame(packed(PLAIN), 401),
    "one": frame(packed(PLAIN), 1),
    "a mebibyte": frame(packed(PLAIN), MIB),
    "over a mebibyte": frame(packed(bytes(MIB + 1)), MIB + 1),
    "the most there is": frame(packed(PLAIN), 2**32 - 1),
    "garbage": frame(b"this is no zstd at all" * 9, 400),
    "cut short": frame(packed(PLAIN)[:-9], 400),
    "a header alone": frame(packed(PLAIN)[:6], 400),
    "nothing inside": frame(packed(b""), 400),
    "no bytes": frame(b"", 400),
    "two zstd frames": frame(packed(PLAIN[:200]) + packed(PLAIN[200:]), 400),
    "a bomb": frame(packed(bytes(32 * MIB)), 400),
    "a skippable frame alone": frame(SKIPPABLE, 400),
    "text behind the frame": frame(packed(PLAIN) + b"trailing", 400),
    "another frame behind it": frame(packed(PLAIN) + packed(b"x"), 400),
    "zeros behind it": frame(packed(PLAIN) + bytes(500_000), 400),
    "too many columns": frame(packed(PLAIN), 400, columns=9),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_frame_that_is_not_what_it_says_is_refused_and_does_no_harm(wrong):
    """The payload has room for another mebibyte, so that its size alone does not save it."""
    payload = PLAIN + bytes(2 * MIB)
    incoming = incoming_of(payload)
    with pytest.raises(Again):
        incoming.add(wrong)
    assert incoming.received_bytes == 0
    incoming.add(frame(packed(PLAIN), 400))
    for start in (400, 400 + MIB):
        incoming.add(frame(packed(bytes(MIB)), MIB, offset=start))
    incoming.verify()
    assert bytes(incoming.raw) == payload


def test_what_a_frame_takes_is_known_before_it_is_unpacked():
    """The window too, larger than a frame can need, of one that does not say its size: the
    decompressor would allocate it."""
    assert 30_000 * len(WRONG["a bomb"].payload) < 32 * MIB
    settings = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    windowed = stream.compress(PLAIN) + stream.flush()
    assert zstandard.get_frame_parameters(windowed).window_size > 8 * MIB
    for wrong, room, says in (
        (WRONG["a bomb"], 400, r"^a zstd frame of 33554432 bytes, announced as 400$"),
        (frame(packed(PLAIN), 400), 399, r"^a frame of 400 bytes at 0 of 399$"),
        (frame(windowed, 400), 400, "a zstd frame of "),
    ):
        incoming = incoming_of(PLAIN[:room])
        with pytest.raises(Again, match=says):
            incoming.add(wrong)
        assert incoming.received_bytes == 0


@given(st.binary(min_size=1, max_size=80), st.integers(1, 500))
def test_any_garbage_is_refused(garbage, raw_bytes):
    incoming = Incoming(1000, 0)
    with pytest.raises(Again):
        incoming.add(frame(garbage, raw_bytes))
    assert incoming.received_bytes == 0


def test_every_changed_byte_is_refused_or_does_no_harm():
    """The hash of each frame fits: zstd, or the hash of the whole, finds the damage."""
    carried = packed(PLAIN)
    for position, bit in product(range(len(carried)), range(8)):
        damaged = bytearray(carried)
        damaged[position] ^= 1 << bit
        incoming = incoming_of(PLAIN)
        with suppress(Again):
            incoming.add(frame(bytes(damaged), 400))
            incoming.verify()
            assert bytes(incoming.raw) == PLAIN
