"""Who is in the swarm, and who of them is alive: gossip, probes and suspicion, without I/O."""

from worker.membership.dissemination import Deltas, Progress, Said, with_progress
from worker.membership.member import MAX_APART, Card, Digest, Health, Phase, newest
from worker.membership.swim import (
    Action,
    AskProbe,
    Doubted,
    Event,
    Heard,
    Leaving,
    Measured,
    Membership,
    MembershipConfig,
    Probe,
    Probed,
    ProbedFor,
    Tick,
    Updated,
    ViewChanged,
)

__all__ = [
    "MAX_APART",
    "Action",
    "AskProbe",
    "Card",
    "Deltas",
    "Digest",
    "Doubted",
    "Event",
    "Health",
    "Heard",
    "Leaving",
    "Measured",
    "Membership",
    "MembershipConfig",
    "Phase",
    "Probe",
    "Probed",
    "ProbedFor",
    "Progress",
    "Said",
    "Tick",
    "Updated",
    "ViewChanged",
    "newest",
    "with_progress",
]
