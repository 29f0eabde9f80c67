"""The built-in task with a gate: training waits at a step until a FIFO has a writer.

So a test decides when a run may go on, and needs no sleeping and no guessing of speeds.
"""

import os

from torch import Tensor, nn

from worker.tasks.llama_bytes import LlamaBytes
from worker.tasks.task import Batch


class Gated(LlamaBytes):
    """LlamaBytes that opens `gate` for reading, which blocks, at its `gate_step`-th loss."""

    def __init__(self, *, seed: int, gate: str, gate_step: int, **options: object) -> None:
        super().__init__(seed=seed, **options)
        self._gate, self._gate_step, self._losses = gate, gate_step, 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._losses += 1
        if self._losses == self._gate_step:
            os.close(os.open(self._gate, os.O_RDONLY))
        return super().loss(model, batch)
