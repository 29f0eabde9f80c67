"""One frame as a message, written out by hand."""

from protos import murmuration_pb2 as pb
from worker.wire.hashes import hash64

Kind = (
    type[pb.ExchangeUp]
    | type[pb.ExchangeDown]
    | type[pb.MeetMessage]
    | type[pb.FetchReply]
    | type[pb.VisitUp]
    | type[pb.VisitDown]
)


def frame_message(
    kind: Kind, offset: int, piece: memoryview, raw_bytes: int = 0, columns: int = 1
) -> bytes:
    """A frame as a serialised message of the kind.

    Field by field, because that copies the payload once where the generated code does thrice; 0
    is left out.
    """
    outer = kind.DESCRIPTOR.fields_by_name["frame"].number
    at = b"\x08" + _varint(offset) if offset else b""
    head = at + b"\x12" + _varint(len(piece))
    tail = b"\x19" + hash64(piece).to_bytes(8, "little")
    tail += b"\x20" + _varint(raw_bytes) if raw_bytes else b""
    tail += b"\x28" + _varint(columns) if columns > 1 else b""
    size = _varint(len(head) + len(piece) + len(tail))
    return b"".join((bytes((outer << 3 | 2,)), size, head, piece, tail))


def _varint(value: int) -> bytes:
    """Protobuf's encoding of an unsigned number."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
