"""The validation loss on the way: told at its steps, and without a trace in the training."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.training.evaluation import PeriodicEvaluation, validate
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.optimizers import InnerConfig
from tests.support.lone_trainer import LoneTrainer

STEPS = 10


class Drawing:
    """Its model has dropout, running statistics and a cache; its loss draws from every global
    generator, of training and of held-out batches."""

    def __init__(self, *, noise: bool) -> None:
        self._noise = noise

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return Caching()

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        while True:
            generator = torch.Generator().manual_seed(cursor.position + 1000 * len(split))
            inputs = torch.randn(16, 4, generator=generator)
            cursor = cursor.advance(16)
            yield Batch(inputs, inputs.sum(1), cursor)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        noise = self._noise * (torch.rand(()) + random.random() + float(np.random.rand()))
        return nn.functional.mse_loss(model(batch.inputs).squeeze(1), batch.targets + noise)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.layers = nn.Sequential(*parts)
        self._scale: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self._scale is None:
            self._scale = torch.ones(1)  # what is cached in an evaluation is used in training
        return self.layers(inputs) * self._scale


class Run(LoneTrainer):
    def __init__(
        self, every_steps: int, *, noise: bool = True, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.task, inner = Drawing(noise=noise), InnerConfig(warmup_steps=0)

        def evaluate(trainer: Trainer) -> None:
            evaluation.evaluate_if_due(trainer, wanted)

        super().__init__(self.task, PRESETS["local"], STEPS, inner, between_steps=evaluate)
        given = {"seed": 0, "every_steps": every_steps, "step": 0}
        evaluation = PeriodicEvaluation(self.task, self.model, **given)
        self.run()


def test_the_training_is_the_same_to_the_bit():
    never = Run(every_steps=0)
    after = torch.rand(()), random.random(), np.random.rand()
    often = Run(every_steps=3)
    assert (torch.rand(()), random.random(), np.random.rand()) == after
    other = often.model.state_dict()
    for name, value in never.model.state_dict().items():
        assert torch.equal(value, other[name]), name
    assert often.model.training


def test_it_is_the_loss_of_the_anchor_and_not_of_the_local_parameters(monkeypatch):
    monkeypatch.setattr(Trainer, "exchanges", True)  # in rounds that have not come yet
    run = Run(every_steps=2, noise=False)
    losses = {event["val_loss"] for event in run.told("validation")}
    # The anchor is as it began, until the end.
    assert losses == {validate(run.task, run.task.model(), 0).loss}
    assert losses != {validate(run.task, run.model, 0).loss}


def test_one_that_a_signal_cuts_short_tells_no_loss():
    run = Run(every_steps=3, wanted=lambda: False)
    assert run.told("validation") == []
    assert run.step == STEPS
