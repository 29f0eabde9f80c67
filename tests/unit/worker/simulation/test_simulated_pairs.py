"""Rounds in pairs in the simulator: times in closed form, and what faults cost."""

import pytest

from murmuration.worker.simulation import Scenario, simulate


def calm(**changes: object) -> Scenario:
    """20 Mbit/s, 50 ms: the 4 MB of a pseudo-gradient take 1.6 s."""
    return Scenario(**{"rounds": 6} | changes)


def idle(rounds: int = 6) -> float:
    """The share of the time that a calm run stands still: 1.7 s for each exchange, and for each but
    the first as long for the anchors of its group; over that and 5 s of inner steps."""
    still_s = rounds * 1.7 + (rounds - 1) * 1.7
    return still_s / (still_s + 5 * rounds)


@pytest.mark.parametrize("peers", [2, 8])
def test_a_sync_takes_the_payload_and_two_delays_however_many_peers_there_are(peers: int) -> None:
    found = simulate(calm(peers=peers))
    assert found.sync_median_s == pytest.approx(1.7)
    assert found.sync_p99_s == pytest.approx(1.7)
    # A single pair has one anchor, and waits for none.
    expected = 1.7 / 6.7 if peers == 2 else idle()
    assert found.idle_share == pytest.approx(expected, rel=0.01)
    # The anchor goes ahead while the peers compute; it counts all the same.
    assert found.bytes_per_round == 8_000_000
    assert (found.rounds, found.rounds_failed, found.unfinished) == (6 * peers, 0, 0)


def test_a_partner_that_has_not_begun_yet_hears_that_the_round_is_given_up() -> None:
    found = simulate(calm(peers=2, rounds=1, slow_factor=5.0, slow_share=0.5))
    assert found.reasons == {
        "a peer has not come to the round in time": 1,
        "a peer declines: given up there: a peer has not come to the round in time": 1,
    }
    # One has waited for its patience of 5 s and what a round would take, the other not at all.
    assert found.idle_share == pytest.approx(8.2 / (5 + 25 + 8.2))
