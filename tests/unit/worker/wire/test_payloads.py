"""Frames: any payload arrives whole from any offset, and nothing damaged is taken."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.wire import Incoming, WireError, hash64, parse
from murmuration.worker.wire.payloads import Kind, frame_message
from tests.support.frames import frames, frames_of, incoming_of

PARTS = st.lists(st.binary(max_size=70), max_size=5)


def views(parts: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


@given(PARTS, st.integers(0, 400), st.integers(1, 40))
def test_frames_carry_every_byte_from_the_offset_on(
    parts: list[bytes], offset: int, limit: int
) -> None:
    whole = b"".join(parts)
    with frames_of(limit):
        sent = list(frames(views(parts), offset))
    assert b"".join(frame.payload for frame in sent) == whole[offset:]
    position = offset
    for frame in sent:
        assert frame.offset == position
        assert 0 < len(frame.payload) <= limit
        assert frame.hash == hash64(frame.payload)
        position += len(frame.payload)


@given(PARTS, st.integers(1, 40), st.data())
def test_a_payload_arrives_whole_though_the_stream_breaks_anywhere(
    parts: list[bytes], limit: int, data: st.DataObject
) -> None:
    whole = b"".join(parts)
    incoming = incoming_of(whole)
    with frames_of(limit):
        while not incoming.complete:
            attempt = list(frames(views(parts), incoming.received_bytes))
            for frame in attempt[: data.draw(st.integers(1, len(attempt)))]:
                incoming.add(pb.Frame.FromString(frame.SerializeToString()))
    incoming.verify()
    assert bytes(incoming.buffer) == whole


def test_frames_are_of_at_most_a_mebibyte() -> None:
    parts = views([bytes(2**20 + 5), b"x" * (2**21)])
    assert [len(frame.payload) for frame in frames(parts)] == [2**20, 5, 2**20, 2**20]
    incoming = incoming_of(b"".join(parts))
    for frame in frames(parts):
        incoming.add(frame)
    incoming.verify()


def test_every_corruption_of_one_byte_of_a_payload_is_refused() -> None:
    payload = bytes(range(40))
    (frame,) = frames([memoryview(payload)])
    for position in range(len(payload)):
        for change in range(1, 256):
            damaged = bytearray(payload)
            damaged[position] ^= change
            incoming = incoming_of(payload)
            with pytest.raises(WireError, match="the frame at 0 is damaged: its hash differs"):
                incoming.add(pb.Frame(offset=0, payload=bytes(damaged), hash=frame.hash))
            assert incoming.received_bytes == 0


def test_every_flipped_bit_of_the_hash_is_refused() -> None:
    (frame,) = frames([memoryview(b"payload")])
    for bit in range(64):
        with pytest.raises(WireError, match="damaged"):
            incoming_of(b"payload").add(
                pb.Frame(offset=0, payload=b"payload", hash=frame.hash ^ (1 << bit))
            )


def test_every_corrupted_byte_of_a_message_is_refused_or_does_no_harm() -> None:
    payload = bytes(range(100, 140))
    first, second = bytes(payload[:20]), bytes(payload[20:])
    (head,) = frames([memoryview(first)])
    raw = pb.Frame(offset=20, payload=second, hash=hash64(second)).SerializeToString()
    for position in range(len(raw)):
        for change in range(1, 256):
            damaged = bytearray(raw)
            damaged[position] ^= change
            incoming = incoming_of(payload)
            incoming.add(head)
            try:
                incoming.add(parse(pb.Frame, bytes(damaged)))
            except WireError:
                continue
            assert bytes(incoming.buffer) == payload


@given(st.integers(0, 2**64 - 1))
def test_only_the_next_offset_is_taken(offset: int) -> None:
    incoming = incoming_of(b"0123456789")
    incoming.add(pb.Frame(offset=0, payload=b"0123", hash=hash64(b"0123")))
    frame = pb.Frame(offset=offset, payload=b"456", hash=hash64(b"456"))
    if offset == 4:
        incoming.add(frame)
    else:
        with pytest.raises(WireError, match=f"^a frame at {offset}, expected 4$"):
            incoming.add(frame)


@pytest.mark.parametrize("size", [0, 11, 2**20 + 1])
def test_a_frame_that_is_empty_or_larger_than_what_is_left_is_refused(size: int) -> None:
    payload = bytes(size)
    with pytest.raises(WireError, match=f"^a frame of {size} bytes at 0 of 10$"):
        Incoming(10, 0).add(pb.Frame(offset=0, payload=payload, hash=hash64(payload)))


def test_a_frame_over_a_mebibyte_is_refused_even_where_it_would_fit() -> None:
    payload = bytes(2**20 + 1)
    with pytest.raises(WireError, match="a frame of 1048577 bytes"):
        incoming_of(payload).add(pb.Frame(offset=0, payload=payload, hash=hash64(payload)))


def test_a_whole_of_good_frames_with_another_hash_is_refused() -> None:
    incoming = Incoming(4, hash64(b"abcd"))
    incoming.add(pb.Frame(offset=0, payload=b"abce", hash=hash64(b"abce")))
    with pytest.raises(WireError, match="the payload is damaged: its hash differs"):
        incoming.verify()


def test_an_unfinished_payload_does_not_verify() -> None:
    incoming = incoming_of(b"abcd")
    incoming.add(pb.Frame(offset=0, payload=b"ab", hash=hash64(b"ab")))
    assert not incoming.complete
    with pytest.raises(WireError, match="2 of 4 bytes arrived"):
        incoming.verify()


def test_an_empty_payload_is_complete_at_once() -> None:
    incoming = incoming_of(b"")
    assert incoming.complete
    incoming.verify()


def test_a_payload_of_ones_own_is_held_as_it_is() -> None:
    payload = memoryview(bytearray(b"mine"))
    incoming = Incoming.held(payload, hash64(payload))
    assert incoming.complete
    assert incoming.buffer is payload
    incoming.verify()


@given(
    st.sampled_from([pb.ExchangeUp, pb.ExchangeDown, pb.FetchReply]),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=1, max_size=400),
    st.integers(0, 2**32 - 1),
)
def test_what_is_written_by_hand_is_what_the_generated_code_writes(
    kind: Kind, offset: int, piece: bytes, raw_bytes: int
) -> None:
    raw = frame_message(kind, offset, memoryview(piece), raw_bytes)
    found = kind.FromString(raw).frame
    assert (found.offset, found.payload, found.hash) == (offset, piece, hash64(piece))
    assert found.raw_bytes == raw_bytes
    assert kind(frame=found).SerializeToString(deterministic=True) == raw


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 2**20 - 1, 2**20])
def test_frames_of_any_size_are_what_the_generated_code_writes(size: int) -> None:
    """Where the length in front of the payload, or of the whole, takes one byte more."""
    for taken in range(size - 20, size + 1):
        piece = memoryview(bytes(taken))
        raw = frame_message(pb.ExchangeUp, 2**33 + 5, piece, 2**20)
        assert pb.ExchangeUp.FromString(raw).SerializeToString(deterministic=True) == raw
