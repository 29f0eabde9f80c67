"""Shared by the tests of rounds."""

from collections.abc import Iterator

import pytest

from murmuration.worker.simulation.virtual_loop import VirtualLoop
from tests.unit.worker.exchange.allreduce.layouts import on_a_loop


@pytest.fixture
def clock() -> Iterator[VirtualLoop]:
    with on_a_loop() as clock:
        yield clock
