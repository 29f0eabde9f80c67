"""A test on the virtual clock (`murmuration.worker.simulation.virtual_loop`)."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

from murmuration.worker.simulation.virtual_loop import VirtualLoop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs to the end on a fresh virtual clock; an exception that nobody handled fails the test."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        result = runner.run(work)
        gc.collect()  # tasks report what nobody awaited when they go
        gc.freeze()  # what is left is looked at no more
        problems = loop.problems
    assert not problems, problems
    return result
