"""Frames as the generated code reads them, whatever wrote them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.wire import Incoming, frame_messages, hash64, payloads


def frames(parts: Iterable[memoryview], offset: int = 0) -> list[pb.Frame]:
    """The parts cut into frames; each must be what the generated code would have written."""
    found = []
    for raw, size in frame_messages(pb.ExchangeUp, parts, offset):
        message = pb.ExchangeUp.FromString(raw)
        assert message.SerializeToString(deterministic=True) == raw
        assert len(message.frame.payload) == size
        found.append(message.frame)
    return found


@contextmanager
def frames_of(limit_bytes: int) -> Iterator[None]:
    """Inside, a frame stands for at most so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payloads, "MAX_FRAME_BYTES", limit_bytes)
        yield


def incoming_of(payload: bytes) -> Incoming:
    """Nothing of the payload has arrived yet."""
    return Incoming(len(payload), hash64(payload))
