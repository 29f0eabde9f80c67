"""A whole run in one process, as `tests.support.specification` has it, and what the run sends.

Real workers end with the same bits (`make parity`), so what else the machine does changes no loss.
A batched run computes the gradients of all workers in one pass, and differs by rounding alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.fragments import Fragment, partition
from murmuration.algorithms.plan import Plan
from murmuration.worker.config import Config, load_config
from murmuration.worker.pipeline.part import Part, part_of
from murmuration.worker.tasks import Batch, Cursor, Task, load_task, next_batch
from murmuration.worker.training.evaluation import validate
from murmuration.worker.training.export import load_initial
from murmuration.worker.training.mailbox import Mailbox
from murmuration.worker.training.model import schema_of, trained_parameters
from murmuration.worker.training.optimizers import KSEED
from murmuration.worker.training.replica import InnerReplica
from tests.support import specification


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run to train: of `workers`, or of one alone where the plan exchanges nothing.

    Args:
        preset: of the plan; settings: as `--set` takes them.
        steps: inner steps of each worker.
        device: where all of them train.
        mean: what is taken for the mean pseudo-gradient, one of `MEANS`.
        swarm: how many of the workers there are in each of some equal parts of the run.
        batched: one pass has the gradients of all workers; `compiled` needs a C++ compiler."""

    preset: str
    settings: tuple[str, ...] = ()
    steps: int
    workers: int
    seed: int
    device: str = "cpu"
    mean: str = "plain"
    swarm: tuple[int, ...] = ()
    batched: Literal["no", "yes", "compiled"] = "no"

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
    outer: Mapping[str, Sequence[specification.Outer]]

    def anchors(self, peer: str = "w0") -> list[Tensor]:
        """The anchors that a worker ends with, by fragment: 1-D fp32."""
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
    def sent_bytes(self) -> float:
        training = self.training
        return sent_bytes(self.plan, self.fragments, training.steps, training.workers)


def train(training: Training) -> Trained:
    """Trains in this process, on one thread."""
    if training.device == "cpu":
        torch.set_num_threads(1)
    config = training.config
    plan = config.plan
    alone = plan.exchange == "none"
    if alone:  # the mean of one worker's gradients is its gradient
        plan = replace(plan, exchange="mean", payload="gradient", inner_steps=1)
    task = load_task(config.task.name, seed=training.seed, options=config.task.options)
    peers = [f"w{number}" for number in range(1 if alone else training.workers)]
    parts, batch = [_part(task, config, training.device) for _ in peers], None
    if training.batched != "no":
        modules = [part.module for part in parts]
        batch = GradientBatch(task, modules, compiled=training.batched == "compiled")
    inner = [
        part.replica(task, config, Cursor(seed=training.seed, stream=peer), Mailbox())
        for peer, part in zip(peers, parts, strict=True)
    ]
    replicas = inner if batch is None else batch.replicas(inner)
    fragments = partition(schema_of(inner[0].model), plan.fragments, plan.pattern)
    named = dict(zip(peers, replicas, strict=True))
    run = _Run(plan, fragments, named, training.steps)
    run.mean, run.swarm = MEANS[training.mean], training.swarm or (len(peers),)
    run.inner = dict(zip(peers, inner, strict=True))
    if batch is not None:
        batch.present = lambda: len(run.peers)
    return Trained(
        training=training,
        plan=config.plan,
        task=task,
        replica=inner[0],
        fragments=tuple(fragments),
        outer=run.train(),
    )


def _part(task: Task, config: Config, device: str) -> Part:
    part = part_of(task, config)
    part.module.to(device)
    if config.task.init and config.inner.optimizer != KSEED:  # that has them already
        load_initial(part.module, Path(config.task.init), task)
    return part


class GradientBatch:
    """One pass for the gradients of several models that are alike; each has its own optimizer.

    Args:
        modules: on one device, without running statistics. Their parameters become parts of
            stacked ones.

    Attributes:
        present: how many of them, the first ones, train at present."""

    present: Callable[[], int]

    def __init__(self, task: Task, modules: Sequence[nn.Module], *, compiled: bool) -> None:
        named = [trained_parameters(module) for module in modules]
        self._stacked = {
            name: torch.stack([each[name].detach() for each in named]).requires_grad_()
            for name in named[0]
        }
        for place, parameters in enumerate(named):
            for name, parameter in parameters.items():
                parameter.data = self._stacked[name].detach()[place]
        self._losses = _compiled_losses(task, modules[0]) if compiled else _losses(task, modules[0])
        self._inner: Sequence[InnerReplica] = ()
        self._step = 0
        self._gradients: Sequence[Tensor] = ()

    def replicas(self, inner: Sequence[InnerReplica]) -> list["_BatchedReplica"]:
        self._inner = inner
        return [_BatchedReplica(self, place, each) for place, each in enumerate(inner)]

    def gradients(self, step: int, place: int) -> dict[str, Tensor]:
        """At the step's batch, of one of the models."""
        if step != self._step:
            count = self.present()
            batches = [next_batch(each.batches, "train") for each in self._inner[:count]]
            stacked = {name: each[:count] for name, each in self._stacked.items()}
            inputs, targets = (
                torch.stack([getattr(batch, field) for batch in batches])
                for field in ("inputs", "targets")
            )
            with sdpa_kernel(SDPBackend.MATH):  # others have no rule for vmap
                losses = self._losses(stacked, inputs, targets)
            found = torch.autograd.grad(losses.sum(), list(self._stacked.values()))
            # AdamW's fused kernel takes a gradient to be laid out as its parameter is.
            self._step, self._gradients = step, [each.contiguous() for each in found]
        return {n: each[place] for n, each in zip(self._stacked, self._gradients, strict=True)}


Losses = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""The losses of (stacked parameters, stacked inputs, stacked targets), one for each model."""

_COMPILED: dict[tuple[tuple[str, torch.Size], ...], Losses] = {}


def _compiled_losses(task: Task, model: nn.Module) -> Losses:
    """Compiled once for all runs of a process whose models are alike."""
    alike = tuple((name, each.shape) for name, each in trained_parameters(model).items())
    if alike not in _COMPILED:
        _COMPILED[alike] = torch.compile(_losses(task, model), dynamic=False)
    return _COMPILED[alike]


def _losses(task: Task, model: nn.Module) -> Losses:
    module = _Loss(task, model)

    def loss(parameters: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        own = {f"model.{name}": each for name, each in parameters.items()}
        return functional_call(module, own, (inputs, targets))

    return vmap(loss)


class _Loss(nn.Module):
    """A task's loss as a module's output."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(self.model, Batch(inputs, targets, Cursor(seed=0, stream="")))


@dataclass(frozen=True)
class _BatchedReplica:
    """One of a batch; implements `specification.TrainedReplica`."""

    batch: GradientBatch
    place: int
    inner: InnerReplica

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self.inner.parameters

    def backward(self, step: int) -> Mapping[str, Tensor]:
        return self.batch.gradients(step, self.place)

    def inner_step(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        self.inner.inner_step(step, gradients)


Mean = Callable[[Fragment, Sequence[Tensor]], Tensor]
"""A mean of contributions as all decode them, before it is encoded."""


class _Run(specification.ReferenceRun):
    """A run that may take another mean than the plan's, and from which peers may leave."""

    mean: Mean | None
    swarm: tuple[int, ...]
    inner: Mapping[str, InnerReplica]

    def aggregate(self, index: int, arrived: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        if self.mean is None:
            return super().aggregate(index, arrived, factors)
        return self.mean(self.fragments[index], arrived)

    def outer_rounds(self, step: int) -> None:
        """Peers leave and join where nothing is in flight: the last ones. One that joins takes over
        the first one's anchors and outer momenta, and begins without moments of its own."""
        super().outer_rounds(step)
        part = min(step * len(self.swarm) // self.steps, len(self.swarm) - 1)
        before, now = len(self.peers), self.swarm[part]
        if before == now or self.in_flight:
            return
        self.peers = sorted(self.replicas)[:now]
        for peer in self.peers[before:]:
            self.inner[peer].reset_moments()
            self.outer[peer] = [replace(state) for state in self.outer[self.peers[0]]]
            for fragment, state in zip(self.fragments, self.outer[peer], strict=True):
                self.write(peer, fragment, state.anchor)


def radial(fragment: Fragment, arrived: Sequence[Tensor]) -> Tensor:
    """Gives each tensor the mean norm, in the direction of the mean direction.

    Ref: arXiv:2604.21428 (Decoupled DiLoCo)."""
    found = torch.empty_like(arrived[0])
    parts = [fragment.views(each) for each in arrived]
    for name, values in fragment.views(found).items():
        norms = [torch.linalg.vector_norm(part[name]) for part in parts]
        pairs = zip(parts, norms, strict=True)
        direction = torch.stack([part[name] / n.clamp(min=1e-30) for part, n in pairs]).sum(0)
        far = torch.linalg.vector_norm(direction).clamp(min=1e-30)
        values.copy_(direction * (torch.stack(norms).mean() / far))
    return found


MEANS: Mapping[str, Mean | None] = {"plain": None, "radial": radial}


def sent_bytes(plan: Plan, fragments: Sequence[Fragment], steps: int, workers: int) -> float:
    """The bytes, before zstd, that a worker sends in a run, but for an exact mean at its end."""
    if plan.exchange == "none":
        return 0.0
    schedule = plan.schedule(fragments=len(fragments), steps=steps)
    pairs = plan.exchange == "pairs"  # each gives its partner all, where a mean gives each its part
    back = plan.anchor_codec if pairs else plan.reduction_codec
    codecs, share = (codec_by_name(plan.codec), codec_by_name(back)), (workers - 1) / workers
    return (1 if pairs else share) * sum(
        schedule.rounds(each.index) * sum(codec.encoded_bytes(each.elements) for codec in codecs)
        for each in fragments
    )


def last_mean_bytes(plan: Plan, elements: int, workers: int) -> float:
    """The bytes that each worker sends in the exact mean that ends a run, if it ends with one.
    These are fp32 both ways, as much as two steps of data-parallel training in bf16."""
    return 2 * (workers - 1) / workers * 4 * elements if plan.consensus else 0.0
