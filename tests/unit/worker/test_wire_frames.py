"""Frames: any payload arrives whole from any offset, and nothing damaged is taken."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos import murmuration_pb2 as pb
from tests.support.frames import frames
from worker import wire
from worker.wire import Incoming, WireError, hash64

PARTS = st.lists(st.binary(max_size=70), max_size=5)


def views(parts: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def incoming_of(payload: bytes) -> Incoming:
    return Incoming(len(payload), hash64(payload))


@given(PARTS, st.integers(0, 400), st.integers(1, 40))
def test_frames_carry_every_byte_from_the_offset_on(
    parts: list[bytes], offset: int, limit: int
) -> None:
    whole = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_FRAME_BYTES", limit)
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_FRAME_BYTES", limit)
        while not incoming.complete:
            attempt = list(frames(views(parts), incoming.received_bytes))
            for frame in attempt[: data.draw(st.integers(1, len(attempt)))]:
                incoming.add(pb.Frame.FromString(frame.SerializeToString()))
    incoming.verify()
    assert incoming.verified
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
                incoming.add(wire.parse(pb.Frame, bytes(damaged)))
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
    assert not incoming.verified


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
    assert incoming.verified
    assert incoming.buffer is payload
    incoming.verify()


# ------------------------------------------------------------------------------ tensors, hashes


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=30))
def test_tensors_become_bytes_and_back_without_a_copy(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    raw = wire.tensor_bytes(tensor)
    assert raw.nbytes == 4 * len(values)
    back = wire.bytes_tensor(raw).view(torch.float32)
    assert torch.equal(back, tensor)
    if values:
        assert back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([0.0, -1e15, 3.0], True),
        ([1.0, float("nan"), 2.0], False),
        ([1.0, float("inf")], False),
        ([float("-inf"), float("inf")], False),
        ([1e38], False),
        ([1e20, 0.0], False),
    ],
)
def test_only_finite_values_of_sane_size_pass(values: list[float], finite: bool) -> None:
    assert wire.is_finite(torch.tensor(values, dtype=torch.float32)) is finite


@given(st.integers(1, 3000), st.data())
def test_one_bad_value_anywhere_is_found(size: int, data: st.DataObject) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert wire.is_finite(values)
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e38, -1e38]))
    values[data.draw(st.integers(0, size - 1))] = bad
    assert not wire.is_finite(values)


def test_a_state_hash_covers_anchor_momentum_and_group() -> None:
    anchor, momentum, group = torch.arange(4.0), torch.ones(4), ("a", "b")
    hashed = wire.state_hash(anchor, momentum, group)
    assert hashed == wire.state_hash(anchor.clone(), momentum.clone(), group)
    whole = b"".join([wire.tensor_bytes(anchor), wire.tensor_bytes(momentum), b"a\nb"])
    assert hashed == hash64(whole)
    for index in range(4):
        for which in range(2):
            state = [anchor.clone(), momentum.clone()]
            state[which][index] += 1e-6 + state[which][index] * 1e-6
            assert wire.state_hash(*state, group) != hashed
    assert wire.state_hash(anchor, momentum, ("a", "c")) != hashed
    assert wire.state_hash(anchor, momentum, ()) != hashed


def test_a_tensor_hash_is_128_bits_of_all_tensors_in_order() -> None:
    first, second = torch.arange(4.0), torch.ones(3)
    hashed = wire.tensor_hash([first, second])
    assert len(hashed) == 32
    assert hashed == wire.tensor_hash([torch.cat([first, second])])
    assert hashed != wire.tensor_hash([second, first])


def test_a_group_hash_depends_on_names_and_order() -> None:
    assert wire.group_hash(["a", "b"]) == wire.group_hash(("a", "b"))
    assert len({wire.group_hash(g) for g in (["a", "b"], ["b", "a"], ["ab"], [])}) == 4


def test_a_reduction_is_announced_by_its_size_and_hash() -> None:
    payload = wire.Payload.of(memoryview(b"mean"))
    reduction = wire.Reduction(("a", "b"), ("a", "b", "c"), payload, last="b")
    header = wire.parse(pb.ExchangeDown, wire.reduction_header(reduction, codec=2)).header
    assert (reduction.contributors, reduction.next_group) == (
        tuple(header.contributors),
        tuple(header.next_group),
    )
    assert (header.codec, header.total_bytes, header.hash) == (2, 4, hash64(b"mean"))
    assert header.last == "b"
