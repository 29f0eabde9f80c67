"""The built-in task, whose workers wait at a gate at a chosen point of a run.

So a test holds a run still while peers of its stages come and go, and needs no sleeping.
"""

import os
from collections.abc import Iterator
from typing import Any

from murmuration.worker.tasks.llama import LlamaStage
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.task import Batch, Cursor


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
