"""Who is in the swarm, and who of them is alive: gossip, probes and suspicion, without I/O."""

from worker.membership.dissemination import (
    Dissemination,
    GossipMessage,
    MemberProgress,
    with_progress,
)
from worker.membership.events import (
    Action,
    Event,
    Gossiped,
    IndirectlyProbed,
    IndirectProbe,
    Leaving,
    Measured,
    Probe,
    Probed,
    ProbeTick,
    Suspected,
    Updated,
    ViewChanged,
)
from worker.membership.member import (
    MAX_UNREACHABLE,
    Digest,
    Health,
    Member,
    MemberLimits,
    Phase,
    newest,
)
from worker.membership.swim import MAX_MEMBERS, Membership, MembershipConfig

__all__ = [
    "MAX_MEMBERS",
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
    "MemberLimits",
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
