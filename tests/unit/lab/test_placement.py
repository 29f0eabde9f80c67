"""Which peers serve which stage, where links are unequal."""

from dataclasses import replace

import numpy as np
import pytest

from murmuration.algorithms.skippipe.pipeline import Links
from murmuration.algorithms.skippipe.route import Rules
from tests.lab.placement import StageCandidates, propose_placement


def candidates_of(
    latency_s: np.ndarray, stages: int, forward_s: np.ndarray | None = None
) -> StageCandidates:
    peers = len(latency_s)
    forward = np.ones((peers, stages)) if forward_s is None else forward_s
    return StageCandidates(
        links=Links(latency_s=latency_s, rate_bytes_per_s=np.full((peers, peers), 1e6)),
        message_bytes=0,
        exchange_s=np.zeros((peers, peers)),
        memory=(3,) * peers,
        forward_s=forward,
        backward_s=1.5 * forward,
        loss_s=0.25 * forward[:, 0],
    )


def far_from(slow: tuple[int, ...], peers: int) -> np.ndarray:
    """Ten seconds to the slow ones, a hundredth between all others."""
    far = np.isin(np.arange(peers), slow)
    return np.where(far[:, None] | far, 10.0, 0.01)


def test_peers_at_the_end_of_a_slow_line_do_not_serve_stage_0() -> None:
    """Every microbatch passes stage 0 four times, a stage that may be skipped not always."""
    candidates = candidates_of(far_from((0, 1), 6), 3)
    rules = Rules(stages=3, visited=2)
    stages = propose_placement(candidates, (2, 2, 2), rules, 3)
    assert sorted(peer for replicas in stages for peer in replicas) == list(range(6))
    assert stages[0] != (0, 1)
    assert not {0, 1} & set(stages[0])


@pytest.mark.parametrize("exchange", [0.0, 100.0])
def test_replicas_meet_where_their_exchange_is_what_counts(exchange: float) -> None:
    """Two sites: lanes stay inside one, unless it is the exchange inside a stage that is slow."""
    site = np.arange(4) % 2
    latency_s = np.where(site[:, None] == site, 0.01, 10.0)
    candidates = replace(candidates_of(latency_s, 2), exchange_s=exchange * latency_s)
    stages = propose_placement(candidates, (2, 2), Rules(stages=2, visited=2), 3)
    sites = [len({peer % 2 for peer in replicas}) for replicas in stages]
    assert sites == ([1, 1] if exchange else [2, 2])
