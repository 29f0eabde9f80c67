"""A frame written by hand is what the generated code writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import murmuration_pb2 as pb
from worker.wire import hash64
from worker.wire.frames import Kind, frame_message


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
