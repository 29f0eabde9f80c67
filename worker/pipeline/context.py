"""What all that serves a stage on the I/O thread shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from algorithms.codecs import Codec
from worker.membership import Health, Member, Phase
from worker.pipeline.config import StagesConfig
from worker.pipeline.stage_call import Incarnation
from worker.transport import Transport


@dataclass
class StageCounts:
    """Since the start of this process, on whichever stages it has served."""

    visits: int = 0  # done here to the end, the origin's own included
    repeated: int = 0  # asked again after a peer before this one was lost
    rerouted: int = 0  # sent on to another replica than planned
    skipped: int = 0  # sent on past a stage without a replica
    dropped: int = 0  # microbatches lost: begun here, or had straight from an origin that is gone
    lost: int = 0  # visits that came back here, and died with the replica that had counted them
    other_schedules: int = 0  # origins of visits planned with other measurements, by iteration
    discarded: int = 0  # iterations whose visits could not be vouched for


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Args:
    me, run, stage: this peer, the run's id, the stage served here.
    config: how the model is cut and routed; codec: of activations.
    transport: to the others; cards: all peers of the swarm, as known now.
    doubt: has membership look after a peer.
    clock: monotonic seconds.
    log: takes events as plain values.
    """

    me: str
    run: int
    seed: int
    stage: int
    config: StagesConfig
    codec: Codec
    transport: Transport
    members: Callable[[], Sequence[Member]]
    doubt: Callable[[str], None]
    clock: Callable[[], float]
    log: Callable[[dict[str, object]], None]
    counts: StageCounts = field(default_factory=StageCounts)

    def member(self, peer: str) -> Member | None:
        return next((member for member in self.members() if member.peer == peer), None)

    @property
    def life(self) -> Incarnation:
        """This peer's, as the others know it."""
        member = self.member(self.me)
        assert member is not None, "a peer knows itself"
        return Incarnation.of(member)

    def replicas(self, stage: int) -> list[str]:
        """Who serves a stage now, sorted."""
        return sorted(
            member.peer for member in self.members() if member.stage == stage and serves(member)
        )


def serves(member: Member) -> bool:
    """Whether visits may be sent to this peer."""
    return member.health is Health.ALIVE and member.phase in (Phase.READY, Phase.TRAINING)
