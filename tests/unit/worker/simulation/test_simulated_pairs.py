"""Rounds in pairs in the simulator: times in closed form, and what faults cost."""

import pytest

from murmuration.algorithms.link import Link
from murmuration.worker.simulation import Scenario, simulate


def calm(**changes: object) -> Scenario:
    """20 Mbit/s, 50 ms: the 4 MB of a pseudo-gradient take 1.6 s."""
    return Scenario(**{"rounds": 6} | changes)


def idle(rounds: int = 6) -> float:
    """The share of the time that a calm run stands still: 1.7 s for each exchange, and for each but
    the first as long for the anchors of its group; over that and 5 s of inner steps."""
    still_s = rounds * 1.7 + (rounds - 1) * 1.7
    return still_s / (still_s + 5 * rounds)


@pytest.mark.parametrize("peers", [2, 8, 32])
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


def test_of_an_odd_count_one_sits_out_and_waits_for_nobody() -> None:
    found = simulate(calm(peers=5, rounds=5))
    assert (found.rounds, found.rounds_failed) == (25, 0)
    assert found.bytes_per_round == pytest.approx(8_000_000 * 4 / 5)


@pytest.mark.parametrize("peers", [3, 5, 9])
def test_who_sits_out_loses_no_round_where_exchanges_take_longer_than_patience(peers: int) -> None:
    # 9.6 s for the anchor and as long for the pseudo-gradient.
    found = simulate(calm(peers=peers, params=6_000_000, rounds=12))
    assert found.rounds_failed == 0
    assert found.sync_median_s == pytest.approx(9.7)


def test_groups_of_four_send_to_three_partners() -> None:
    found = simulate(calm(peers=16, group_size=4, link=Link(rate_mbps=100.0)))
    assert found.rounds_failed == 0
    assert found.bytes_per_round == 3 * 8_000_000
    assert found.sync_median_s == pytest.approx(3 * 4e6 * 8 / 100e6)


def test_four_bits_make_the_sync_shorter() -> None:
    found = simulate(calm(peers=4, codec="e3m0"))
    assert found.sync_median_s == pytest.approx(1.7 - 1.6 * (1 - 4.125 / 32), rel=0.02)


def test_an_anchor_that_has_had_no_time_to_go_ahead_is_waited_for() -> None:
    found = simulate(calm(peers=2, rounds=3, inner_steps=5))
    assert found.sync_median_s is not None
    assert found.sync_median_s > 2.5


def test_a_partner_is_waited_for_as_long_as_its_anchor_keeps_arriving() -> None:
    # 19.2 s of anchor, of which 5 s go ahead; what is left is longer than the patience.
    found = simulate(calm(peers=2, params=12_000_000, rounds=3))
    assert found.rounds_failed == 0
    assert found.sync_median_s == pytest.approx(2 * 19.2 - 5, abs=0.5)


def test_a_partner_that_has_not_begun_yet_hears_that_the_round_is_given_up() -> None:
    found = simulate(calm(peers=2, rounds=1, slow_factor=5.0, slow_share=0.5))
    assert found.reasons == {
        "a peer has not come to the round in time": 1,
        "a peer declines: given up there: a peer has not come to the round in time": 1,
    }
    # One has waited for its patience of 5 s and what a round would take, the other not at all.
    assert found.idle_share == pytest.approx(8.2 / (5 + 25 + 8.2))


def test_a_partition_splits_pairs_and_the_halves_come_together_again() -> None:
    whole = simulate(calm(peers=16, rounds=20))
    split = simulate(calm(peers=16, rounds=20, partition=(20.0, 60.0)))
    assert split.rounds_failed > 0
    assert split.unfinished == 0
    assert split.spread < 2 * whole.spread
