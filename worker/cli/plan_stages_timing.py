"""What a visit of each layer of a task's model takes on this machine, and holds meanwhile."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from algorithms.codecs import codec_by_name
from worker.errors import UsageError
from worker.pipeline.config import StagesConfig, cut_of

if TYPE_CHECKING:
    from torch import Tensor

    from worker.config import Config
    from worker.tasks import Batch, Staged, StageModule

_UNTIMED, _FEWEST, _MOST, _TIMED_S = 1, 3, 30, 0.2
_SWEEPS = 2  # the cut that the first one asks for is judged by the second


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Of a layer, or of what stage 0 holds besides layers.

    Args:
        forward_s: of a visit.
        backward_s: of a visit, with its forward anew, and with the gradient of norm and head.
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
        cut: the first and the last layer of each stage, both included, as the run has it.
        from_settings: whether it is in the run's settings; else it is by parameters.
        layer_sizes, outer_size: parameters.
        activation_bytes: of one microbatch's hidden states, encoded.
        sweeps: what all layers took, once after the other; empty where not timed.
    """

    cut: tuple[tuple[int, int], ...]
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


def staged_model(
    config: "Config", stages: int, codec: str, *, timed: bool, threads: int
) -> StagedModel:
    """Cuts the run's model, and times each layer on a batch of the run's own.

    Raises:
        TaskError: as `load_task`.
        ConfigError, UsageError: the task cannot be cut into these stages.
    """
    import torch

    from worker.config import task_of
    from worker.pipeline.part import cut_of_run
    from worker.tasks import Cursor, Staged

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
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outer = task.stage(0, -1, outer=True)
        hidden = outer.embed(batch).detach()
        sweeps = [_sweep(task, outer, hidden, batch) for _ in range(_SWEEPS if timed else 0)]
    finally:
        torch.set_num_threads(before)
    return StagedModel(
        cut=tuple(cut),
        from_settings=bool(own.layers),
        layer_sizes=tuple(task.layer_sizes()),
        outer_size=task.outer_size(),
        activation_bytes=codec_by_name(codec).encoded_bytes(hidden.numel()),
        sweeps=tuple(sweeps),
    )


def _sweep(task: "Staged", outer: "StageModule", hidden: "Tensor", batch: "Batch") -> Sweep:
    """One layer after another, so that no more than one is in memory."""
    layers = []
    for index in range(len(task.layer_sizes())):
        module = task.stage(index, index, outer=False)
        forward_s, backward_s = _timed(partial(_visit, module, hidden, None))
        kept = _graph_bytes(module, hidden, module)
        layers.append(LayerCost(forward_s=forward_s, backward_s=backward_s, graph_bytes=kept))
    forward_s, backward_s = _timed(partial(_visit, outer, hidden, batch))
    (loss_s,) = _timed(partial(_loss, outer, hidden, batch))
    return Sweep(
        layers=tuple(layers),
        outer=LayerCost(
            forward_s=forward_s,
            backward_s=backward_s,
            loss_s=loss_s,
            graph_bytes=_graph_bytes(outer, hidden, partial(outer.loss, batch=batch)),
        ),
    )


def _timed(run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """The medians of what some runs say they took, in seconds."""
    took_s: list[tuple[float, ...]] = []
    for count in range(_UNTIMED + _MOST):
        times_s = run()
        if count >= _UNTIMED:
            took_s.append(times_s)
        if len(took_s) >= _FEWEST and sum(map(sum, took_s)) >= _TIMED_S:
            break
    return tuple(statistics.median(each) for each in zip(*took_s, strict=True))


def _visit(module: "StageModule", hidden: "Tensor", batch: "Batch | None") -> tuple[float, float]:
    """(forward, backward with a forward anew). Args: batch: of stage 0, which embeds, and whose
    backward has the gradient of norm and head in it."""
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


def _loss(module: "StageModule", hidden: "Tensor", batch: "Batch") -> tuple[float]:
    """The loss with the gradient of what enters it."""
    import torch

    begun_s = time.perf_counter()
    entered = hidden.clone().requires_grad_()
    torch.autograd.grad(module.loss(entered, batch), [entered])
    return (time.perf_counter() - begun_s,)


def _graph_bytes(
    module: "StageModule", hidden: "Tensor", forward: Callable[["Tensor"], "Tensor"]
) -> int:
    """What autograd keeps of a forward with the module, whose parameters are left out."""
    import torch

    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(values: "Tensor") -> "Tensor":
        storage = values.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return values

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
        forward(hidden.clone().requires_grad_())
    return sum(kept.values())
