"""Learning rates that follow the run: a peer that joins under way goes on where the others are."""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau

from murmuration.worker.errors import UsageError


def catch_up(schedulers: Iterable[Any], step: int, every: int) -> None:
    """Steps schedulers to where a run of this step is; none that is there or further.

    Args:
        schedulers: of torch's, or accelerate's around these.
        every: optimizer steps between two steps of a scheduler.

    Raises:
        UsageError: one does not follow the position in a run, or `every` is below 1.
    """
    if every < 1:
        raise UsageError(f"every={every}: a scheduler steps after one optimizer step or more")
    for each in schedulers:
        inner, times = each, 1
        while hasattr(inner, "scheduler"):  # accelerate's takes a step for each process
            if not getattr(inner, "split_batches", True) and dist.is_initialized():
                times *= dist.get_world_size()
            inner = inner.scheduler
        advance(inner, step // every * times - _position(inner))


def advance(scheduler: Any, times: int) -> None:
    """Steps a scheduler so often."""
    if times <= 0:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer has stepped in between
        for _ in range(times):
            scheduler.step()


def follows_position(scheduler: Any) -> bool:
    """Whether a scheduler knows its learning rate by the number of its steps."""
    return not isinstance(scheduler, ReduceLROnPlateau) and _steps_of(scheduler) is not None


def _position(scheduler: Any) -> int:
    """The steps that it has taken. Raises UsageError."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau follows a loss and not the position in the run, so it cannot catch "
            "up: leave it out here, or take a schedule by steps"
        )
    if (steps := _steps_of(scheduler)) is None:
        raise UsageError(
            f"{type(scheduler).__name__} has no last_epoch, so nobody knows how far it is: step it "
            "by swarm.step"
        )
    return steps


def _steps_of(scheduler: Any) -> int | None:
    chained = getattr(scheduler, "_schedulers", None)  # torch's ChainedScheduler has no count
    if getattr(scheduler, "last_epoch", None) is None and chained:
        return _steps_of(chained[0])
    steps = getattr(scheduler, "last_epoch", None)
    return steps if isinstance(steps, int) else None
