"""Shared by the coordinator's tests."""

import io

import pytest
from rich.console import Console


@pytest.fixture
def console() -> Console:
    """A console that prints to its file."""
    return Console(file=io.StringIO(), width=120, highlight=False)
