"""How far a peer may be ahead, by what has arrived."""

from worker.exchange.pairwise.round import ArrivalSkew
from worker.exchange.types import RoundConfig

CONFIG = RoundConfig(floor_mbps=8.0)


def test_before_anything_has_come_the_slowest_link_is_assumed() -> None:
    assert ArrivalSkew(CONFIG).lead_s(3_000_000) == 3.0


def test_a_round_takes_as_long_as_values_have_taken_last() -> None:
    lead = ArrivalSkew(CONFIG)
    lead.came(1_000_000, 0.5)
    assert lead.lead_s(3_000_000) == 1.5
    lead.came(0, 9.0)
    assert lead.lead_s(3_000_000) == 1.5


def test_what_was_slow_is_forgotten_by_halves() -> None:
    lead = ArrivalSkew(CONFIG)
    for took_s in (8.0, 1.0, 1.0, 1.0, 1.0):
        lead.came(1_000_000, took_s)
    assert lead.lead_s(1_000_000) == 1.0
    lead.came(1_000_000, 16.0)
    lead.came(1_000_000, 1.0)
    assert lead.lead_s(1_000_000) == 8.0
