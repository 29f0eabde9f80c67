"""The built-in task with a gate inside a stage: its replicas wait in the middle of a visit.

So a test ends a worker while visits are under way there, and needs no sleeping.
"""

import os

from torch import Tensor, nn

from worker.tasks.llama_bytes import LlamaBytes
from worker.tasks.llama_stages import LlamaStage


class GatedStages(LlamaBytes):
    """LlamaBytes whose stage beginning at layer `gate_layer` opens `gate` for reading, which
    blocks, before its `gate_call`-th forward."""

    def __init__(
        self, *, seed: int, gate: str, gate_layer: int, gate_call: int, **options: object
    ) -> None:
        super().__init__(seed=seed, **options)
        self._gate, self._gate_layer, self._gate_call = gate, gate_layer, gate_call
        self._calls = 0

    def stage(self, first: int, last: int, *, outer: bool) -> LlamaStage:
        stage = super().stage(first, last, outer=outer)
        if first == self._gate_layer and not outer:
            stage.register_forward_pre_hook(self._wait)
        return stage

    def _wait(self, _stage: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
        self._calls += 1
        if self._calls == self._gate_call:
            os.close(os.open(self._gate, os.O_RDONLY))
