"""The built-in task on a slow machine: every batch takes a pause."""

import os
import time
from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.tasks.llama_bytes import LlamaBytes

TIMES = "SLOW_TASK_TIMES"  # longer are the pauses of this machine, as the environment has it
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}


class SlowBytes(LlamaBytes):
    """Args:
    pause_s: before each training batch; long beside the computing, so that workers which share
        cores do not slow each other down.
        architecture, context_bytes, batch_size: as of `LlamaBytes`."""

    def __init__(
        self,
        *,
        seed: int,
        pause_s: float,
        architecture: Mapping[str, object] = SIZES,
        context_bytes: int = 64,
        batch_size: int = 4,
    ) -> None:
        super().__init__(
            seed=seed, architecture=architecture, context_bytes=context_bytes, batch_size=batch_size
        )
        self._pause_s = pause_s * float(os.environ.get(TIMES, "1"))

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        for batch in super().batches(split, cursor):
            if split == "train":
                time.sleep(self._pause_s)
            yield batch

    def loader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """As above: the pause is shared out to the samples of a batch."""
        loader = super().loader()
        samples = Slow(loader.dataset, self._pause_s / self.batch_size)
        return DataLoader(samples, self.batch_size, shuffle=True)


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Samples with a pause before each."""

    def __init__(self, samples: Dataset[tuple[Tensor, Tensor]], pause_s: float) -> None:
        self._samples, self._pause_s = samples, pause_s

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]  # this one has a length

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._pause_s)
        return self._samples[place]
