"""What a visit of each stage of a task's model takes on this machine."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from algorithms.codecs import codec_by_name
from algorithms.skippipe.partition import stage_layers
from worker.cli.plan_stages_links import Visits
from worker.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from worker.config import Config
    from worker.tasks import Batch, Staged, StageModule

_UNTIMED, _FEWEST, _MOST, _TIMED_S = 1, 3, 30, 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedModel:
    """A model cut into S stages.

    Args:
        visits: of each stage; None where not timed. The gradient of norm and head is part of stage
            0's backward, as in a run.
        activation_bytes: of one microbatch's hidden states, encoded.
        stage_parameters: of the largest stage.
    """

    visits: Visits | None
    activation_bytes: int
    stage_parameters: int


def staged_model(
    config: "Config", stages: int, codec: str, *, timed: bool, threads: int
) -> StagedModel:
    """Cuts the run's model, and times each stage on a batch of the run's own.

    Raises:
        TaskError: as `load_task`.
        UsageError: the task cannot be cut into so many stages.
    """
    import torch

    from worker.tasks import Cursor, Staged, load_task

    task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
    if not isinstance(task, Staged):
        raise UsageError(
            f"task {config.task.name!r} cannot be cut into stages: it has no layer_sizes(), "
            "outer_size() and stage(); add --forward-ms and --activation-bytes instead"
        )
    try:
        layers = stage_layers(task.layer_sizes(), task.outer_size(), stages)
    except ValueError as error:
        raise UsageError(
            f"--stages {stages}: {error}; take fewer, a larger --model, or --forward-ms and "
            "--activation-bytes of another model"
        ) from error
    batch = next(task.batches("train", Cursor(seed=config.run.seed, stream="plan")))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measured(task, layers, batch, codec, timed=timed)
    finally:
        torch.set_num_threads(before)


def _measured(
    task: "Staged", layers: list[tuple[int, int]], batch: "Batch", codec: str, *, timed: bool
) -> StagedModel:
    forward_s, backward_s, sizes = [], [], []
    hidden: Tensor | None = None
    loss_s = 0.0
    for stage, (first, last) in enumerate(layers):
        module = task.stage(first, last, outer=stage == 0)
        sizes.append(sum(parameter.numel() for parameter in module.parameters()))
        if hidden is None:
            hidden = module.embed(batch).detach()
            if timed:
                (loss_s,) = _timed(partial(_loss, module, hidden, batch))
        if timed:
            took_s = _timed(partial(_visit, module, hidden, batch if stage == 0 else None))
            forward_s.append(took_s[0])
            backward_s.append(took_s[1])
    assert hidden is not None, "there is a stage 0"
    visits = Visits(
        forward_s=np.array(forward_s),
        backward_s=np.array(backward_s),
        loss_s=np.full(len(layers), loss_s),
    )
    return StagedModel(
        visits=visits if timed else None,
        activation_bytes=codec_by_name(codec).encoded_bytes(hidden.numel()),
        stage_parameters=max(sizes),
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
