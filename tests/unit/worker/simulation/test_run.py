"""Simulated runs: the task, leaderless means, and rounds in pairs with what faults cost."""

import numpy as np
import pytest
import torch

from murmuration.algorithms.link import Link
from murmuration.worker.simulation import Scenario, distance_to_optimum, simulate, spread
from murmuration.worker.simulation.peer import VALUES, descended


def at_ends(steps: int) -> list[torch.Tensor]:
    """The values of 50 replicas after so many steps."""
    draws = (np.random.default_rng((3, peer)) for peer in range(50))
    return [descended(torch.zeros(VALUES), steps, each) for each in draws]


def test_replicas_come_near_the_optimum_and_each_has_noise_of_its_own():
    assert distance_to_optimum(at_ends(0)) == 1
    ends = at_ends(2000)
    assert distance_to_optimum(ends) < 0.05
    assert spread(ends) > 0.02


def mean(**changes: object) -> Scenario:
    return Scenario(**{"preset": "diloco", "rounds": 5} | changes)


@pytest.mark.parametrize("peers", [2, 5])
def test_a_sync_takes_what_all_shards_take_on_the_link_and_two_delays(peers):
    found = simulate(mean(peers=peers))
    assert found.sync_median_s == pytest.approx(2 * (peers - 1) / peers * 1.6 + 0.1, rel=1e-3)
    assert found.bytes_per_round == pytest.approx(2 * (peers - 1) / peers * 4e6, rel=1e-3)
    assert found.spread == 0
    assert (found.rounds, found.rounds_failed) == (5 * peers, 0)


def test_after_a_partition_all_have_one_anchor_again():
    found = simulate(mean(peers=4, rounds=6, partition=(10.0, 30.0)))
    assert found.spread == 0
    assert found.unfinished == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peers": 1}, "peers is 1; 2 to 10,000"),
        ({"peers": 10_001}, "2 to 10,000"),
        ({"preset": "diloco", "peers": 129}, "16,641 streams a round; at most 128"),
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"group_size": 1}, "group size 1"),
        ({"step_s": float("nan")}, "it must be above 0"),
        ({"step_spread": -1.0}, "step_spread is -1"),
        ({"crash_share": 1.0}, "crash_share is 1; it must be 0 to 1, below 1"),
        ({"slow_factor": 0.5}, "0.5 times slower"),
        ({"partition": (5.0, 5.0)}, "it must end after it began"),
        ({"codec": "fp5"}, "unknown codec 'fp5'"),
        ({"merge": "keep"}, r"merge = \"keep\" is for means over all"),
        ({"link": Link(rate_mbps=1.0), "latency_spread": 1.0}, "needs a link with a delay"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        Scenario(**changes)


def calm(**changes: object) -> Scenario:
    """20 Mbit/s, 50 ms: the 4 MB of a pseudo-gradient take 1.6 s."""
    return Scenario(**{"rounds": 6} | changes)


@pytest.mark.parametrize("peers", [2, 8])
def test_a_sync_takes_the_payload_and_two_delays_however_many_peers_there_are(peers):
    found = simulate(calm(peers=peers))
    assert found.sync_median_s == pytest.approx(1.7)
    assert found.sync_p99_s == pytest.approx(1.7)
    # It stands still for 1.7 s for each exchange, and for each but the first as long for anchors
    # of its group; over that and 5 s of steps. A single pair has one anchor and waits for none.
    still_s = 6 * 1.7 + (0 if peers == 2 else 5 * 1.7)
    assert found.idle_share == pytest.approx(still_s / (still_s + 5 * 6), rel=0.01)
    # The anchor goes ahead while the peers compute; it counts all the same.
    assert found.bytes_per_round == 8_000_000
    assert (found.rounds, found.rounds_failed, found.unfinished) == (6 * peers, 0, 0)


def test_a_partner_that_has_not_begun_yet_hears_that_the_round_is_given_up():
    found = simulate(calm(peers=2, rounds=1, slow_factor=5.0, slow_share=0.5))
    assert found.reasons == {
        "a peer has not come to the round in time": 1,
        "a peer declines: given up there: a peer has not come to the round in time": 1,
    }
    # One has waited for its patience of 5 s and what a round would take, the other not at all.
    assert found.idle_share == pytest.approx(8.2 / (5 + 25 + 8.2))
