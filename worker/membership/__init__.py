"""Who is in the swarm, and who of them is alive: gossip, probes and suspicion, without I/O."""

from worker.membership.dissemination import Dissemination, GossipMessage, Progress, with_progress
from worker.membership.member import MAX_UNREACHABLE, Digest, Health, Member, Phase, newest
from worker.membership.swim import (
    Action,
    AskProbe,
    Event,
    Heard,
    Leaving,
    Measured,
    Membership,
    MembershipConfig,
    Probe,
    Probed,
    ProbedFor,
    Suspected,
    Tick,
    Updated,
    ViewChanged,
)

__all__ = [
    "MAX_UNREACHABLE",
    "Action",
    "AskProbe",
    "Digest",
    "Dissemination",
    "Event",
    "GossipMessage",
    "Health",
    "Heard",
    "Leaving",
    "Measured",
    "Member",
    "Membership",
    "MembershipConfig",
    "Phase",
    "Probe",
    "Probed",
    "ProbedFor",
    "Progress",
    "Suspected",
    "Tick",
    "Updated",
    "ViewChanged",
    "newest",
    "with_progress",
]
