"""Gates that a test holds: training waits at a step until the test opens it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.workers import settings_of


@dataclass(frozen=True)
class Gate:
    """A FIFO, and the settings that make every worker wait for it, and for those beside it."""

    fifo: Path
    settings: tuple[str, ...]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lets everyone through who waits at the gate, and everyone who comes later."""
        descriptor = os.open(self.fifo, os.O_RDWR)
        try:
            yield
        finally:
            os.close(descriptor)


def gate(folder: Path, step: int) -> Gate:
    """A closed gate before every worker's `step`-th batch."""
    return gates(folder, step)[0]


def gates(folder: Path, *steps: int) -> list[Gate]:
    """Closed gates before some of every worker's batches, counted from 1."""
    fifos = {step: folder / f"gate-{step}" for step in steps}
    for fifo in fifos.values():
        os.mkfifo(fifo)
    named = ", ".join(f'{step} = "{fifo}"' for step, fifo in fifos.items())
    settings = settings_of(task__name='"tests.support.gated:Gated"', task__gates=f"{{{named}}}")
    return [Gate(fifos[step], tuple(settings)) for step in steps]
