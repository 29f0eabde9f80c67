"""The built-in task, whose workers wait at a gate, or for their end, at a chosen point of a run.

So a test ends workers while microbatches are under way on them, or holds a run still while peers of
its stages come and go, and needs no sleeping.
"""

import os
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from murmuration.worker.tasks.llama import LlamaStage
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.task import Batch, Cursor
from tests.support.workers import PATIENCE_S, settings_of

_NAME_BYTES = 4096


class GatedOrigins(LlamaBytes):
    """LlamaBytes that opens `gate` for reading, which blocks, before training batch `gate_batch`
    of each stream."""

    def __init__(self, *, seed: int, gate: str, gate_batch: int, **options: object) -> None:
        super().__init__(seed=seed, **options)
        self._gate, self._gate_batch = gate, gate_batch

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        for number, batch in enumerate(super().batches(split, cursor), 1):
            if split == "train" and number == self._gate_batch:
                os.close(os.open(self._gate, os.O_RDONLY))
            yield batch


class GatedRebuild(GatedOrigins):
    """GatedOrigins with a gate before the stage that begins at layer `gate_layer` is rebuilt: a
    peer that serves a stage builds it once, one that rebuilds it once more."""

    def __init__(self, *, seed: int, gate_anew: str, gate_layer: int, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._gate_anew, self._gate_layer, self._built = gate_anew, gate_layer, 0

    def stage(self, first: int, last: int, *, outer: bool) -> LlamaStage:
        self._built += first == self._gate_layer
        if first == self._gate_layer and self._built == 2:
            os.close(os.open(self._gate_anew, os.O_RDONLY))
        return super().stage(first, last, outer=outer)


class HeldCalls(LlamaBytes):
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
            task__name='"tests.support.stage_tasks:HeldCalls"',
            task__held=f'"{self.fifo}"',
            task__hold=f"{{{calls}}}",
        )

    def names(self) -> Iterator[str]:
        """The workers as they come to be held. Raises AssertionError: none comes in time."""
        left = set(self.calls)
        while left:
            ready, _, _ = select.select([self.descriptor], [], [], PATIENCE_S)
            assert ready, f"none of {sorted(left)} came to its call in {PATIENCE_S} s"
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
