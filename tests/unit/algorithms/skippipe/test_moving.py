"""Which stage a peer joins, when it moves, and which of several does."""

import numpy as np
import pytest

from algorithms.skippipe.placement import (
    PlacementScore,
    best_mover,
    stage_to_join,
    stage_to_move_to,
)


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


def links(peers: int, near: list[tuple[int, int]]) -> np.ndarray:
    """1 s between any two, 0.1 s between those that are near."""
    edge_s = np.ones((peers, peers)) - np.eye(peers)
    for one, other in near:
        edge_s[one, other] = edge_s[other, one] = 0.1
    return edge_s


def test_a_bare_stage_gets_the_peer_that_is_near_its_neighbours() -> None:
    """Stage 1 is bare between 0, where peer 0 is, and 2, which peers 1 and 2 share; 3 is peer 3."""
    stages = ((0,), (), (1, 2), (3,))
    for near, expected in (([(0, 1), (2, 3)], 1), ([(0, 2), (1, 3)], 2)):
        edge_s = links(4, near)
        score = PlacementScore(edge_s, np.zeros_like(edge_s))
        assert best_mover([1, 2], 1, stages, score) == expected
        assert best_mover([2, 1], 1, stages, score) == expected


def test_a_stage_that_has_replicas_gets_the_peer_that_is_near_to_them() -> None:
    stages = ((0,), (4,), (1, 2, 3))
    exchange_s = links(5, [(2, 4)])
    score = PlacementScore(np.zeros_like(exchange_s), exchange_s)
    assert best_mover([3, 2, 1], 1, stages, score) == 2


def test_of_equals_the_first_moves() -> None:
    score = PlacementScore(links(4, []), links(4, []))
    assert best_mover([3, 2, 1], 1, ((0,), (), (1, 2, 3)), score) == 3


def test_where_the_slowest_links_tell_nothing_the_means_do() -> None:
    """Peer 5 is far from everyone, so that no maximum falls when one near to peer 0 comes too."""
    stages = ((0, 1), (5,), (2, 3, 4), (6,))
    edge_s = links(7, [(0, 3)])
    score = PlacementScore(edge_s, np.zeros_like(edge_s))
    moves = [((0, 1), (5, peer), tuple({2, 3, 4} - {peer}), (6,)) for peer in (2, 3, 4)]
    assert len({score.of(groups)[0] for groups in moves}) == 1
    assert best_mover([4, 2, 3], 1, stages, score) == 3
