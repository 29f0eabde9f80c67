"""Rounds of the leaderless mean in the simulator."""

import pytest

from murmuration.algorithms.link import Link
from murmuration.worker.simulation import Scenario, simulate


def mean(**changes: object) -> Scenario:
    return Scenario(**{"preset": "diloco", "rounds": 5} | changes)


@pytest.mark.parametrize("peers", [2, 5, 16])
def test_a_sync_takes_what_all_shards_take_on_the_link_and_two_delays(peers: int) -> None:
    found = simulate(mean(peers=peers))
    payload_s = 2 * (peers - 1) / peers * 1.6
    assert found.sync_median_s == pytest.approx(payload_s + 0.1, rel=1e-3)
    assert found.bytes_per_round == pytest.approx(2 * (peers - 1) / peers * 4e6, rel=1e-3)
    assert found.spread == 0
    assert (found.rounds, found.rounds_failed) == (5 * peers, 0)


def test_all_wait_for_a_straggler_until_the_grace_is_over() -> None:
    found = simulate(mean(peers=4, slow_factor=5.0, slow_share=0.25))
    assert found.sync_median_s is not None
    assert found.sync_median_s > 20
    assert found.idle_share > 0.5


def test_crashes_freezes_and_broken_streams_leave_one_anchor() -> None:
    link = Link(rate_mbps=20.0, delay_s=0.05, loss=1.0)
    found = simulate(
        mean(peers=12, link=link, crash_share=0.1, freeze_share=0.1, freeze_s=30.0, seed=3)
    )
    assert found.spread == 0
    assert found.unfinished == 0


def test_after_a_partition_all_have_one_anchor_again() -> None:
    found = simulate(mean(peers=8, rounds=10, partition=(10.0, 50.0)))
    assert found.spread == 0
    assert found.unfinished == 0


def test_what_replicas_keep_brings_them_as_far_as_exact_rounds() -> None:
    exact = simulate(mean(peers=8, rounds=40))
    for codec in ("sign", "ternary"):
        kept = simulate(mean(peers=8, rounds=40, codec=codec, merge="keep"))
        assert kept.spread == 0
        assert kept.distance < 2 * exact.distance < 0.2


def test_keeping_is_for_means_over_all() -> None:
    with pytest.raises(ValueError, match=r"merge = \"keep\" is for means over all"):
        Scenario(merge="keep")
