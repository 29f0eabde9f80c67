"""A task whose model has running statistics, and counts in integers beyond those of fp32."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from murmuration.worker.tasks import Batch, Cursor

FIRST_COUNT = (1 << 40) + 3  # fp32 holds every integer up to 1 << 24


class Counted(nn.BatchNorm1d):
    """A BatchNorm that also counts the positive values of each feature, and flags what it saw."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("positive", torch.full((features,), FIRST_COUNT))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.positive += (input > 0).sum(0)
            self.seen[0] = True
        return super().forward(input)


class Normalised:
    """Learns the sign of a sum through a BatchNorm, whose inputs differ from peer to peer."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            return nn.Sequential(nn.Linear(4, 8), Counted(8), nn.ReLU(), nn.Linear(8, 1))

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
