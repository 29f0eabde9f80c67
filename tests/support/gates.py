"""Gates that a test holds: training waits at a point of a run until the test opens it.

So a test decides when a run may go on, and needs no sleeping and no guessing of speeds. The tasks
are the built-in one, with gates.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from murmuration.worker.tasks.llama import LlamaStage
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.task import Batch, Cursor
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
    settings = settings_of(task__name='"tests.support.gates:Gated"', task__gates=f"{{{named}}}")
    return [Gate(fifos[step], tuple(settings)) for step in steps]


def _pass(gate: str) -> None:
    """Waits until it has a writer."""
    os.close(os.open(gate, os.O_RDONLY))


class Gated(LlamaBytes):
    """LlamaBytes that opens a FIFO for reading, which blocks, at each so-many-th loss that `gates`
    names, from 1."""

    def __init__(self, *, seed: int, gates: Mapping[str, str], **options: object) -> None:
        super().__init__(seed=seed, **options)
        self._gates, self._losses = gates, 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._losses += 1
        if (gate := self._gates.get(str(self._losses))) is not None:
            _pass(gate)
        return super().loss(model, batch)


class GatedOrigins(LlamaBytes):
    """LlamaBytes that opens `gate` for reading, which blocks, before training batch `gate_batch`
    of each stream."""

    def __init__(self, *, seed: int, gate: str, gate_batch: int, **options: object) -> None:
        super().__init__(seed=seed, **options)
        self._gate, self._gate_batch = gate, gate_batch

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        for number, batch in enumerate(super().batches(split, cursor), 1):
            if split == "train" and number == self._gate_batch:
                _pass(self._gate)
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
            _pass(self._gate_anew)
        return super().stage(first, last, outer=outer)
