"""Messages to and from bytes: members, and those of the exchange that are made in one place."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from murmuration.protos import documents
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.allreduce.dialogue import (
    ContributionHeader,
    ReductionHeader,
    RefusalKind,
)
from murmuration.worker.membership import MAX_UNREACHABLE, Digest, Health, Member, Phase
from murmuration.worker.wire.errors import Again, WireError
from murmuration.worker.wire.payloads import Payload

T = TypeVar("T", bound=Message)

_MAX_PEERS = 4096
_MAX_NAME_BYTES = 256


def parse(kind: type[T], raw: bytes) -> T:
    """Raises Again when the bytes are no such message."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise Again(f"not a {kind.__name__}") from error


@dataclass(frozen=True)
class Reduction:
    """The mean of a shard, as the encoded bytes that everyone applies."""

    header: ReductionHeader
    payload: Payload


def unpack_document(raw: bytes, max_bytes: int) -> dict[str, Any]:
    """As `murmuration.protos.documents.unpack`. Raises WireError."""
    try:
        return documents.unpack(raw, max_bytes)
    except documents.BadDocument as error:
        raise WireError(f"a bad document: {error}") from error


def status_reply(document: object) -> bytes:
    """The answer of `Control/Status`."""
    return pb.StatusReply(document=documents.pack(document)).SerializeToString()


def contribution_to_message(header: ContributionHeader) -> bytes:
    return pb.ExchangeUp(header=pb.ContributionHeader(**vars(header))).SerializeToString()


def contribution_from_message(header: pb.ContributionHeader) -> ContributionHeader:
    named = (each.name for each in fields(ContributionHeader))
    return ContributionHeader(**{name: getattr(header, name) for name in named})


def reduction_to_message(header: ReductionHeader) -> bytes:
    return pb.ExchangeDown(header=pb.ReductionHeader(**vars(header))).SerializeToString()


_LISTS = ("contributors", "joiners", "factors", "roots", "weights")


def reduction_from_message(header: pb.ReductionHeader) -> ReductionHeader:
    """Raises WireError: it names more peers than a round has, or one twice."""
    named = (each.name for each in fields(ReductionHeader))
    plain = {name: getattr(header, name) for name in named}
    groups = {name: tuple(plain[name]) for name in _LISTS}
    for peers in (groups["contributors"], groups["joiners"]):
        if len(peers) > _MAX_PEERS or len(set(peers)) < len(peers):
            raise WireError(f"{len(peers)} peers in a reduction, or one twice")
        for name in peers:
            check_name(name)
    return ReductionHeader(**(plain | groups))


_REFUSAL_CODES: dict[RefusalKind, "pb.RefusalCode.ValueType"] = {
    "run": pb.RefusalCode.REFUSAL_RUN,
    "group": pb.RefusalCode.REFUSAL_GROUP,
    "pruned": pb.RefusalCode.REFUSAL_PRUNED,
    "invalid": pb.RefusalCode.REFUSAL_INVALID,
    "again": pb.RefusalCode.REFUSAL_AGAIN,
}
_REFUSAL_KINDS = {code: kind for kind, code in _REFUSAL_CODES.items()}


def refusal(kind: RefusalKind, reason: str) -> pb.Refusal:
    return pb.Refusal(code=_REFUSAL_CODES[kind], reason=reason)


def refusal_to_message(kind: RefusalKind, reason: str) -> bytes:
    return pb.ExchangeDown(refusal=refusal(kind, reason)).SerializeToString()


def refusal_kind(refused: pb.Refusal) -> RefusalKind:
    """A code that is not known ends the round, as one that says so."""
    return _REFUSAL_KINDS.get(refused.code, "invalid")


def member_to_message(member: Member) -> pb.Member:
    return pb.Member(
        peer=member.peer,
        address=member.address,
        epoch=member.epoch,
        incarnation=member.incarnation,
        health=pb.Health.ValueType(member.health),
        phase=pb.Phase.ValueType(member.phase),
        heartbeat=member.heartbeat,
        step=member.step,
        step_s=member.step_s,
        stage=member.stage,
        profile=member.profile,
        unreachable=member.unreachable,
        idle=member.idle,
        digests=[
            pb.FragmentDigest(version=d.version, contributors=d.contributors, hash=d.hash)
            for d in member.digests
        ],
    )


def signed_member_to_message(member: Member) -> pb.Member:
    """As its peer has signed it, and what this one says of its health."""
    assert member.signed is not None
    return pb.Member(
        health=pb.Health.ValueType(member.health),
        signed=member.signed.words,
        signature=member.signed.signature,
    )


def member_from_message(message: pb.Member) -> Member:
    """Raises WireError when names or enums are out of range."""
    for name in (message.peer, message.address, *message.unreachable, *message.idle):
        check_name(name)
    if len(message.profile) > documents.PROFILE_BYTES:
        raise WireError(f"peer {message.peer}: a profile of {len(message.profile)} bytes")
    for named, what in ((message.unreachable, "out of its reach"), (message.idle, "idle")):
        if len(named) > MAX_UNREACHABLE:
            raise WireError(f"peer {message.peer}: {len(named)} peers {what}")
        if len({message.peer, *named}) != 1 + len(named):
            raise WireError(f"peer {message.peer}: itself or a peer twice is {what}")
    try:
        health, phase = Health(message.health), Phase(message.phase)
    except ValueError as error:
        raise WireError(f"peer {message.peer}: {error}") from error
    return Member(
        peer=message.peer,
        address=message.address,
        epoch=message.epoch,
        incarnation=message.incarnation,
        health=health,
        phase=phase,
        heartbeat=message.heartbeat,
        step=message.step,
        step_s=_seconds(message.step_s),
        stage=message.stage,
        profile=message.profile,
        unreachable=tuple(message.unreachable),
        idle=tuple(message.idle),
        digests=tuple(Digest(d.version, d.contributors, d.hash) for d in message.digests),
    )


def check_name(name: str) -> None:
    """Raises WireError: it is no name or address of a peer."""
    if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise WireError(f"a peer with a name or address of {len(name)} characters")
    if not name.isprintable():
        raise WireError(f"a peer with the name or address {name[:80]!r}")


def counted_members(messages: Sequence[pb.Member]) -> Sequence[pb.Member]:
    """Raises WireError: more than a message may hold."""
    if len(messages) > _MAX_PEERS:
        raise WireError(f"{len(messages)} peers in one message; at most {_MAX_PEERS}")
    return messages


def _seconds(value: float) -> float:
    """0 for what is no duration."""
    return value if math.isfinite(value) and value > 0 else 0.0
