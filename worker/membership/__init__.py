"""Who is in the swarm, and who of them is alive: gossip, probes and suspicion, without I/O."""

from worker.membership.dissemination import (
    Dissemination,
    GossipMessage,
    MemberProgress,
    with_progress,
)
from worker.membership.member import MAX_UNREACHABLE, Digest, Health, Member, Phase, newest
from worker.membership.swim import (
    Action,
    Event,
    Gossiped,
    IndirectlyProbed,
    IndirectProbe,
    Leaving,
    Measured,
    Membership,
    MembershipConfig,
    Probe,
    Probed,
    ProbeTick,
    Suspected,
    Updated,
    ViewChanged,
)

__all__ = [
    "MAX_UNREACHABLE",
    "Action",
    "Digest",
    "Dissemination",
    "Event",
    "GossipMessage",
    "Gossiped",
    "Health",
    "IndirectProbe",
    "IndirectlyProbed",
    "Leaving",
    "Measured",
    "Member",
    "MemberProgress",
    "Membership",
    "MembershipConfig",
    "Phase",
    "Probe",
    "ProbeTick",
    "Probed",
    "Suspected",
    "Updated",
    "ViewChanged",
    "newest",
    "with_progress",
]
