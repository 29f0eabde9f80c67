"""What the run's model takes on this machine: a step of it, or each layer and so each stage."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.skippipe.pipeline import Floats, stage_layers
from murmuration.algorithms.utilization import Workload, workload_of
from murmuration.worker.errors import UsageError
from murmuration.worker.pipeline.part import Part, cut_of_run, part_of
from murmuration.worker.pipeline.stages_config import StagesConfig, cut_of
from murmuration.worker.tasks import Batch, Cursor, Staged, StageModule
from murmuration.worker.training.inbox import Mailbox
from murmuration.worker.training.kseed import seed_space_of

if TYPE_CHECKING:
    from murmuration.worker.config import Config

StageBounds = Sequence[tuple[int, int]]  # the first and the last layer of each, both included

_SWEEPS = 2  # the cut that the first one asks for is judged by the second
_WORTH = 0.05  # of the slowest stage


def run_workload(config: "Config", step_s: float | None, threads: int) -> Workload:
    """The run's own task, timed where no time is given.

    With `kseed` it is the vector of coefficients that travels. Raises as `task_of` and `part_of`.
    """
    from murmuration.worker.config import task_of

    task = task_of(config)
    part = part_of(task, config)
    parameters = {n: p.numel() for n, p in part.module.named_parameters() if p.requires_grad}
    if step_s is None:
        step_s = _timed_step_s(config, task, part, threads)
    workload = workload_of(parameters, step_s)
    space = seed_space_of(part.module)
    return workload if space is None else replace(workload, ddp_parameters=space.elements)


def _timed_step_s(config: "Config", task: Any, part: Part, threads: int) -> float:
    """The median of some real inner steps, in seconds."""
    cursor = Cursor(seed=config.run.seed, stream="plan")
    replica = part.replica(task, config, cursor, Mailbox())
    numbers = itertools.count(1)

    def step() -> tuple[float]:
        began_s, number = time.perf_counter(), next(numbers)
        replica.inner_step(number, replica.backward(number))
        return (time.perf_counter() - began_s,)

    with _torch_threads(threads):
        (step_s,) = _medians(step, most=100, enough_s=1.0)
    return step_s


def _medians(run: Callable[[], tuple[float, ...]], most: int, enough_s: float) -> list[float]:
    """Of the seconds that runs say they took, at least 3 and then until it is enough."""
    run()
    took_s: list[tuple[float, ...]] = []
    while len(took_s) < most and (len(took_s) < 3 or sum(map(sum, took_s)) < enough_s):
        took_s.append(run())
    return [statistics.median(each) for each in zip(*took_s, strict=True)]


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Torch computes with this many meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------- in stages


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """Layers cut into S stages. Args: layers, visit_s: how many, and all that a microbatch takes
    of each stage."""

    layers: tuple[int, ...]
    visit_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StageCuts:
    """The run's own cut and the one with the fastest slowest stage. Layers are timed in two sweeps:
    what suits only the noise of the first is not better."""

    own: StageCut
    from_settings: bool
    measured: StageCut

    @property
    def better(self) -> StageCut | None:
        """What to take instead of the run's own; None where that is about as fast."""
        faster = max(self.measured.visit_s) < (1 - _WORTH) * max(self.own.visit_s)
        return self.measured if faster else None

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self.own),
            "source": "settings" if self.from_settings else "parameters",
            "better": None if self.better is None else asdict(self.better),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedModel:
    """A model that is cut into S stages.

    Args:
        stage_parameters: of the largest stage.
        activation_bytes: of one microbatch's hidden states, encoded.
        times_s: forward, backward and loss of each stage, shape (S, 3), the loss on stage 0; None
            where not timed.
        cuts: None where not timed.
    """

    stage_parameters: int
    activation_bytes: int
    times_s: Floats | None = None
    cuts: StageCuts | None = None


def staged_model(config: "Config", stages: int, *, timed: bool, threads: int) -> StagedModel:
    """Cuts the run's model, and times each layer on a batch of the run's own.

    Raises:
        TaskError: as `load_task`.
        ConfigError, UsageError: the task cannot be cut into these stages.
    """
    from murmuration.worker.config import task_of

    task = task_of(config)
    if not isinstance(task, Staged):
        raise UsageError(
            f"task {config.task.name!r} cannot be cut into stages: it has no layer_sizes(), "
            "outer_size() and stage(); add --forward-ms and --activation-bytes instead"
        )
    own = config.stages if config.stages.count == stages else StagesConfig(count=stages)
    try:
        cut = cut_of_run(task, config) if own.layers else cut_of(task, own)
    except ValueError as error:
        raise UsageError(
            f"--stages {stages}: {error}; take fewer, a larger model, or --forward-ms and "
            "--activation-bytes of another model"
        ) from error
    batch = next(task.batches("train", Cursor(seed=config.run.seed, stream="plan")))
    with _torch_threads(threads):
        outer = task.stage(0, -1, outer=True)
        hidden = outer.embed(batch).detach()
        sweeps = [_sweep(task, outer, hidden, batch) for _ in range(_SWEEPS if timed else 0)]
    sizes = np.array([*task.layer_sizes(), task.outer_size()])
    model = StagedModel(
        stage_parameters=int(_of_stages(sizes, cut).max()),
        activation_bytes=codec_by_name(config.stages.activations).encoded_bytes(hidden.numel()),
    )
    if not timed:
        return model
    cuts = compared_cuts(cut, bool(own.layers), *sweeps)
    return replace(model, times_s=_of_stages(sweeps[-1], cut), cuts=cuts)


def compared_cuts(
    own: StageBounds, from_settings: bool, chosen_by: Floats, judged_by: Floats
) -> StageCuts:
    """Args: chosen_by, judged_by: of two sweeps, as `_sweep` has them."""
    visits_s = chosen_by.sum(axis=1).tolist()

    def told(cut: StageBounds) -> StageCut:
        taken_s = _of_stages(judged_by, cut).sum(axis=1).tolist()
        layers = tuple(last - first + 1 for first, last in cut)
        return StageCut(layers=layers, visit_s=tuple(taken_s))

    measured = stage_layers(visits_s[:-1], visits_s[-1], len(own))
    return StageCuts(own=told(own), from_settings=from_settings, measured=told(measured))


def _of_stages(costs: Floats, cut: StageBounds) -> Floats:
    """Adds up the rows of each stage's layers, and for stage 0 the last: what it holds besides."""
    stages = np.array([costs[first : last + 1].sum(axis=0) for first, last in cut])
    stages[0] += costs[-1]
    return stages


def _sweep(task: Staged, outer: StageModule, hidden: torch.Tensor, batch: Batch) -> Floats:
    """Seconds of forward, backward and loss of each layer, and of what stage 0 holds besides them.

    One layer after another, so that no more than one is in memory. Shape (layers + 1, 3).
    """
    rows = []
    for index in range(len(task.layer_sizes())):
        module = task.stage(index, index, outer=False)
        rows.append([*_visit_s(module, hidden, None), 0.0])
    rows.append([*_visit_s(outer, hidden, batch), *_loss_s(outer, hidden, batch)])
    return np.array(rows)


def _visit_s(module: StageModule, hidden: torch.Tensor, batch: Batch | None) -> list[float]:
    """(forward, backward with its forward again).

    Args:
        batch: of stage 0, which embeds; its backward has the gradient of norm and head in it.
    """

    def visit() -> tuple[float, float]:
        module.zero_grad(set_to_none=True)
        begun_s = time.perf_counter()
        entered = hidden.clone().requires_grad_() if batch is None else module.embed(batch)
        left: Any = module(entered)
        turned_s = time.perf_counter()
        if batch is not None:
            loss: Any = module.loss(hidden, batch)
            loss.backward()
        left.backward(left.detach())
        return turned_s - begun_s, time.perf_counter() - begun_s

    return _medians(visit, most=30, enough_s=0.2)


def _loss_s(module: StageModule, hidden: torch.Tensor, batch: Batch) -> list[float]:
    """The loss with the gradient of what enters it."""

    def loss() -> tuple[float]:
        begun_s = time.perf_counter()
        entered = hidden.clone().requires_grad_()
        torch.autograd.grad(module.loss(entered, batch), [entered])
        return (time.perf_counter() - begun_s,)

    return _medians(loss, most=30, enough_s=0.2)
