from hypothesis import given
from hypothesis import strategies as st

from murmuration.protos.text import MAX_SHOWN, shown


@given(st.text(max_size=300))
def test_what_is_shown_is_short_and_printable(text: str) -> None:
    assert shown(text).isprintable()
    assert len(shown(text)) <= MAX_SHOWN
    if text.isprintable() and len(text) <= MAX_SHOWN:
        assert shown(text) == text


def test_escape_sequences_and_lines_are_gone() -> None:
    assert shown("\x1b[2Jgone\nmurmur: done") == "?[2Jgone?murmur: done"
    assert shown("x" * 3_000_000, 10) == "xxxxxxx..."
