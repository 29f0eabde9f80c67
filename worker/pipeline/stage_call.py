"""A microbatch's call at a stage: its key, its route, the reply, and all of it on the wire."""

from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from murmuration.algorithms.codecs import Codec
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.wire import Payload, WireError


class PeerProcess(NamedTuple):
    """One process of a peer; `start_ms` is its `Member`'s. A peer that starts again under the same
    name has nothing of what its earlier process had under way."""

    peer: str
    start_ms: int

    @classmethod
    def of(cls, member: Member) -> "PeerProcess":
        return cls(member.peer, member.start_ms)


class StageCallKey(NamedTuple):
    """One microbatch of an iteration; a repeated call has the same key."""

    iteration: int
    origin: PeerProcess
    microbatch: int

    def plain(self) -> dict[str, object]:
        """As events name it."""
        origin = {"origin": self.origin.peer, "start_ms": self.origin.start_ms}
        return {"iteration": self.iteration, "microbatch": self.microbatch, **origin}

    @property
    def number(self) -> int:
        """A number of the microbatch among all origins': its gradient is counted once by it."""
        name = f"{self.microbatch}/{self.origin.start_ms}/{self.origin.peer}"
        return xxhash.xxh3_64_intdigest(name.encode())


class Hop(NamedTuple):
    """A stage, and the peer that is to serve it."""

    stage: int
    peer: str


@dataclass(frozen=True)
class StageCall:
    """A microbatch at a stage."""

    key: StageCallKey
    stage: int
    rest: tuple[Hop, ...]  # the hops that follow, without the origin
    shape: tuple[int, ...]  # of the activations, (B, T, D)
    snapshot: int  # names the measurements that it has planned with
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
    """Tells whether calls may be sent to this peer."""
    return member.health is Health.ALIVE and member.phase in (Phase.READY, Phase.TRAINING)


def call_bytes(activation_bytes: int) -> int:
    """The bytes of a call at its peer: input, output, and the gradient that comes back."""
    return 3 * activation_bytes


def call_header(call: StageCall, run: int, codec: Codec, payload: Payload) -> bytes:
    return pb.StageCallUp(
        header=pb.StageCallHeader(
            run=run,
            iteration=call.key.iteration,
            origin=call.key.origin.peer,
            start_ms=call.key.origin.start_ms,
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
