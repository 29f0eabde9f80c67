"""What the anchor is worth: held-out loss, and a piece of text."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from algorithms.fragments import Fragment
from worker.tasks import Cursor, Generates, Task
from worker.train import Trainer

_VALIDATION_BATCHES = 16
_SAMPLE_BYTES = 400


@contextmanager
def anchors_loaded(trainer: Trainer, fragments: Sequence[Fragment]) -> Iterator[None]:
    """The model with the anchors as parameters; the local ones come back afterwards."""
    parameters = trainer.replica.parameters
    locals_ = {name: local.clone() for name, local in parameters.items()}
    for fragment, state in zip(fragments, trainer.states, strict=True):
        for name, value in fragment.views(state.anchor).items():
            parameters[name].copy_(value)
    try:
        yield
    finally:
        for name, local in locals_.items():
            parameters[name].copy_(local)


def validation_loss(task: Task, model: nn.Module, seed: int, limit_s: float) -> float | None:
    """Mean loss over the same held-out batches on every peer; None if that takes too long."""
    batches = task.batches("validation", Cursor(seed=seed, stream="validation"))
    deadline = time.monotonic() + limit_s
    losses: list[float] = []
    with torch.inference_mode():
        while len(losses) < _VALIDATION_BATCHES:
            if time.monotonic() > deadline:
                return None
            losses.append(float(task.loss(model, next(batches))))
    return sum(losses) / len(losses)


def generate_sample(task: Task, model: nn.Module, seed: int) -> str | None:
    """A piece of text, where the task can write one."""
    if not isinstance(task, Generates):
        return None
    prompt = "def "
    return prompt + task.generate(model, prompt, _SAMPLE_BYTES, 0.7, seed)
