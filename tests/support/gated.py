"""The built-in task with gates: training waits at a step until a FIFO has a writer.

So a test decides when a run may go on, and needs no sleeping and no guessing of speeds.
"""

import os
from collections.abc import Mapping

from torch import Tensor, nn

from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.task import Batch


class Gated(LlamaBytes):
    """LlamaBytes that opens a FIFO for reading, which blocks, at each so-many-th loss that `gates`
    names, from 1."""

    def __init__(self, *, seed: int, gates: Mapping[str, str], **options: object) -> None:
        super().__init__(seed=seed, **options)
        self._gates, self._losses = gates, 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._losses += 1
        if (gate := self._gates.get(str(self._losses))) is not None:
            os.close(os.open(gate, os.O_RDONLY))
        return super().loss(model, batch)
