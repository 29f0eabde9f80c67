"""What the anchor is worth: held-out loss, and a piece of text."""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from murmuration.worker.config import task_of
from murmuration.worker.tasks import (
    Cursor,
    Generates,
    Measures,
    Streams,
    Task,
    TaskError,
    next_batch,
)
from murmuration.worker.training import checkpoint
from murmuration.worker.training.checkpoint import Checkpoint
from murmuration.worker.training.device import device_of, moved
from murmuration.worker.training.export import anchored_model, find_checkpoint
from murmuration.worker.training.kseed import follow, seed_space_of
from murmuration.worker.training.loop import Trainer

_VALIDATION_BATCHES = 16
_SAMPLE_BYTES, _SAMPLE_PROMPT = 400, "def "


@dataclass(frozen=True)
class Evaluation:
    """Means over held-out batches: of the loss, and of what the task's `metrics` gives, by name.

    Args:
        error: the standard error of the loss, by how batches differ; None of one batch.
    """

    loss: float
    metrics: Mapping[str, float]
    error: float | None = None

    def plain(self) -> dict[str, object]:
        """The fields of events."""
        return {
            "val_loss": self.loss,
            "val_loss_error": self.error,
            "val_metrics": dict(self.metrics),
        }


@contextmanager
def anchors_loaded(trainer: Trainer, model: nn.Module) -> Iterator[None]:
    """The model with the anchors as parameters; the local ones come back afterwards, to the bit."""
    locals_ = [each.local for each in trainer.fragments]
    space = seed_space_of(model)
    for each in trainer.fragments:
        each.write(each.state.anchor)
    try:
        with space.kept() if space is not None else nullcontext():
            yield
    finally:
        for each, local in zip(trainer.fragments, locals_, strict=True):
            each.write(local)


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Dropout is off and running statistics stand still in these; afterwards as before. Parameters
    are where their coefficients are, of a model that has those."""
    for module in modules:
        follow(module)
    trained = [each for module in modules for each in module.modules() if each.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for each in trained:
            each.training = True


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Python's, numpy's and torch's global generators go on afterwards as if nothing had been
    drawn; torch's on the CPU and, where that is a CUDA device, on it."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


class PeriodicEvaluation:
    """The held-out loss of the anchors at an interval of the run, or of the local parameters where
    nothing is exchanged. train thread only.

    It leaves no trace in the training: parameters, dropout, running statistics and random states
    are afterwards as they were, to the bit.

    Args:
        task, model: what is trained; seed: of the run.
        every_steps: the interval in the schedule; 0: never.
        step: position in the schedule to go on from.
    """

    def __init__(
        self, task: Task, model: nn.Module, *, seed: int, every_steps: int, step: int
    ) -> None:
        self._task, self._model, self._seed, self._every_steps = task, model, seed, every_steps
        self._passed = step // every_steps if every_steps else 0

    def evaluate_if_due(self, trainer: Trainer, wanted: Callable[[], bool]) -> None:
        """Between two steps; the trainer tells of it. At the end of the run the result has it in
        any case. Args: wanted: as `validate` takes it."""
        if not self._every_steps or not trainer.trains:
            return
        passed = trainer.step // self._every_steps
        if passed <= self._passed:
            return
        self._passed, began_s = passed, time.monotonic()
        trainer.report("evaluating")
        exchanges = trainer.exchanges
        loaded = anchors_loaded(trainer, self._model) if exchanges else nullcontext()
        with random_states_kept(device_of(self._model)), loaded:
            found = validate(self._task, self._model, self._seed, wanted)
        trainer.evaluated(found, time.monotonic() - began_s)


def validate(
    task: Task,
    model: nn.Module,
    seed: int,
    wanted: Callable[[], bool] = lambda: True,
    count: int = _VALIDATION_BATCHES,
    split: str = "validation",
) -> Evaluation | None:
    """Over the same held-out batches on every peer, or others to train on, so many of them; None as
    soon as it is not `wanted` any more."""
    batches = task.batches(split, Cursor(seed=seed, stream="validation"))
    losses: list[float] = []
    found: defaultdict[str, list[float]] = defaultdict(list)
    # Not in inference mode: what a model caches in its forward is used in training again.
    with evaluating(model), torch.no_grad():
        while len(losses) < count:
            if not wanted():
                return None
            batch = moved(next_batch(batches, split), device_of(model))
            metrics = task.metrics(model, batch) if isinstance(task, Measures) else {}
            losses.append(float(task.loss(model, batch)))
            for name, value in metrics.items():
                found[name].append(float(value))
    means = {name: sum(values) / len(values) for name, values in found.items()}
    error = None
    if len(losses) > 1:
        error = float(torch.tensor(losses, dtype=torch.float64).std()) / len(losses) ** 0.5
    return Evaluation(sum(losses) / len(losses), means, error)


def evaluate_checkpoint(
    saved: Checkpoint, *, split: str = "validation", settings: Iterable[str] = ()
) -> Evaluation:
    """Of a checkpoint's anchor, over as many batches as a run's report takes.

    Args:
        saved: of a whole model.
        split: 'validation', or 'train' for text that the run learned from.
        settings: of [task], typed here; what loads code or reads files must be among them.

    Raises:
        CheckpointError: it does not hold the whole model of its run.
        TaskError: the run's task cannot be loaded here.
    """
    config = checkpoint.config_of(saved, settings)
    task = task_of(config)
    model = anchored_model(saved, config, task)
    found = validate(task, model, config.run.seed, split=split)
    assert found is not None, "without a limit it is never cut short"
    return found


def generate_sample(task: Task, model: nn.Module, seed: int) -> str | None:
    """A piece of text, where the task can write one."""
    if not isinstance(task, Generates):
        return None
    prompt = str(getattr(task, "sample_prompt", _SAMPLE_PROMPT))
    with evaluating(model):
        return prompt + task.generate(model, prompt, _SAMPLE_BYTES, 0.7, seed)


def generate_text(
    run: Path,
    prompt: str,
    n_tokens: int,
    temperature: float,
    seed: int,
    settings: Iterable[str] = (),
) -> Iterator[str]:
    """Continues `prompt` with the newest anchor below the folder `run`.

    Args:
        run: a swarm's folder, a worker's, one of checkpoints, or one checkpoint.
        settings: of [task], typed here; what loads code or reads files must be among them.

    Returns:
        The text in pieces, as they are made; in one where the task does not stream.

    Raises (before the first piece):
        CheckpointError: there is none that can be used.
        TaskError: the run's task cannot be loaded here, or writes no text.
    """
    saved = find_checkpoint(run)
    config = checkpoint.config_of(saved, settings)
    task = task_of(config)
    if not isinstance(task, Generates):
        raise TaskError(f"task {config.task.name!r} has no generate()")
    model = anchored_model(saved, config, task).eval()
    if isinstance(task, Streams):
        return task.stream(model, prompt, n_tokens, temperature, seed)
    return iter([task.generate(model, prompt, n_tokens, temperature, seed)])
