"""Defines a task: the model, the samples and the loss that a swarm trains with.

A task of your own is an object with three methods and takes about twenty lines. The other protocols
are extras, used where a task has them. What cannot be used is a `worker.errors.TaskError`.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from murmuration.worker.errors import TaskError

SPLITS = ("train", "validation")


def nearest(name: str, known: Iterable[str]) -> str:
    """How an error ends: ``"; did you mean 'x'?"`` for the closest known name, or a list of all."""
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.4):
        return f"; did you mean {close[0]!r}?"
    return "; use one of " + ", ".join(names) if names else ""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in a stream of samples, which names every later sample.

    Sample number `position` of a stream is a pure function of (seed, stream, position). Resuming is
    therefore exact and replays nothing, and two streams never wait for each other."""

    seed: int  # the run's seed, the same on every worker
    stream: str  # names the stream; a worker trains on the stream of its own peer name
    position: int = 0  # samples (not batches) of this stream that were already drawn, from 0

    def __post_init__(self) -> None:
        if self.position < 0:
            raise ValueError(f"a cursor's position counts samples from 0, got {self.position}")

    def advance(self, samples: int) -> Cursor:
        return replace(self, position=self.position + samples)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one inner step; only the task's own `loss` looks into inputs and targets."""

    inputs: Any
    targets: Any
    cursor: Cursor  # where the next batch begins: a checkpoint that holds it resumes exactly there


@runtime_checkable
class Task(Protocol):
    """A model with the samples and the loss that train it.

    An attribute `loss_unit`, such as "nats per token", is printed beside the loss; with one called
    `tokens_per_sample`, tokens are counted; `sample_prompt` is what a report's sample begins with.

    Called from the train thread only. Build one with `load_task`."""

    def model(self) -> nn.Module:
        """Return a new model on the CPU, in fp32. Its parameters depend on the run's seed alone:
        each call and worker gets the same values, whatever torch's global generator, which stays as
        it was."""

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        """Yield the batches of a split from `cursor` on, without end. Args: split: 'train' or
        'validation'; no sample of one split holds text of the other."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of the batch: fp32 scalar with its graph, on the model's device."""


@runtime_checkable
class ExportsToHuggingFace(Protocol):
    """A task whose model has a class in transformers."""

    def to_huggingface(self, model: nn.Module, folder: Path) -> nn.Module:
        """Write `config.json`, and what else belongs there, to the folder. Return the model whose
        values are stored beside it, under the names of that class: `model` itself, or another where
        adapters are merged."""


@runtime_checkable
class OptimizesItself(Protocol):
    """A task that has an optimizer of its own, where `[inner] optimizer` is `auto`."""

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer over all of these; its rates are the peaks of `[inner] schedule`."""


@runtime_checkable
class SchedulesItself(Protocol):
    """A task that has a schedule of learning rates of its own, instead of `[inner] schedule`."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a scheduler, whose `step` is called after each step of the run's schedule."""


@runtime_checkable
class SharesSamples(Protocol):
    """A task whose training samples the peers can share out: `[task] data` may be `leased`."""

    def loader(self) -> DataLoader[Any]:
        """Return a loader of all training samples, the same on every peer. Its batches are pairs of
        inputs and targets, `len(targets)` samples each. A random order is replaced by one that
        follows from the run's seed and the epoch."""


def next_batch(batches: Iterator[Batch], split: str) -> Batch:
    """Takes the next batch of a task's split. Raises TaskError: there is none."""
    if (batch := next(batches, None)) is None:
        raise TaskError(
            f"the task's {split!r} batches have ended; let batches() go on without end, "
            "from the first again if need be"
        )
    return batch


@runtime_checkable
class Measures(Protocol):
    """A task with figures of its own, such as accuracy, beside the validation loss."""

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor | float]:
        """Return figures of a held-out batch by name, scalars; their means are told. Called without
        gradients, the model in evaluation mode, both on its device."""


@runtime_checkable
class Warns(Protocol):
    """A task that has something to tell of its samples, such as of files that it left out."""

    warnings: Sequence[str]


@runtime_checkable
class Generates(Protocol):
    """A task whose model can continue a text."""

    def generate(
        self, model: nn.Module, prompt: str, n_tokens: int, temperature: float, seed: int
    ) -> str:
        """Return the `n_tokens` tokens that the model puts after `prompt` (the prompt excluded)."""


@runtime_checkable
class Streams(Protocol):
    """A task that `Generates`, and gives the text away while it is made."""

    def stream(
        self, model: nn.Module, prompt: str, n_tokens: int, temperature: float, seed: int
    ) -> Iterator[str]:
        """Yield pieces of what `generate` returns, as they come."""


class StageModule(nn.Module, ABC):
    """The part of a model that one stage holds, whose parameters have the names of the whole model.

    Only stage 0 has what is outside the layers (embedding, final norm, head), and with it `embed`
    and `loss`. Shapes: B batch, T time, D hidden size."""

    @abstractmethod
    def embed(self, batch: Batch) -> Tensor:
        """Return the hidden states that enter the first layer: (B, T, D), fp32; stage 0 only."""

    @abstractmethod
    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states after this stage's own layers: (B, T, D), as `hidden`."""

    @abstractmethod
    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the batch's mean loss by the final norm and the head: scalar; stage 0 only."""


@runtime_checkable
class Staged(Protocol):
    """A task whose model can be cut into stages.

    Each layer must add to what enters it (a residual block), so that it can be left out.

    With an attribute `activation_shape`, the (B, T, D) of what enters a layer with the largest
    batch, a stage refuses more samples, longer ones, and another width."""

    def layer_sizes(self) -> Sequence[int]:
        """Return the parameters of each layer that the model can be cut between, in order."""

    def outer_size(self) -> int:
        """Return the parameters of what stage 0 holds besides layers: embedding, norm, head."""

    def stage(self, first: int, last: int, *, outer: bool) -> StageModule:
        """Return new layers `first` to `last` on the CPU, in fp32, with the bits of `model()`.

        Args:
            first, last: layers from 0, both included; `first - 1` as the last for no layer.
            outer: whether the embedding, the final norm and the head come with them.

        Raises:
            ValueError: layers that the model does not have."""
