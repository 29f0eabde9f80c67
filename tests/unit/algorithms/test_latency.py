"""The latency model: closed forms, and the paper's tables."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.latency import MessageTime, StepTime, blocking_ratio, pair_s, tree_s
from tests.bench.pair_latency import BLOCKING, PEERS, TOLERANCE, TREE_OVER_PAIR, blocking
from tests.bench.pair_latency import tree_over_pair as simulated

SPREADS = st.floats(0, 5)
MEANS = st.floats(1e-3, 1e3)


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


class TestMessages:
    @given(MEANS, SPREADS)
    def test_the_parameters_give_back_mean_and_spread(self, mean_s: float, spread: float) -> None:
        message = MessageTime(mean_s, spread)
        mean = math.exp(message.mu + message.s**2 / 2)
        assert mean == pytest.approx(mean_s)
        assert mean * math.sqrt(math.expm1(message.s**2)) == pytest.approx(mean_s * spread)

    @pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
    def test_drawn_times_have_that_mean_and_spread(self, spread: float) -> None:
        times_s = MessageTime(0.2, spread).draw((1_000_000,), rng())
        assert times_s.mean() == pytest.approx(0.2, rel=0.01)
        assert times_s.std() == pytest.approx(0.2 * spread, rel=0.03, abs=1e-9)

    @pytest.mark.parametrize("spread", [0.0, 1.0, 2.5])
    def test_the_later_of_two(self, spread: float) -> None:
        message = MessageTime(3.0, spread)
        later_s = message.draw((1_000_000, 2), rng()).max(axis=1).mean()
        assert message.later_of_two_s == pytest.approx(later_s, rel=0.01)

    @given(MEANS, SPREADS)
    def test_a_pair_costs_two_to_four_messages_and_more_with_more_spread(
        self, mean_s: float, spread: float
    ) -> None:
        cost = pair_s(MessageTime(mean_s, spread)) / mean_s
        assert 2 <= cost < 4
        assert cost <= pair_s(MessageTime(mean_s, spread + 0.1)) / mean_s

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"mean_s": 0.0}, r"^mean_s is 0\.0; it must be above 0$"),
            ({"mean_s": math.nan}, r"^mean_s is nan"),
            ({"spread": -1.0}, r"^spread is -1\.0; it must be at least 0$"),
            ({"spread": math.inf}, r"^spread is inf"),
        ],
    )
    def test_what_is_no_distribution_is_refused(
        self, settings: dict[str, float], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            MessageTime(**settings)


class TestTree:
    @given(st.integers(1, 300), MEANS)
    def test_without_spread_it_is_twice_the_levels(self, peers: int, mean_s: float) -> None:
        times_s = tree_s(MessageTime(mean_s), peers, 3, rng())
        levels = (peers - 1).bit_length()
        assert times_s.tolist() == pytest.approx([2 * levels * mean_s] * 3)

    @pytest.mark.parametrize("spread", [0.5, 1.0, 2.5])
    def test_for_two_it_costs_what_a_pair_does(self, spread: float) -> None:
        message = MessageTime(0.1, spread)
        assert tree_s(message, 2, 1_000_000, rng()).mean() == pytest.approx(
            pair_s(message), rel=0.01
        )

    @given(st.integers(2, 40), st.floats(0.1, 3), st.integers(0, 99))
    def test_one_seed_gives_one_result(self, peers: int, spread: float, seed: int) -> None:
        first, again = (
            tree_s(MessageTime(1.0, spread), peers, 4, np.random.default_rng(seed))
            for _ in range(2)
        )
        assert first.tolist() == again.tolist()

    @pytest.mark.parametrize("peers", PEERS)
    @pytest.mark.parametrize("spread", TREE_OVER_PAIR)
    def test_the_papers_ratios(self, spread: float, peers: int) -> None:
        paper = TREE_OVER_PAIR[spread][PEERS.index(peers)]
        assert simulated(spread, peers, runs=3000) == pytest.approx(paper, rel=TOLERANCE)


class TestBlocking:
    @pytest.mark.parametrize("inner_steps", [5, 10, 25])
    def test_the_papers_ratios(self, inner_steps: int) -> None:
        assert blocking(inner_steps) == pytest.approx(BLOCKING[inner_steps], rel=TOLERANCE)

    def test_steps_that_all_take_the_same_cost_nothing(self) -> None:
        assert blocking_ratio(StepTime(variance=0.0), 64, 5, 20, rng()) == pytest.approx(1)

    def test_two_peers_wait_for_each_other_either_way(self) -> None:
        assert blocking_ratio(StepTime(), 2, 5, 50, rng()) == pytest.approx(1)

    def test_one_peer_of_three_waits_for_nobody(self) -> None:
        assert blocking_ratio(StepTime(), 3, 5, 50, rng()) > 1

    @given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
    def test_pairs_never_take_longer(
        self, peers: int, inner_steps: int, rounds: int, seed: int
    ) -> None:
        ratio = blocking_ratio(StepTime(), peers, inner_steps, rounds, np.random.default_rng(seed))
        assert ratio >= 1 - 1e-12
