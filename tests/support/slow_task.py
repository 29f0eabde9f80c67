"""The built-in task on unequal machines: every batch takes a pause, one worker a longer."""

import time
from collections.abc import Iterator

from worker.tasks import Batch, Cursor
from worker.tasks.llama_bytes import LlamaBytes


class SlowBytes(LlamaBytes):
    """Args:
    pause_s: before each training batch; long beside the computing, so that workers which share
        cores do not slow each other down.
    slow: the worker whose pause is `times` as long; none if empty.
    """

    def __init__(self, *, seed: int, pause_s: float, slow: str = "", times: float = 5.0) -> None:
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
        super().__init__(seed=seed, architecture=sizes, context_bytes=64)
        self._pause_s, self._slow, self._times = pause_s, slow, times

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        pause_s = self._pause_s * (self._times if cursor.stream == self._slow else 1.0)
        for batch in super().batches(split, cursor):
            if split == "train":
                time.sleep(pause_s)
            yield batch
