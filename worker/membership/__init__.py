"""Who is in the swarm, and who of them is alive: gossip, probes and suspicion, without I/O."""

from murmuration.worker.membership.dissemination import (
    Dissemination,
    GossipMessage,
    MemberProgress,
    with_progress,
)
from murmuration.worker.membership.member import (
    MAX_UNREACHABLE,
    Digest,
    Health,
    Member,
    MemberLimits,
    Phase,
    Signed,
    newest,
)
from murmuration.worker.membership.swim import (
    MAX_MEMBERS,
    Action,
    IndirectProbe,
    Membership,
    MembershipConfig,
    Probe,
)

__all__ = [
    "MAX_MEMBERS",
    "MAX_UNREACHABLE",
    "Action",
    "Digest",
    "Dissemination",
    "GossipMessage",
    "Health",
    "IndirectProbe",
    "Member",
    "MemberLimits",
    "MemberProgress",
    "Membership",
    "MembershipConfig",
    "Phase",
    "Probe",
    "Signed",
    "newest",
    "with_progress",
]
