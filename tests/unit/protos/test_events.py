"""Reading what another process has said of itself, and exit codes in words."""

import pytest

from murmuration.protos.events import printable, verdict_words
from murmuration.protos.exit_codes import exit_words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "done"),
        (4, "exit 4"),
        (130, "interrupted"),
        (-9, "killed (SIGKILL)"),
        (-2, "interrupted"),
    ],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert exit_words(code) == words


def test_text_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2Jb\n\tc") == "a\N{REPLACEMENT CHARACTER}[2Jb\n\tc"


VERDICT = {
    "kind": "uplink",
    "peer": "w2",
    "measured": 3.1,
    "usual": 20.0,
    "unit": "mbps",
    "cost": 0.04,
    "since": "2026-01-05T14:02:31+01:00",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "w2's uplink, 3.1 of 20 Mbit/s since 14:02, cost 4 % of rounds"),
        (
            {"kind": "link", "to": "w0", "cost": 0.005},
            "the link from w2 to w0, 3.1 of 20 Mbit/s since 14:02, cost 0.5 % of rounds",
        ),
        (
            {"kind": "machine", "measured": 0.25, "usual": 0.05, "cost": 0.5},
            "w2's machine, 250 ms a step, others 50 ms since 14:02, cost 50 % of rounds",
        ),
        (
            {"kind": "disk", "measured": 3.2, "usual": 0.1, "cost": 0.0},
            "w2's disk, 3.2 s a checkpoint, others 100 ms since 14:02, no cost",
        ),
    ],
)
def test_a_fault_in_words(changes: dict[str, object], words: str) -> None:
    verdict = VERDICT | changes
    assert verdict_words(verdict) == words
    assert "?" in verdict_words({"cost": "much", "peer": 3})
