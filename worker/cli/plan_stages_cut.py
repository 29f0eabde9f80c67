"""Which layers to which stage: as the run has them, and by what they take and need here."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.skippipe.partition import StageMemory, stage_cost, stage_layers
from murmuration.worker.cli.plan_measurements import VisitTimes
from murmuration.worker.cli.timing import Repetitions, torch_threads
from murmuration.worker.errors import UsageError
from murmuration.worker.pipeline.config import StagesConfig, cut_of
from murmuration.worker.pipeline.stage_call import call_bytes

if TYPE_CHECKING:
    from murmuration.worker.config import Config
    from murmuration.worker.tasks import Batch, Staged, StageModule

_VISITS = Repetitions(untimed=1, fewest=3, most=30, enough_s=0.2)
_SWEEPS = 2  # the cut that the first one asks for is judged by the second
_WORTH = 0.05  # of the slowest stage
_FP32_BYTES = 4
_TRAINED = 4  # copies: the parameters, their gradient, AdamW's two moments

StageBounds = Sequence[tuple[int, int]]  # the first and the last layer of each, both included


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Of a layer, or of what stage 0 holds besides layers.

    Args:
        forward_s: of a visit.
        backward_s: of a visit, with its forward again, and with the gradient of norm and head.
        loss_s: with the gradient of what enters it; of a layer none.
        graph_bytes: what autograd keeps from that forward to that backward, without parameters.
    """

    forward_s: float
    backward_s: float
    loss_s: float = 0.0
    graph_bytes: int

    @property
    def visit_s(self) -> float:
        """All that a microbatch takes of it."""
        return self.forward_s + self.backward_s + self.loss_s


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All of a model, timed once. Args: layers: in order; outer: what stage 0 holds besides."""

    layers: tuple[LayerCost, ...]
    outer: LayerCost

    @property
    def visits_s(self) -> list[float]:
        """All that a microbatch takes of each layer."""
        return [cost.visit_s for cost in self.layers]


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model that is cut into S stages.

    Args:
        cut: as the run has it.
        from_settings: whether it is in the run's settings; else it is by parameters.
        layer_sizes, outer_size: parameters.
        activation_bytes: of one microbatch's hidden states, encoded.
        sweeps: what all layers took, once after the other; empty where not timed.
    """

    cut: StageBounds
    from_settings: bool
    layer_sizes: tuple[int, ...]
    outer_size: int
    activation_bytes: int
    sweeps: tuple[Sweep, ...]

    @property
    def stage_parameters(self) -> int:
        """Of the largest stage."""
        return max(
            sum(self.layer_sizes[first : last + 1]) + (self.outer_size if stage == 0 else 0)
            for stage, (first, last) in enumerate(self.cut)
        )

    def visits(self) -> VisitTimes:
        """Of each stage of the run's own cut: what its layers took together in the last sweep."""
        layers, outer, cut = self.sweeps[-1].layers, self.sweeps[-1].outer, self.cut
        return VisitTimes(
            np.array(of_stages([own.forward_s for own in layers], outer.forward_s, cut)),
            np.array(of_stages([own.backward_s for own in layers], outer.backward_s, cut)),
            np.full(len(cut), outer.loss_s),
        )


def of_stages(costs: Sequence[float], outer: float, cut: StageBounds) -> tuple[float, ...]:
    """What each stage costs by its layers, and the first by what it holds besides them."""
    return tuple(stage_cost(costs, outer, n, *layers) for n, layers in enumerate(cut))


def staged_model(
    config: "Config", stages: int, codec: str, *, timed: bool, threads: int
) -> StagedModel:
    """Cuts the run's model, and times each layer on a batch of the run's own.

    Raises:
        TaskError: as `load_task`.
        ConfigError, UsageError: the task cannot be cut into these stages.
    """
    from murmuration.worker.config import task_of
    from murmuration.worker.pipeline.part import cut_of_run
    from murmuration.worker.tasks import Cursor, Staged

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
            f"--stages {stages}: {error}; take fewer, a larger --model, or --forward-ms and "
            "--activation-bytes of another model"
        ) from error
    batch = next(task.batches("train", Cursor(seed=config.run.seed, stream="plan")))
    with torch_threads(threads):
        outer = task.stage(0, -1, outer=True)
        hidden = outer.embed(batch).detach()
        sweeps = [_sweep(task, outer, hidden, batch) for _ in range(_SWEEPS if timed else 0)]
    return StagedModel(
        cut=tuple(cut),
        from_settings=bool(own.layers),
        layer_sizes=tuple(task.layer_sizes()),
        outer_size=task.outer_size(),
        activation_bytes=codec_by_name(codec).encoded_bytes(hidden.numel()),
        sweeps=tuple(sweeps),
    )


def _sweep(task: "Staged", outer: "StageModule", hidden: Tensor, batch: "Batch") -> Sweep:
    """One layer after another, so that no more than one is in memory."""
    layers = []
    for index in range(len(task.layer_sizes())):
        module = task.stage(index, index, outer=False)
        forward_s, backward_s = _VISITS.medians(partial(_visit, module, hidden, None))
        kept = _graph_bytes(module, hidden, module)
        layers.append(LayerCost(forward_s=forward_s, backward_s=backward_s, graph_bytes=kept))
    forward_s, backward_s = _VISITS.medians(partial(_visit, outer, hidden, batch))
    (loss_s,) = _VISITS.medians(partial(_loss, outer, hidden, batch))
    return Sweep(
        layers=tuple(layers),
        outer=LayerCost(
            forward_s=forward_s,
            backward_s=backward_s,
            loss_s=loss_s,
            graph_bytes=_graph_bytes(outer, hidden, partial(outer.loss, batch=batch)),
        ),
    )


def _visit(module: "StageModule", hidden: Tensor, batch: "Batch | None") -> tuple[float, float]:
    """(forward, backward with its forward again).

    Args:
        batch: of stage 0, which embeds; its backward has the gradient of norm and head in it.
    """
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


def _loss(module: "StageModule", hidden: Tensor, batch: "Batch") -> tuple[float]:
    """The loss with the gradient of what enters it."""
    begun_s = time.perf_counter()
    entered = hidden.clone().requires_grad_()
    torch.autograd.grad(module.loss(entered, batch), [entered])
    return (time.perf_counter() - begun_s,)


def _graph_bytes(module: "StageModule", hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> int:
    """What autograd keeps of a forward with the module, whose parameters are left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(values: Tensor) -> Tensor:
        storage = values.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return values

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
        forward(hidden.clone().requires_grad_())
    return sum(kept.values())


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """One cut into S stages.

    Args:
        layers: how many each stage has.
        visit_s: all that a microbatch takes of each stage, by the second sweep.
        memory_bytes: that each stage needs.
    """

    layers: tuple[int, ...]
    visit_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]

    @property
    def slowest_s(self) -> float:
        return max(self.visit_s)


@dataclass(frozen=True, kw_only=True)
class StageCuts:
    """Layers are timed in two sweeps: what suits only the noise of the first is not better.

    Args:
        own: as the run has it; from_settings: as there, else by parameters.
        measured: with the least slowest stage of those that fit, by the first sweep.
        limit_bytes: for a stage; None for no bound.
    """

    own: StageCut
    from_settings: bool
    measured: StageCut
    limit_bytes: int | None

    @property
    def own_fits(self) -> bool:
        return self.limit_bytes is None or max(self.own.memory_bytes) <= self.limit_bytes

    @property
    def better(self) -> StageCut | None:
        """What to take instead of the run's own; None where it fits and is as fast, about."""
        faster = self.measured.slowest_s < (1 - _WORTH) * self.own.slowest_s
        return self.measured if faster or not self.own_fits else None

    @property
    def setting(self) -> str:
        """That makes the measured cut the run's."""
        return f"--set 'stages.layers=[{','.join(map(str, self.measured.layers))}]'"

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self.own),
            "source": "settings" if self.from_settings else "parameters",
            "limit_bytes": self.limit_bytes,
            "fits": self.own_fits,
            "better": None if self.better is None else asdict(self.better),
        }


def cuts_of(model: StagedModel, *, held: int, committed: int, limit_bytes: int | None) -> StageCuts:
    """Compares the run's own cut to the best one.

    Args:
        model: what is cut, timed.
        held: microbatches in flight on a peer.
        committed: copies of the parameters that a peer keeps beside what it trains.
        limit_bytes: for a stage.

    Raises:
        UsageError: no cut fits.
    """
    chosen_by, judged_by = model.sweeps
    each_bytes = _FP32_BYTES * (_TRAINED + committed)
    memory = StageMemory(
        layer_bytes=[
            each_bytes * size + cost.graph_bytes
            for size, cost in zip(model.layer_sizes, judged_by.layers, strict=True)
        ],
        outer_bytes=each_bytes * model.outer_size + judged_by.outer.graph_bytes,
        # What has come back of visits stays for the iteration, as much again.
        stage_bytes=2 * held * call_bytes(model.activation_bytes),
        limit_bytes=limit_bytes or 0,
    )

    def told(cut: StageBounds) -> StageCut:
        return StageCut(
            layers=tuple(last - first + 1 for first, last in cut),
            visit_s=of_stages(judged_by.visits_s, judged_by.outer.visit_s, cut),
            memory_bytes=tuple(memory.of_stage(n, *layers) for n, layers in enumerate(cut)),
        )

    bound = None if limit_bytes is None else memory
    try:
        found = stage_layers(chosen_by.visits_s, chosen_by.outer.visit_s, len(model.cut), bound)
    except ValueError as error:
        raise UsageError(
            f"--stage-mib: {error}; take more stages, fewer microbatches in flight (--memory), or "
            "smaller batches"
        ) from error
    return StageCuts(
        own=told(model.cut),
        from_settings=model.from_settings,
        measured=told(found),
        limit_bytes=limit_bytes,
    )
