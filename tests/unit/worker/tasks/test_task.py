import pytest

from murmuration.worker.tasks import Cursor


def test_a_cursor_advances_by_samples_and_leaves_the_first_one_alone() -> None:
    first = Cursor(seed=1, stream="peer-a", position=5)
    assert first.advance(16) == Cursor(seed=1, stream="peer-a", position=21)
    assert first.position == 5


def test_a_cursor_refuses_a_negative_position() -> None:
    with pytest.raises(ValueError, match="counts samples from 0, got -1"):
        Cursor(seed=1, stream="peer-a", position=-1)
