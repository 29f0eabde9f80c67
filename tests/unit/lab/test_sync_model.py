"""The latency model of NoLoCo's paper: closed forms, and what simulated rounds take beside it."""

import numpy as np
import pytest

from murmuration.algorithms.link import Link, MessageTime
from murmuration.worker.simulation import Scenario, simulate
from tests.lab.sync_model import pair_s, predictions, tree_s


@pytest.mark.parametrize("peers", [2, 5, 8])
def test_without_spread_a_tree_takes_twice_its_levels(peers: int) -> None:
    times_s = tree_s(MessageTime(3.0), peers, 3, np.random.default_rng(5))
    assert times_s.tolist() == pytest.approx([2 * (peers - 1).bit_length() * 3.0] * 3)


@pytest.mark.parametrize("spread", [0.5, 2.5])
def test_for_two_a_tree_takes_what_a_pair_does(spread: float) -> None:
    message = MessageTime(0.1, spread)
    times_s = tree_s(message, 2, 1_000_000, np.random.default_rng(5))
    assert times_s.mean() == pytest.approx(pair_s(message), rel=0.01)


def test_short_messages_take_about_what_the_model_says() -> None:
    link = Link(rate_mbps=1000.0, delay_s=0.01)
    scenario = Scenario(peers=64, rounds=10, params=1, link=link, latency_spread=1.0)
    found, (pair, tree) = simulate(scenario), predictions(scenario)
    assert pair is not None
    assert tree is not None
    assert found.sync_mean_s is not None
    assert pair == pytest.approx(pair_s(MessageTime(0.01, 1.0)), rel=1e-4)
    assert found.sync_mean_s == pytest.approx(pair, rel=0.5)
    assert tree > 4 * found.sync_mean_s
