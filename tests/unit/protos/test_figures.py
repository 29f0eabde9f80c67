"""One format for each kind of quantity; exit codes, faults and texts of others in words."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from murmuration.protos import figures
from murmuration.protos.events import printable, verdict_words
from murmuration.protos.exit_codes import exit_words
from murmuration.protos.figures import MAX_SHOWN, shown

SHOWN: dict[Callable[[Any], str], dict[Any, str]] = {
    figures.megabytes: {
        0: "0.0 MB", 512: "0.00051 MB", 45_678: "0.046 MB", 33_100_000: "33.1 MB",
        12_345_600_000: "12,345.6 MB",
    },
    lambda pair: figures.measured(*pair): {
        (1.25824, 0.0468): "1.258 ± 0.047", (0.0149, 0.00161): "0.0149 ± 0.0016",
        (34.0, 4.76): "34.0 ± 4.8", (1.25824, 1e-9): "1.258240 ± 0.000000",
        (123.4, 567.0): "123 ± 567", (1.25824, 0.0): "1.258", (1.25824, math.nan): "1.258",
    },
    figures.size: {
        0: "0 B", 512: "512 B", 15_200: "15.2 kB", 33_100_000: "33.1 MB", 1.2e12: "1,200.0 GB",
    },
    figures.seconds: {0.0: "0 ms", 0.01234: "12.3 ms", 4.56: "4.56 s", 1234: "1,234 s"},
    figures.duration: {12: "12 s", 200: "3 min 20 s", 7500: "2 h 05 min"},
    figures.percent: {0.949: "94.9 %", 0.8: "80 %"},
    lambda share: figures.percent(share, 1): {0.8: "80.0 %"},
    figures.rate: {1500: "1.5 Gbit/s", 20: "20 Mbit/s", 0.128: "128 kbit/s"},
    lambda pair: figures.count(*pair): {
        (1, "round"): "1 round", (1200, "round"): "1,200 rounds",
        (8, "microbatch"): "8 microbatches",
    },
    figures.perplexity: {
        math.log(7): "7.00", 1e4: "above 3e+43", math.inf: "above 3e+43", math.nan: "nan",
    },
    figures.ratio: {0.256: "0.26 times", 1.3: "1.3 times", 50.2: "50 times"},
    figures.parameters: {
        812: "812 parameters", 812_000: "812 thousand parameters",
        1_300_000: "1.3 million parameters", 7_000_000_000: "7.0 billion parameters",
    },
    lambda seconds: figures.optional(seconds, figures.seconds): {None: "-", 0.5: "500 ms"},
}  # fmt: skip


@pytest.mark.parametrize(("show", "shown"), SHOWN.items())
def test_a_number_as_people_read_it(show, shown):
    assert {number: show(number) for number in shown} == shown


@given(st.text(max_size=300))
def test_what_is_shown_is_short_and_printable(text):
    assert shown(text).isprintable()
    assert len(shown(text)) <= MAX_SHOWN
    if text.isprintable() and len(text) <= MAX_SHOWN:
        assert shown(text) == text


def test_escape_sequences_and_lines_are_gone():
    assert shown("\x1b[2Jgone\nmurmur: done") == "?[2Jgone?murmur: done"
    assert shown("x" * 3_000_000, 10) == "xxxxxxx..."


def test_exit_codes_in_words():
    words = {0: "done", 4: "exit 4", 130: "interrupted", -2: "interrupted", -9: "killed (SIGKILL)"}
    assert {code: exit_words(code) for code in words} == words


def test_text_cannot_steer_a_terminal():
    assert printable("a\x1b[2Jb\n\tc") == "a\N{REPLACEMENT CHARACTER}[2Jb\n\tc"


VERDICT = {
    "kind": "uplink", "peer": "w2", "measured": 3.1, "usual": 20.0, "unit": "mbps", "cost": 0.04,
    "since": "2026-01-05T14:02:31+01:00",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "w2's uplink, 3.1 of 20 Mbit/s since 14:02, cost 4 % of rounds"),
        ({"kind": "link", "to": "w0", "cost": 0.005},
         "the link from w2 to w0, 3.1 of 20 Mbit/s since 14:02, cost 0.5 % of rounds"),
        ({"kind": "machine", "measured": 0.25, "usual": 0.05, "cost": 0.5},
         "w2's machine, 250 ms a step, others 50 ms since 14:02, cost 50 % of rounds"),
        ({"kind": "disk", "measured": 3.2, "usual": 0.1, "cost": 0.0},
         "w2's disk, 3.2 s a checkpoint, others 100 ms since 14:02, no cost"),
    ],
)  # fmt: skip
def test_a_fault_in_words(changes, words):
    assert verdict_words(VERDICT | changes) == words
    assert "?" in verdict_words({"cost": "much", "peer": 3})
