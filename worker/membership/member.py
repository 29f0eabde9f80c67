"""What peers gossip about a peer, and which of two records of it is newer."""

from dataclasses import dataclass, replace
from enum import IntEnum

MAX_UNREACHABLE = 16  # peers that one member names


class Health(IntEnum):
    """Ordered: of two rumours with the same incarnation the higher wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Phase(IntEnum):
    """Where a peer is in its run."""

    STARTING = 0  # known, but has no model yet
    READY = 1  # waits for the swarm to be complete enough to start
    TRAINING = 2
    DONE = 3  # trained to the end; still answers


@dataclass(frozen=True)
class Digest:
    """The committed state of one fragment, in short.

    `contributors` is that of the latest round: of two states with the same version the one with
    more contributors wins, ties by hash. The next round that the peer contributes to is `version`.
    """

    version: int
    contributors: int
    hash: int

    @property
    def rank(self) -> tuple[int, int, int]:
        return (self.version, self.contributors, self.hash)


@dataclass(frozen=True)
class Member:
    """One peer as the others know it.

    `epoch` is the start of its process in ms; a restart has a later one. The peer itself raises
    `incarnation` to refute a suspicion, and `heartbeat` when phase or a later field changes.
    `step_s` is the duration of an inner step; 0 when unknown. `profile` holds its measurements for
    the stage that it serves, as they travel. `unreachable` are peers that it alone cannot reach.
    """

    peer: str
    address: str
    epoch: int
    incarnation: int = 0
    health: Health = Health.ALIVE
    phase: Phase = Phase.STARTING
    heartbeat: int = 0
    step: int = 0
    step_s: float = 0.0
    stage: int = 0
    profile: bytes = b""
    unreachable: tuple[str, ...] = ()
    digests: tuple[Digest, ...] = ()

    @property
    def live(self) -> bool:
        """Not known to be gone."""
        return self.health in (Health.ALIVE, Health.SUSPECT)


def newest(known: Member, heard: Member) -> Member:
    """Merges two records of one peer: health by incarnation, the rest by heartbeat.

    A later epoch replaces all. A peer that left stays gone for that epoch.
    """
    if known.epoch != heard.epoch:
        return max(known, heard, key=lambda member: member.epoch)
    fields = heard if heard.heartbeat > known.heartbeat else known
    if Health.LEFT in (known.health, heard.health):
        health = Health.LEFT
        incarnation = max(known.incarnation, heard.incarnation)
    else:
        incarnation, health = max(
            (known.incarnation, known.health), (heard.incarnation, heard.health)
        )
    return replace(fields, incarnation=incarnation, health=health)


def is_overtaken(rumour: Member, known: Member) -> bool:
    """Whether a rumour of death is older than the newest heartbeat known."""
    return (
        rumour.health is Health.DEAD
        and rumour.epoch == known.epoch
        and rumour.heartbeat < known.heartbeat
    )
