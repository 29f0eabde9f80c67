"""The time of what comes from one peer counts once, and only while something comes."""

import pytest

from murmuration.worker.exchange.measured import Arrivals
from tests.support.fake_clock import FakeClock


def test_payloads_at_a_time_share_their_seconds() -> None:
    clock = FakeClock()
    arrivals = Arrivals(clock)
    with arrivals.payload() as first, arrivals.payload() as second:
        first.begins("a")
        clock.now_s = 1.0
        second.begins("a")
        first.came(100)
        clock.now_s = 3.0
        second.came(50)
        first.came(50)
    assert arrivals.taken() == {"a": (200, pytest.approx(3.0))}
    assert arrivals.taken() == {}


def test_time_between_payloads_and_before_their_announcement_does_not_count() -> None:
    clock = FakeClock()
    arrivals = Arrivals(clock)
    for began_s in (10.0, 20.0):
        with arrivals.payload() as payload:
            clock.now_s = began_s
            payload.begins("a")
            payload.begins("a")  # its second header says nothing new
            clock.now_s = began_s + 2.0
            payload.came(1000)
            clock.now_s = began_s + 5.0  # nothing came of it any more
    assert arrivals.taken() == {"a": (2000, pytest.approx(4.0))}


def test_what_may_have_lain_here_is_not_measured_and_others_are_told_apart() -> None:
    clock = FakeClock()
    arrivals = Arrivals(clock)
    with arrivals.payload() as held, arrivals.payload() as other:
        held.came(1000)  # that it begins was never said
        other.begins("b")
        clock.now_s = 1.0
        other.came(10)
        assert arrivals.taken() == {"b": (10, pytest.approx(1.0))}
        clock.now_s = 2.0
        other.came(20)
    assert arrivals.taken() == {"b": (20, pytest.approx(1.0))}
