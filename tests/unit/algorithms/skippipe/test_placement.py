"""Placement: every peer on one stage, near ones together, the same each time."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.skippipe.placement import bottleneck, place, short_tour, stage_sizes

COSTS = st.integers(1, 4).flatmap(
    lambda columns: st.lists(
        st.lists(st.integers(0, 9), min_size=columns, max_size=columns), min_size=1, max_size=4
    )
)


@given(COSTS)
def test_the_bottleneck_is_that_of_the_best_matching(costs: list[list[int]]) -> None:
    rows = costs if len(costs) <= len(costs[0]) else [list(each) for each in zip(*costs)]  # noqa: B905
    best = min(
        max(row[column] for row, column in zip(rows, columns, strict=True))
        for columns in permutations(range(len(rows[0])), len(rows))
    )
    assert bottleneck(costs) == best


@given(st.integers(1, 12), st.lists(st.floats(0.1, 9.0), min_size=1, max_size=6))
def test_sizes_follow_the_load(more: int, loads_s: list[float]) -> None:
    sizes = stage_sizes(len(loads_s) + more, loads_s)
    assert sum(sizes) == len(loads_s) + more
    assert min(sizes) >= 1
    busiest_s = max(load / size for load, size in zip(loads_s, sizes, strict=True))
    for load, size in zip(loads_s, sizes, strict=True):  # nobody could give up a replica
        assert size == 1 or load / (size - 1) >= busiest_s - 1e-9


def test_fewer_peers_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="2 peers cannot serve 3 stages"):
        stage_sizes(2, [1.0, 1.0, 1.0])


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_a_tour_visits_each_stage_and_two_opt_finds_no_better(seed: int, stages: int) -> None:
    draws = np.random.default_rng(seed).uniform(0, 1, (stages, stages))
    steps = (draws + draws.T).tolist()
    tour = short_tour(steps)
    assert tour[0] == 0
    assert sorted(tour) == list(range(stages))

    def length(order: list[int]) -> float:
        return sum(steps[a][b] for a, b in zip(order, [*order[1:], 0], strict=True))

    for first in range(1, stages):
        for last in range(first + 1, stages):
            other = tour[:first] + tour[first : last + 1][::-1] + tour[last + 1 :]
            assert length(tour) <= length(other) + 1e-9


def clusters(count: int, size: int) -> np.ndarray:
    """Peers in sites in a row: 0.1 s inside a site, 1 s to the next one, 2 s to the one after."""
    site = np.arange(count * size) % count
    return np.abs(site[:, None] - site[None, :]) + 0.1


def test_replicas_meet_where_their_exchange_is_what_counts() -> None:
    edge_s = clusters(3, 4)
    found = place([4, 4, 4], edge_s, 100 * edge_s, children=300)
    assert all(len({peer % 3 for peer in stage}) == 1 for stage in found.stages)


def test_stages_spread_over_sites_where_activations_are_what_counts() -> None:
    edge_s = clusters(4, 3)
    found = place([4, 4, 4], edge_s, 0.001 * edge_s, children=500)
    assert found.score_s < 1.0  # every lane stays inside its site: three steps of 0.1 s, twice


def test_a_placement_serves_every_stage_with_every_peer_once_and_is_repeatable() -> None:
    edge_s = np.random.default_rng(0).uniform(0.1, 1.0, (11, 11))
    sizes = [4, 3, 2, 2]
    found = place(sizes, edge_s, edge_s, seed=3, children=60)
    assert [len(stage) for stage in found.stages] == sizes
    assert sorted(peer for stage in found.stages for peer in stage) == list(range(11))
    assert found == place(sizes, edge_s, edge_s, seed=3, children=60)


def test_searching_on_only_improves() -> None:
    edge_s = np.random.default_rng(1).uniform(0.1, 1.0, (12, 12))
    scores_s = [place([3] * 4, edge_s, edge_s, children=n).score_s for n in (0, 50, 400)]
    assert scores_s[0] > scores_s[1] >= scores_s[2]


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="do not share out 4 peers"):
        place([2, 1], np.ones((4, 4)), np.ones((4, 4)))
