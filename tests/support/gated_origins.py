"""The built-in task with a gate before a microbatch: the replicas of stage 0 wait there.

So a test holds a run in stages still, while peers of its other stages come and go.
"""

import os
from collections.abc import Iterator

from worker.tasks.llama_bytes import LlamaBytes
from worker.tasks.task import Batch, Cursor


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
