"""Links as they are written, and NoLoCo's latency model in closed form."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.algorithms.link import Link, MessageTime, pair_s, parse_link, tree_s


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("20mbit", Link(rate_mbps=20)),
        ("1gbit", Link(rate_mbps=1000)),
        ("512kbit", Link(rate_mbps=0.512)),
        ("1.5 Mbit", Link(rate_mbps=1.5)),
        ("20mbit,delay=50ms", Link(rate_mbps=20, delay_s=0.05)),
        ("\n    20mbit,\tdelay=50ms", Link(rate_mbps=20, delay_s=0.05)),
        (
            "20mbit, loss=0.1, jitter=500us, delay=0.05s",
            Link(rate_mbps=20, delay_s=0.05, jitter_s=0.0005, loss=0.1),
        ),
    ],
)
def test_what_it_understands(text: str, link: Link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no number with one of kbit, mbit, gbit"),
        ("20", "'20' is no number with one of"),
        ("20mb", "'20mb' is no number with one of"),
        ("-5mbit", "'-5mbit' is no number"),
        ("0mbit", "a link of 0 Mbit/s; it must be above 0"),
        ("20mbit,delay=50", "'50' is no number with one of us, ms, s"),
        ("20mbit,delay", "'delay' is not understood"),
        ("20mbit,speed=3ms", "'speed=3ms' is not understood"),
        ("20mbit,delay=1ms,delay=2ms", "'delay=2ms' is not understood"),
        ("20mbit,loss=much", "'much' is no number"),
        ("20mbit,loss=-1", "at least 0"),
        ("20mbit,jitter=5ms", "jitter of 0.005 s must be between 0 and its delay, 0 s"),
        ("w0=20mbit", "'w0=20mbit' is no number"),
    ],
)
def test_what_it_refuses(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="link") as refusal:
        parse_link(text)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@given(
    rate=st.integers(1, 10_000),
    delay_ms=st.integers(0, 500),
    part=st.integers(0, 4),
    loss=st.integers(0, 50),
)
def test_what_it_prints_it_reads(rate: int, delay_ms: int, part: int, loss: int) -> None:
    jitter_s = delay_ms * part / 4e3
    link = Link(rate_mbps=rate, delay_s=delay_ms / 1e3, jitter_s=jitter_s, loss=loss / 10)
    again = parse_link(str(link))
    assert again.rate_mbps == link.rate_mbps
    assert again.delay_s == pytest.approx(link.delay_s)
    assert again.jitter_s == pytest.approx(link.jitter_s)
    assert again.loss == link.loss


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
