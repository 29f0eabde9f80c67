"""Messages to and from bytes, and those of the exchange that are made in one place."""

from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protos import murmuration_pb2 as pb
from worker.exchange.types import ShardKey
from worker.wire.documents import pack_document
from worker.wire.errors import Again
from worker.wire.payloads import Payload

T = TypeVar("T", bound=Message)


def parse(kind: type[T], raw: bytes) -> T:
    """Raises Again when the bytes are no such message."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise Again(f"not a {kind.__name__}") from error


@dataclass(frozen=True)
class Reduction:
    """The mean of a shard, as the encoded bytes that everyone applies."""

    contributors: tuple[str, ...]
    next_group: tuple[str, ...]
    payload: Payload
    last: str  # whose contribution came last


def status_reply(document: object) -> bytes:
    """The answer of `Control/Status`."""
    return pb.StatusReply(document=pack_document(document)).SerializeToString()


def key_of(header: pb.ContributionHeader) -> ShardKey:
    return ShardKey(header.fragment, header.round, header.shard)


def reduction_header(reduction: Reduction, codec: int) -> bytes:
    return pb.ExchangeDown(
        header=pb.ReductionHeader(
            contributors=reduction.contributors,
            next_group=reduction.next_group,
            codec=codec,
            total_bytes=len(reduction.payload.raw),
            hash=reduction.payload.hash,
            last=reduction.last,
        )
    ).SerializeToString()


REFUSAL_CODES: dict[str, "pb.RefusalCode.ValueType"] = {
    "group": pb.RefusalCode.REFUSAL_GROUP,
    "pruned": pb.RefusalCode.REFUSAL_PRUNED,
    "invalid": pb.RefusalCode.REFUSAL_INVALID,
    "again": pb.RefusalCode.REFUSAL_AGAIN,
}


def refusal(code: "pb.RefusalCode.ValueType", reason: str) -> bytes:
    return pb.ExchangeDown(refusal=pb.Refusal(code=code, reason=reason)).SerializeToString()
