"""Frames as the generated code reads them, whatever wrote them."""

from collections.abc import Iterable

from protos import murmuration_pb2 as pb
from worker.wire import frame_messages


def frames(parts: Iterable[memoryview], offset: int = 0) -> list[pb.Frame]:
    """The parts cut into frames; each must be what the generated code would have written."""
    found = []
    for raw, size in frame_messages(pb.ExchangeUp, parts, offset):
        message = pb.ExchangeUp.FromString(raw)
        assert message.SerializeToString(deterministic=True) == raw
        assert len(message.frame.payload) == size
        found.append(message.frame)
    return found
