"""The refusals that a user is told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def one_line(error: type[Exception] | tuple[type[Exception], ...], says: str) -> Iterator[None]:
    """The block raises that error, whose text has no second line."""
    with pytest.raises(error, match=says) as refused:
        yield
    assert "\n" not in str(refused.value)
