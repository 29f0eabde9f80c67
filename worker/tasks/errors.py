"""What can go wrong while a task is loaded.

    ValueError
    └── TaskError       the task's name, its options or its object are not usable
        └── TextError   the text to learn from is missing, unreadable or too short

Every message is one line: what is wrong, where, and how to put it right.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["TaskError", "TextError", "nearest"]


class TaskError(ValueError):
    """A task cannot be loaded as asked; the message is meant for the user."""


class TextError(TaskError):
    """The text to learn from cannot be used; the message is meant for the user."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known names, or a list of all of them.

    Args:
        name: what was asked for.
        known: the valid names.

    Returns:
        The end of an error message; empty if nothing is known.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "; choose from " + ", ".join(names) if names else ""
