"""Evaluates the anchor: held-out loss, and a piece of text."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from murmuration.worker import tasks
from murmuration.worker.config import task_of
from murmuration.worker.training import checkpoint
from murmuration.worker.training.checkpoint import Checkpoint
from murmuration.worker.training.device import device_of, moved, random_states_kept
from murmuration.worker.training.export import anchored_model, find_checkpoint
from murmuration.worker.training.kseed import follow, seed_space_of

if TYPE_CHECKING:
    from murmuration.worker.training.loop import Trainer

_VALIDATION_BATCHES = 16
_SAMPLE_BYTES, _SAMPLE_PROMPT = 400, "def "


@dataclass(frozen=True)
class Evaluation:
    """Means over held-out batches: of the loss, and of what the task's `metrics` gives, by name.
    Args: error: the standard error of the loss, by how batches differ; None of one batch."""

    loss: float
    metrics: Mapping[str, float]
    error: float | None = None

    def plain(self) -> dict[str, object]:
        metrics = dict(self.metrics)
        return {"val_loss": self.loss, "val_loss_error": self.error, "val_metrics": metrics}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and running statistics stand still; parameters follow their coefficients."""
    follow(model)
    trained = [each for each in model.modules() if each.training]
    model.eval()
    try:
        yield
    finally:
        for each in trained:
            each.training = True


class PeriodicEvaluation:
    """The held-out loss of the anchors every so many steps of the schedule (0: never), or of the
    local parameters where nothing is exchanged. train thread only.

    It leaves no trace in the training: parameters, dropout, running statistics and random states
    are afterwards as they were, to the bit."""

    def __init__(
        self, task: tasks.Task, model: nn.Module, *, seed: int, every_steps: int, step: int
    ) -> None:
        self._task, self._model, self._seed, self._every_steps = task, model, seed, every_steps
        self._passed = step // every_steps if every_steps else 0

    def evaluate_if_due(self, trainer: "Trainer", wanted: Callable[[], bool]) -> None:
        """Evaluates between two steps, as long as it is `wanted`, but not after the last."""
        passed = trainer.step // self._every_steps if self._every_steps else 0
        if passed <= self._passed or not trainer.trains:
            return
        self._passed, began_s = passed, time.monotonic()
        trainer.report("evaluating")
        fragments = trainer.fragments if trainer.exchanges else []
        space, locals_ = seed_space_of(self._model), [each.local for each in fragments]
        for each in fragments:
            each.write(each.state.anchor)
        kept = space.kept() if space is not None and fragments else nullcontext()
        try:
            with random_states_kept(device_of(self._model)), kept:
                found = validate(self._task, self._model, self._seed, wanted)
        finally:
            for each, local in zip(fragments, locals_, strict=True):
                each.write(local)
        if found is not None:  # else it was cut short
            trainer.metrics.validated(trainer.step, found.loss)
            told = {"seconds": round(time.monotonic() - began_s, 3), **found.plain()}
            trainer.reporter.event("validation", step=trainer.step, **told)


def validate(
    task: tasks.Task,
    model: nn.Module,
    seed: int,
    wanted: Callable[[], bool] = lambda: True,
    count: int = _VALIDATION_BATCHES,
    split: str = "validation",
) -> Evaluation | None:
    """Evaluates over batches that are the same on every peer; None once it is not `wanted`."""
    batches = task.batches(split, tasks.Cursor(seed=seed, stream="validation"))
    losses: list[float] = []
    found: defaultdict[str, list[float]] = defaultdict(list)
    # Not in inference mode: what a model caches in its forward is used in training again.
    with evaluating(model), torch.no_grad():
        while len(losses) < count:
            if not wanted():
                return None
            batch = moved(tasks.next_batch(batches, split), device_of(model))
            metrics = task.metrics(model, batch) if isinstance(task, tasks.Measures) else {}
            losses.append(float(task.loss(model, batch)))
            for name, value in metrics.items():
                found[name].append(float(value))
    means = {name: sum(values) / len(values) for name, values in found.items()}
    spread = torch.tensor(losses, dtype=torch.float64)
    error = float(spread.std()) / len(losses) ** 0.5 if len(losses) > 1 else None
    return Evaluation(sum(losses) / len(losses), means, error)


def evaluate_checkpoint(
    saved: Checkpoint, *, split: str = "validation", settings: Iterable[str] = ()
) -> Evaluation:
    """Evaluates a checkpoint's anchor, over as many batches as a run's report takes. Args: split:
    'validation', or 'train' for text that the run learned from; settings: as `config_of` takes
    them. Raises as that, as `task_of` and as `anchored_model`."""
    config = checkpoint.config_of(saved, settings)
    task = task_of(config)
    model = anchored_model(saved, config, task)
    found = validate(task, model, config.run.seed, split=split)
    assert found is not None, "without a limit it is never cut short"
    return found


def generate_sample(task: tasks.Task, model: nn.Module, seed: int) -> str | None:
    if not isinstance(task, tasks.Generates):
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
    """Continues `prompt` with the newest anchor below the folder `run`, in pieces as they are made;
    in one where the task does not stream. Raises, before the first piece, as `evaluate_checkpoint`
    and as `find_checkpoint`; TaskError: the task writes no text."""
    saved = find_checkpoint(run)
    config = checkpoint.config_of(saved, settings)
    task = task_of(config)
    if not isinstance(task, tasks.Generates):
        raise tasks.TaskError(f"task {config.task.name!r} has no generate()")
    model = anchored_model(saved, config, task).eval()
    if isinstance(task, tasks.Streams):
        return task.stream(model, prompt, n_tokens, temperature, seed)
    return iter([task.generate(model, prompt, n_tokens, temperature, seed)])
