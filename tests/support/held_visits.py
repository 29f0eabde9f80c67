"""The built-in task, in which some workers stop for good in the middle of a visit.

So a test kills a worker while microbatches are under way on it, and needs no sleeping.
"""

import os
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from tests.support.workers import PATIENCE_S, settings_of
from worker.tasks.llama_bytes import LlamaBytes
from worker.tasks.llama_stages import LlamaStage
from worker.tasks.task import Batch, Cursor

_NAME_BYTES = 4096


class HeldVisits(LlamaBytes):
    """LlamaBytes whose workers named in `hold` write their name to the FIFO `held`, and wait for
    their end, before their so-many-th pass through the layers."""

    def __init__(self, *, seed: int, held: str, hold: Mapping[str, int], **options: object) -> None:
        super().__init__(seed=seed, **options)
        self._held, self._hold = held, dict(hold)
        self._name, self._calls = "", 0

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        self._name = cursor.stream
        return super().batches(split, cursor)

    def stage(self, first: int, last: int, *, outer: bool) -> LlamaStage:
        stage = super().stage(first, last, outer=outer)
        stage.register_forward_pre_hook(self._wait)
        return stage

    def _wait(self, _stage: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
        self._calls += 1
        if self._calls == self._hold.get(self._name):
            with open(self._held, "w") as held:
                held.write(f"{self._name}\n")
            signal.pause()


@dataclass(frozen=True)
class Held:
    """The workers that are to be held, where in their lives, and the FIFO that tells of them."""

    fifo: Path
    calls: Mapping[str, int]
    descriptor: int

    @property
    def settings(self) -> list[str]:
        calls = ", ".join(f"{name} = {call}" for name, call in self.calls.items())
        return settings_of(
            task__name='"tests.support.held_visits:HeldVisits"',
            task__held=f'"{self.fifo}"',
            task__hold=f"{{{calls}}}",
        )

    def names(self) -> Iterator[str]:
        """The workers as they come to be held. Raises AssertionError: none comes in time."""
        left = set(self.calls)
        while left:
            ready, _, _ = select.select([self.descriptor], [], [], PATIENCE_S)
            assert ready, f"none of {sorted(left)} came to its visit in {PATIENCE_S} s"
            for name in os.read(self.descriptor, _NAME_BYTES).decode().split():
                left.discard(name)
                yield name


@contextmanager
def held(fifo: Path, calls: Mapping[str, int]) -> Iterator[Held]:
    """Makes the FIFO, and listens.

    Args:
        calls: by worker, the pass through its layers, from 1, before which it stops.
    """
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDWR)
    try:
        yield Held(fifo, calls, descriptor)
    finally:
        os.close(descriptor)
