"""Cards of peers to messages and back."""

import math
from collections.abc import Sequence

from protos import murmuration_pb2 as pb
from worker.membership import MAX_UNREACHABLE, Digest, Health, Member, Phase
from worker.wire.errors import WireError

_MAX_PEERS = 4096
_MAX_NAME_BYTES = 256
MAX_PROFILE_BYTES = 16 * 1024


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
        digests=[
            pb.FragmentDigest(version=d.version, contributors=d.contributors, hash=d.hash)
            for d in member.digests
        ],
    )


def member_from_message(message: pb.Member) -> Member:
    """Raises WireError when names or enums are out of range."""
    for name in (message.peer, message.address, *message.unreachable):
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            raise WireError(f"a peer with a name or address of {len(name)} characters")
        if not name.isprintable():
            raise WireError(f"a peer with the name or address {name!r}")
    if len(message.profile) > MAX_PROFILE_BYTES:
        raise WireError(f"peer {message.peer}: a profile of {len(message.profile)} bytes")
    if len(message.unreachable) > MAX_UNREACHABLE:
        raise WireError(f"peer {message.peer}: {len(message.unreachable)} peers out of its reach")
    if len({message.peer, *message.unreachable}) != 1 + len(message.unreachable):
        raise WireError(f"peer {message.peer}: itself or a peer twice is out of its reach")
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
        digests=tuple(Digest(d.version, d.contributors, d.hash) for d in message.digests),
    )


def members_from_messages(messages: Sequence[pb.Member]) -> tuple[Member, ...]:
    if len(messages) > _MAX_PEERS:
        raise WireError(f"{len(messages)} peers in one message; at most {_MAX_PEERS}")
    return tuple(member_from_message(message) for message in messages)


def _seconds(value: float) -> float:
    """0 for what is no duration."""
    return value if math.isfinite(value) and value > 0 else 0.0
