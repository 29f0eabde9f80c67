"""Reading what another process has said of itself, and exit codes in words."""

import pytest

from protos.events import new_event, printable
from protos.exit_codes import exit_words


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


def test_an_event_is_its_kind_and_fields() -> None:
    assert new_event("moves", stage=1, to=2) == {"event": "moves", "stage": 1, "to": 2}
