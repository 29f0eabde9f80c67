"""The simulated figures are those that were derived; what waiting costs, in closed form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.pair_latency import (
    BLOCKING,
    PEERS,
    TOLERANCE,
    TREE_OVER_PAIR,
    StepTime,
    blocking,
    blocking_ratio,
)
from tests.lab.pair_latency import tree_over_pair as simulated


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("peers", PEERS)
@pytest.mark.parametrize("spread", TREE_OVER_PAIR)
def test_a_tree_over_a_pair(spread: float, peers: int) -> None:
    derived = TREE_OVER_PAIR[spread][PEERS.index(peers)]
    assert simulated(spread, peers, runs=3000) == pytest.approx(derived, rel=TOLERANCE)


@pytest.mark.parametrize("inner_steps", [5, 10, 25])
def test_blocking_over_pairs(inner_steps: int) -> None:
    assert blocking(inner_steps) == pytest.approx(BLOCKING[inner_steps], rel=TOLERANCE)


def test_steps_that_all_take_the_same_cost_nothing() -> None:
    assert blocking_ratio(StepTime(variance=0.0), 64, 5, 20, rng()) == pytest.approx(1)


def test_two_peers_wait_for_each_other_either_way() -> None:
    assert blocking_ratio(StepTime(), 2, 5, 50, rng()) == pytest.approx(1)


def test_one_peer_of_three_waits_for_nobody() -> None:
    assert blocking_ratio(StepTime(), 3, 5, 50, rng()) > 1


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_pairs_never_take_longer(peers: int, inner_steps: int, rounds: int, seed: int) -> None:
    ratio = blocking_ratio(StepTime(), peers, inner_steps, rounds, np.random.default_rng(seed))
    assert ratio >= 1 - 1e-12
