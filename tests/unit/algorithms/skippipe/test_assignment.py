"""Which peer serves which stage: at the beginning, when it joins, and when it moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.skippipe.assignment import (
    StageCandidates,
    best_mover,
    propose_placement,
    stage_to_join,
    stage_to_move_to,
)
from algorithms.skippipe.pipeline import Links
from algorithms.skippipe.placement import PlacementScore, place
from algorithms.skippipe.route import Rules
from algorithms.skippipe.routing import origins_in_turns, predict


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


def test_a_turn_of_the_circle_is_never_worse_than_the_searched_placement() -> None:
    latency_s = np.random.default_rng(0).uniform(0.01, 5.0, (6, 6))
    candidates, rules, sizes = candidates_of(latency_s, 3), Rules(stages=3, visited=2), (2, 2, 2)
    turned = propose_placement(candidates, sizes, rules, 3)
    searched = place(sizes, candidates.links.edge_s(0), candidates.exchange_s).stages
    times_s = []
    for stages in (turned, searched):
        pipeline = candidates.pipeline(stages)
        told = predict(pipeline, rules, origins_in_turns(pipeline, 3), "skip", effort_s=0.05)
        times_s.append(told.iteration_s)
    assert times_s[0] < times_s[1]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 100))
@settings(max_examples=4)
def test_stages_get_the_replicas_that_they_are_to_have(sizes: list[int], seed: int) -> None:
    peers, stages = sum(sizes), len(sizes)
    latency_s = np.random.default_rng(seed).uniform(0.01, 1.0, (peers, peers))
    found = propose_placement(
        candidates_of(latency_s, stages), sizes, Rules(stages=stages, visited=stages), 2, seed=seed
    )
    assert list(map(len, found)) == sizes
    assert sorted(peer for replicas in found for peer in replicas) == list(range(peers))


def test_a_peer_costs_what_its_stage_costs_it() -> None:
    forward_s = np.array([[1.0, 5.0], [2.0, 7.0]])
    candidates = candidates_of(np.zeros((2, 2)), 2, forward_s)
    assert candidates.pipeline(((0,), (1,))).costs.forward_s.tolist() == [1.0, 7.0]
    assert candidates.pipeline(((1,), (0,))).costs.backward_s.tolist() == [7.5, 3.0]


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="do not share out 4 peers"):
        propose_placement(candidates_of(np.ones((4, 4)), 2), (2, 3), Rules(stages=2, visited=2), 1)


def test_a_new_peer_joins_the_slowest_stage_the_first_of_equals() -> None:
    assert stage_to_join([3.0, 1.0, 1.0]) == 1


@pytest.mark.parametrize(
    ("stages", "to", "reason"),
    [
        ([{1: 1.0, 2: 1.0, 3: 1.0}, {4: 1.0}], 1, "stage 1 is the slowest, at 1"),
        ([{1: 1.0}, {4: 0.1}], None, "the last replica of stage 0"),
        ([{1: 1.0, 2: 1.0}, {4: 3.0}], None, "stage 0 is the slowest"),
        ([{1: 1.0, 2: 1.0}, {4: 1.0}], None, "by less than a factor of 1.2"),
    ],
)
def test_a_peer_moves_for_a_real_gain_and_never_orphans_a_stage(
    stages: list[dict[int, float]], to: int | None, reason: str
) -> None:
    move = stage_to_move_to(1, stages)
    assert move.stage == to
    assert reason in move.reason


def edges(peers: int, near: list[tuple[int, int]]) -> np.ndarray:
    """1 s between any two, 0.1 s between those that are near."""
    edge_s = np.ones((peers, peers)) - np.eye(peers)
    for one, other in near:
        edge_s[one, other] = edge_s[other, one] = 0.1
    return edge_s


def test_a_bare_stage_gets_the_peer_that_is_near_its_neighbours() -> None:
    """Stage 1 is orphaned. Peer 0 serves stage 0, peers 1 and 2 serve 2, peer 3 serves 3."""
    stages = ((0,), (), (1, 2), (3,))
    for near, expected in (([(0, 1), (2, 3)], 1), ([(0, 2), (1, 3)], 2)):
        edge_s = edges(4, near)
        score = PlacementScore(edge_s, np.zeros_like(edge_s))
        assert best_mover([1, 2], 1, stages, score) == expected
        assert best_mover([2, 1], 1, stages, score) == expected


def test_a_stage_that_has_replicas_gets_the_peer_that_is_near_to_them() -> None:
    stages = ((0,), (4,), (1, 2, 3))
    exchange_s = edges(5, [(2, 4)])
    score = PlacementScore(np.zeros_like(exchange_s), exchange_s)
    assert best_mover([3, 2, 1], 1, stages, score) == 2


def test_of_equals_the_first_moves() -> None:
    score = PlacementScore(edges(4, []), edges(4, []))
    assert best_mover([3, 2, 1], 1, ((0,), (), (1, 2, 3)), score) == 3


def test_where_the_slowest_links_tell_nothing_the_means_do() -> None:
    """Peer 5 is far from everyone, so that no maximum falls when one near to peer 0 comes too."""
    stages = ((0, 1), (5,), (2, 3, 4), (6,))
    edge_s = edges(7, [(0, 3)])
    score = PlacementScore(edge_s, np.zeros_like(edge_s))
    moves = [((0, 1), (5, peer), tuple({2, 3, 4} - {peer}), (6,)) for peer in (2, 3, 4)]
    assert len({score.of(groups)[0] for groups in moves}) == 1
    assert best_mover([4, 2, 3], 1, stages, score) == 3
