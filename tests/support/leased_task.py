"""The built-in task, which writes down each sample that it learns from, and in which epoch."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from murmuration.worker.tasks import Batch
from tests.support.gates import Gated

Sample = tuple[int, int]  # epoch and place in it


class Places(Sampler[Sample]):
    """All samples of an epoch, in an order of its own."""

    def __init__(self, length: int) -> None:
        self._length, self._epoch = length, 0

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        places = range(self._length)
        return iter([(self._epoch, place) for place in places[:: -1 if self._epoch % 2 else 1]])


class Labelled(Dataset[Any]):
    """Samples with their epochs and places."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self._samples = samples

    def __getitem__(self, at: Sample) -> Any:
        inputs, targets = self._samples[at[1]]
        return (inputs, *at), targets


class Recorded(Gated):
    """Args:
    record: a folder; each process that learns writes `EPOCH PLACE` there, a line a sample."""

    def __init__(self, *, record: str, **options: Any) -> None:
        super().__init__(**options)
        self._path = Path(record) / str(os.getpid())

    def loader(self) -> DataLoader[Any]:
        windows = super().loader().dataset
        return DataLoader(
            Labelled(windows),
            self.batch_size,
            sampler=Places(len(windows)),  # type: ignore[arg-type]
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if isinstance(batch.inputs, list):
            inputs, epochs, places = batch.inputs
            with self._path.open("a") as file:
                file.writelines(f"{e} {p}\n" for e, p in zip(epochs, places, strict=True))
            batch = Batch(inputs, batch.targets, batch.cursor)
        return super().loss(model, batch)


def counts(record: Path, epoch: int, length: int) -> list[int]:
    """How often each sample of an epoch was learned from."""
    found = [0] * length
    for path in record.iterdir():
        for line in path.read_text().splitlines():
            of, place = map(int, line.split())
            found[place] += of == epoch
    return found
