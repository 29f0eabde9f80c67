"""One format for each kind of quantity."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from murmuration.protos import figures
from murmuration.protos.figures import MAX_SHOWN, shown


@pytest.mark.parametrize(
    ("show", "number", "text"),
    [
        (figures.megabytes, 0, "0.0 MB"),
        (figures.megabytes, 512, "0.00051 MB"),
        (figures.megabytes, 45_678, "0.046 MB"),
        (figures.megabytes, 33_100_000, "33.1 MB"),
        (figures.megabytes, 12_345_600_000, "12,345.6 MB"),
        (lambda error: figures.measured(1.25824, error), 0.0468, "1.258 ± 0.047"),
        (lambda error: figures.measured(0.0149, error), 0.00161, "0.0149 ± 0.0016"),
        (lambda error: figures.measured(34.0, error), 4.76, "34.0 ± 4.8"),
        (lambda error: figures.measured(1.25824, error), 1e-9, "1.258240 ± 0.000000"),
        (lambda error: figures.measured(123.4, error), 567.0, "123 ± 567"),
        (lambda error: figures.measured(1.25824, error), 0.0, "1.258"),
        (lambda error: figures.measured(1.25824, error), math.nan, "1.258"),
        (figures.size, 0, "0 B"),
        (figures.size, 512, "512 B"),
        (figures.size, 15_200, "15.2 kB"),
        (figures.size, 33_100_000, "33.1 MB"),
        (figures.size, 1.2e12, "1,200.0 GB"),
        (figures.seconds, 0.0, "0 ms"),
        (figures.seconds, 0.01234, "12.3 ms"),
        (figures.seconds, 4.56, "4.56 s"),
        (figures.seconds, 1234, "1,234 s"),
        (figures.duration, 12, "12 s"),
        (figures.duration, 200, "3 min 20 s"),
        (figures.duration, 7500, "2 h 05 min"),
        (figures.percent, 0.949, "94.9 %"),
        (figures.percent, 0.8, "80 %"),
        (lambda share: figures.percent(share, 1), 0.8, "80.0 %"),
        (figures.rate, 1500, "1.5 Gbit/s"),
        (figures.rate, 20, "20 Mbit/s"),
        (figures.rate, 0.128, "128 kbit/s"),
        (lambda number: figures.count(number, "round"), 1, "1 round"),
        (lambda number: figures.count(number, "round"), 1200, "1,200 rounds"),
        (lambda number: figures.count(number, "microbatch"), 8, "8 microbatches"),
        (figures.ratio, 0.256, "0.26 times"),
        (figures.ratio, 1.3, "1.3 times"),
        (figures.ratio, 50.2, "50 times"),
        (figures.parameters, 812, "812 parameters"),
        (figures.parameters, 812_000, "812 thousand parameters"),
        (figures.parameters, 1_300_000, "1.3 million parameters"),
        (figures.parameters, 7_000_000_000, "7.0 billion parameters"),
    ],
)
def test_a_number_as_people_read_it(show: Callable[[float], str], number: float, text: str) -> None:
    assert show(number) == text


def test_what_is_not_known_is_a_dash() -> None:
    assert figures.optional(None, figures.seconds) == "-"
    assert figures.optional(0.5, figures.seconds) == "500 ms"


def test_a_loss_in_other_words() -> None:
    assert figures.perplexity(math.log(7)) == "7.00"
    assert figures.perplexity(1e4) == "above 3e+43"
    assert figures.perplexity(math.inf) == "above 3e+43"
    assert figures.perplexity(math.nan) == "nan"


@given(st.text(max_size=300))
def test_what_is_shown_is_short_and_printable(text: str) -> None:
    assert shown(text).isprintable()
    assert len(shown(text)) <= MAX_SHOWN
    if text.isprintable() and len(text) <= MAX_SHOWN:
        assert shown(text) == text


def test_escape_sequences_and_lines_are_gone() -> None:
    assert shown("\x1b[2Jgone\nmurmur: done") == "?[2Jgone?murmur: done"
    assert shown("x" * 3_000_000, 10) == "xxxxxxx..."
