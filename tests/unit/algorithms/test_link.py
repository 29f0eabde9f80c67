"""Links as they are written, and NoLoCo's latency model in closed form."""

import math
from dataclasses import asdict

import pytest
from hypothesis import given, strategies as st

from murmuration.algorithms.link import Link, lognormal, parse_link


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("20mbit", Link(rate_mbps=20)),
        ("1gbit", Link(rate_mbps=1000)),
        ("512kbit", Link(rate_mbps=0.512)),
        ("1.5 Mbit", Link(rate_mbps=1.5)),
        ("20mbit,delay=50ms", Link(rate_mbps=20, delay_s=0.05)),
        ("\n    20mbit,\tdelay=50ms", Link(rate_mbps=20, delay_s=0.05)),
        ("20mbit, loss=0.1, jitter=500us, delay=0.05s",
         Link(rate_mbps=20, delay_s=0.05, jitter_s=0.0005, loss=0.1)),
    ],
)  # fmt: skip
def test_what_it_understands(text, link):
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
def test_what_it_refuses(text, said):
    with pytest.raises(ValueError, match="link") as refusal:
        parse_link(text)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@given(st.integers(1, 10_000), st.integers(0, 500), st.integers(0, 4), st.integers(0, 50))
def test_what_it_prints_it_reads(rate, delay_ms, part, loss):
    jitter_s = delay_ms * part / 4e3
    link = Link(rate_mbps=rate, delay_s=delay_ms / 1e3, jitter_s=jitter_s, loss=loss / 10)
    assert asdict(parse_link(str(link))) == pytest.approx(asdict(link), rel=1e-9)


@given(st.floats(1e-3, 1e3), st.floats(0, 5))
def test_the_parameters_give_back_mean_and_spread(mean_s, spread):
    mu, s = lognormal(mean_s, spread)
    mean = math.exp(mu + s**2 / 2)
    assert mean == pytest.approx(mean_s)
    assert mean * math.sqrt(math.expm1(s**2)) == pytest.approx(mean_s * spread)
