"""A microbatch's call at a stage: its key, its route, the reply, and all of it on the wire."""

import math
from dataclasses import dataclass

import xxhash

from murmuration.algorithms.codecs import Codec
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.wire import Payload, WireError


@dataclass(frozen=True, order=True)
class Incarnation:
    """One process of a peer; `epoch` is its `Member`'s. A peer that starts again under the same
    name has nothing of what its earlier process had under way."""

    peer: str
    epoch: int

    @classmethod
    def of(cls, member: Member) -> "Incarnation":
        return cls(member.peer, member.epoch)


@dataclass(frozen=True, order=True)
class StageCallKey:
    """One microbatch of an iteration; a repeated call has the same key."""

    iteration: int
    origin: Incarnation
    microbatch: int

    def plain(self) -> dict[str, object]:
        """As events name it."""
        origin = {"origin": self.origin.peer, "epoch": self.origin.epoch}
        return {"iteration": self.iteration, "microbatch": self.microbatch, **origin}

    @property
    def number(self) -> int:
        """Of the microbatch among all origins', by which its gradient is counted once."""
        return xxhash.xxh3_64_intdigest(
            f"{self.microbatch}/{self.origin.epoch}/{self.origin.peer}".encode()
        )


@dataclass(frozen=True)
class Hop:
    """A stage, and the peer that is to serve it."""

    stage: int
    peer: str


@dataclass(frozen=True)
class StageCall:
    """A microbatch at a stage, of activations of this shape, (B, T, D). `rest` are the hops that
    follow, without the origin; `snapshot` names the measurements that it has planned with."""

    key: StageCallKey
    stage: int
    rest: tuple[Hop, ...]
    shape: tuple[int, ...]
    snapshot: int
    sender: str


@dataclass(frozen=True)
class StageReply:
    """The encoded gradient of a call's activations, and the peers that took part, in order."""

    gradient: memoryview
    path: tuple[str, ...]


class MicrobatchDropped(Exception):
    """The microbatch is lost from here on; the message says why."""


class JobFailed(MicrobatchDropped):
    """The train thread could not compute it."""


class TryElsewhere(Exception):
    """Not here: another replica may do it."""


class StageCallTooLarge(WireError):
    """Activations that no call may hold on this peer."""


def serves(member: Member) -> bool:
    """Whether calls may be sent to this peer."""
    return member.health is Health.ALIVE and member.phase in (Phase.READY, Phase.TRAINING)


def call_bytes(activation_bytes: int) -> int:
    """What a call holds on its peer: its input, its output, and the gradient that comes back."""
    return 3 * activation_bytes


def call_header(call: StageCall, run: int, codec: Codec, payload: Payload) -> bytes:
    """The first message of a call."""
    return pb.StageCallUp(
        header=pb.StageCallHeader(
            run=run,
            iteration=call.key.iteration,
            origin=call.key.origin.peer,
            epoch=call.key.origin.epoch,
            microbatch=call.key.microbatch,
            sender=call.sender,
            stage=call.stage,
            rest=[pb.Hop(stage=hop.stage, peer=hop.peer) for hop in call.rest],
            codec=codec.wire_id,
            shape=call.shape,
            total_bytes=len(payload.raw),
            hash=payload.hash,
            snapshot=call.snapshot,
        )
    ).SerializeToString()


def call_of(
    header: pb.StageCallHeader,
    run: int,
    codec: Codec,
    limit_bytes: int,
    stages: int,
    batch_shape: tuple[int, ...] | None = None,
) -> StageCall:
    """Reads a header. Raises WireError: it is of another run, or does not fit the model or itself;
    StageCallTooLarge: its sizes fit one another, but are above one of the limits.

    Args:
        limit_bytes: of the activations of a microbatch, encoded, that are taken here.
        batch_shape: (B, T, D) of this run's largest batches; None where nobody knows.
    """
    if header.run != run:
        raise WireError("a stage call of another run")
    if header.codec != codec.wire_id:
        raise WireError(f"activations in codec {header.codec}; this run's is {codec.name}")
    shape = tuple(header.shape)
    if len(shape) != 3 or min(shape) < 1:
        raise WireError(f"activations of shape {shape}")
    expected_bytes = codec.encoded_bytes(math.prod(shape))
    if header.total_bytes != expected_bytes:
        raise WireError(
            f"activations of {header.total_bytes} bytes; shape {shape} takes {expected_bytes}"
        )
    most = batch_shape or shape
    if shape[2] != most[2]:
        raise WireError(f"activations of width {shape[2]}; this run's have {most[2]}")
    if shape[0] > most[0] or shape[1] > most[1]:
        raise StageCallTooLarge(f"activations of shape {shape}; a batch of this run: {most}")
    if expected_bytes > limit_bytes:
        raise StageCallTooLarge(
            f"[stages] memory_mib: the activations of one microbatch take "
            f"{expected_bytes / 2**20:.2g} MiB, of which {limit_bytes / 2**20:.2g} are taken here; "
            "raise memory_mib on this machine, or make batches smaller"
        )
    route = [header.stage, *(hop.stage for hop in header.rest)]
    if max(route) >= stages or len(set(route)) < len(route) or 0 in route[1:]:
        raise WireError(f"a route of {len(route)} stages that this model does not have")
    origin = Incarnation(header.origin, header.epoch)
    key = StageCallKey(header.iteration, origin, header.microbatch)
    rest = tuple(Hop(hop.stage, hop.peer) for hop in header.rest)
    return StageCall(key, header.stage, rest, shape, header.snapshot, header.sender)
