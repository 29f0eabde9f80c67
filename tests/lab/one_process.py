"""A whole run in one process, as `murmuration.algorithms.reference` has it, and what the run sends.

Real workers end with the same bits (`make parity`), so what else the machine does changes no loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from murmuration.algorithms import reference
from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.fragments import Fragment, partition
from murmuration.algorithms.plan import Plan
from murmuration.worker.config import Config, load_config
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import Cursor, Task, load_task
from murmuration.worker.training.evaluation import validate
from murmuration.worker.training.export import load_initial
from murmuration.worker.training.inbox import Mailbox
from murmuration.worker.training.model import schema_of, trained_parameters
from murmuration.worker.training.optimizers import KSEED
from murmuration.worker.training.replica import InnerReplica


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run to train: of `workers`, or of one alone where the plan exchanges nothing.

    Args:
        preset: of the plan; settings: as `--set` takes them.
        steps: inner steps of each worker.
        device: where all of them train.
    """

    preset: str
    settings: tuple[str, ...] = ()
    steps: int
    workers: int
    seed: int
    device: str = "cpu"

    @property
    def config(self) -> Config:
        """Raises ConfigError: the settings do not go together."""
        settings = (f"run.steps={self.steps}", f"run.seed={self.seed}", *self.settings)
        return load_config(None, settings, self.preset)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that is over. Args: outer: the states of all fragments, by worker."""

    training: Training
    plan: Plan
    task: Task
    replica: InnerReplica
    fragments: tuple[Fragment, ...]
    outer: Mapping[str, Sequence[reference.Outer]]

    def anchors(self, peer: str = "w0") -> list[Tensor]:
        """What a worker ends with, by fragment: 1-D fp32."""
        return [state.anchor for state in self.outer[peer]]

    def loss_of(self, anchors: Sequence[Tensor], batches: int = 16) -> float:
        """The validation loss, in the task's unit, over so many batches."""
        parameters = self.replica.parameters
        for fragment, anchor in zip(self.fragments, anchors, strict=True):
            for name, value in fragment.views(anchor).items():
                parameters[name].copy_(value)
        found = validate(self.task, self.replica.model, self.training.seed, count=batches)
        assert found is not None, "there is no limit of time"
        return found.loss

    @property
    def sent(self) -> "Sent":
        """Of each worker in the whole run, an exact mean at its end left out."""
        training = self.training
        return sent(self.plan, self.fragments, training.steps, training.workers)


@dataclass(frozen=True)
class Sent:
    """What a worker sends, before zstd. Args: values: that the bytes stand for."""

    bytes: float
    values: float


def train(training: Training, prefetch: reference.AnchorPrefetch = reference.at_once) -> Trained:
    """Trains in this process, on one thread.

    Args:
        prefetch: with pairs, when each has the anchors of its next round's group.
    """
    if training.device == "cpu":
        torch.set_num_threads(1)
    config = training.config
    plan = config.plan
    alone = plan.exchange == "none"
    if alone:  # the mean of one worker's gradients is its gradient
        plan = replace(plan, exchange="mean", payload="gradient", inner_steps=1)
    task = load_task(config.task.name, seed=training.seed, options=config.task.options)
    replicas = {
        peer: _replica(task, config, Cursor(seed=training.seed, stream=peer), training.device)
        for peer in (f"w{number}" for number in range(1 if alone else training.workers))
    }
    schema = schema_of(replicas["w0"].model)
    fragments = partition(schema, plan.fragments, plan.pattern)
    outer = reference.train(plan, fragments, replicas, training.steps, head_starts=prefetch)
    return Trained(
        training=training,
        plan=config.plan,
        task=task,
        replica=replicas["w0"],
        fragments=tuple(fragments),
        outer=outer,
    )


def _replica(task: Task, config: Config, cursor: Cursor, device: str) -> InnerReplica:
    part = part_of(task, config)
    part.module.to(device)
    if config.task.init and config.inner.optimizer != KSEED:  # that has them already
        trained = {n: p.detach() for n, p in trained_parameters(part.module).items()}
        load_initial(part.module, Path(config.task.init), trained, task)
    return part.replica(task, config, cursor, Mailbox())


def sent(plan: Plan, fragments: Sequence[Fragment], steps: int, workers: int) -> Sent:
    """What each of the workers sends in the whole run, an exact mean at its end left out."""
    if plan.exchange == "none":
        return Sent(0.0, 0.0)
    schedule = plan.schedule(fragments=len(fragments), steps=steps)
    pairs = plan.exchange == "pairs"  # each gives its partner all, where a mean gives each its part
    back = plan.anchor_codec if pairs else plan.reduction_codec
    total = values = 0.0
    for fragment in fragments:
        share = (1 if pairs else (workers - 1) / workers) * schedule.rounds(fragment.index)
        for codec in (codec_by_name(plan.codec), codec_by_name(back)):
            total += share * codec.encoded_bytes(fragment.elements)
            values += share * fragment.elements
    return Sent(total, values)


def last_mean_bytes(plan: Plan, elements: int, workers: int) -> float:
    """What each of the workers sends in the exact mean that ends a run, if it ends with one: fp32
    both ways, as much as two steps of data-parallel training in bf16."""
    return 2 * (workers - 1) / workers * 4 * elements if plan.consensus else 0.0
