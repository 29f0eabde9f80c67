"""A task whose model has running statistics."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from worker.tasks import Batch, Cursor


class Normalised:
    """Learns the sign of a sum through a BatchNorm, whose inputs differ from peer to peer."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        shift = sum(cursor.stream.encode()) % 7
        while True:
            generator = torch.Generator().manual_seed(cursor.position + 1000 * shift)
            inputs = torch.randn(16, 4, generator=generator) + shift
            cursor = cursor.advance(16)
            yield Batch(inputs, (inputs.sum(1) > 4 * shift).float(), cursor)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch.inputs).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.targets)
