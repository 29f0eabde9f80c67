"""A worker that stands still during a round in pairs until a test has done what it wants to do."""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.gate import Gate
from tests.support.watched import Hold
from tests.support.workers import PATIENCE_S

_NAME_BYTES = 4096


@dataclass(frozen=True)
class HeldRound:
    """Args:
    hold: for the program of the worker that is to stand still.
    gate: it goes on when that is opened.
    descriptor: where it tells.
    """

    hold: Hold
    gate: Gate
    descriptor: int

    def partner(self) -> str:
        """Waits until the worker stands still; with whom it is in the round. Raises
        AssertionError: it does not come there in time."""
        ready, _, _ = select.select([self.descriptor], [], [], PATIENCE_S)
        assert ready, f"nobody came to round {self.hold.round} in {PATIENCE_S} s"
        return os.read(self.descriptor, _NAME_BYTES).decode().strip()


@contextmanager
def held_round(folder: Path, round_: int, point: str) -> Iterator[HeldRound]:
    """Makes the FIFOs of a hold, and listens."""
    told, gate = folder / "held", folder / "held-gate"
    for fifo in (told, gate):
        os.mkfifo(fifo)
    descriptor = os.open(told, os.O_RDWR)
    try:
        yield HeldRound(Hold(str(told), str(gate), round_, point), Gate(gate, ()), descriptor)
    finally:
        os.close(descriptor)
