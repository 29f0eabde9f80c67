"""Rounds in small groups to begin with, for tests of the machine alone."""

from murmuration.worker.exchange.pairwise.round import (
    PairRound,
    PartnerCame,
    PartnerComplete,
    RoundTick,
    StageRound,
)
from murmuration.worker.exchange.view import RoundConfig, View
from tests.protocol.views import view

CONFIG = RoundConfig(patience_s=2.0, retry_s=0.25, slack_s=58.0)
PATIENCE, DEADLINE = 2.0, 60.0
LIMIT = DEADLINE + CONFIG.patience_s + CONFIG.retry_s  # for whoever has staged


def begin(
    me: str = "a",
    group: str = "ab",
    seen: View | None = None,
    round_: int = 0,
    lead_s: float = 0.0,
) -> PairRound:
    return PairRound(
        me,
        group,
        view(group) if seen is None else seen,
        CONFIG,
        key=(0, round_),
        began_at=0.0,
        payload_bytes=0,
        lead_s=lead_s,
    )


def met(me: str = "a", group: str = "ab") -> PairRound:
    """Everybody has come."""
    machine = begin(me, group)
    machine.step(RoundTick(), 0.0)
    for peer in group:
        if peer != me:
            machine.step(PartnerCame(peer), 0.1)
    return machine


def staged() -> PairRound:
    """Of a pair; the partner's word is missing."""
    machine = met()
    assert machine.step(PartnerComplete("b"), 1.0) == [StageRound()]
    return machine
