"""Which steps of optimizers are one step of the swarm.

torch tells of every optimizer's step in the process, before and after it. A step of the swarm is a
set of them in which no optimizer steps twice, so that the one that steps most often counts:

    one optimizer       a | a | a
    two                 a b | a b | a b
    a critic thrice     d | d | d g | d | d | d g

A copy of an optimizer, or another one over the same parameters, counts as the one that was given.
A set ends with the last of those that were in the one before. Only there are parameters moved:
elsewhere a gradient of before is still to be used. Where one of them does not step, as when a
`GradScaler` skips it, the next set makes up for what was due.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed as dist
from torch.optim import Optimizer, optimizer as hooks
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from murmuration.worker.errors import UsageError
from murmuration.worker.training.optimizers import advance

_in_a_swarm: set[int] = set()  # parameters, by id: one model may have several wrappers
before_entering: list[Callable[[], None]] = []  # what looks for swarms that were never left


class StepListener:
    """Is told of the steps. train thread only."""

    def _step_begins(self, *, in_closure: bool) -> None:
        """Before the first optimizer of a step. Args: in_closure: that one has a closure."""

    def _optimizer_joins(self, optimizer: Optimizer, *, late: bool) -> None:
        """Before another optimizer of the step. Args: late: of the step that has just ended."""

    def _step_ends(self, *, moves: bool) -> None:
        """After the last one. Args: moves: parameters may be moved; else the next step begins."""

    def _others_step(self, optimizer: Optimizer, tensors: int) -> None:
        """An optimizer steps that has parameters which are in no swarm, so many. Once."""


class OptimizerSteps:
    """Follows the steps of optimizers, and tells the listener. train thread only. Args: optimizers:
    the first step ends with the last of them; parameters: what is trained, by id."""

    def __init__(
        self, optimizers: Sequence[Optimizer], parameters: Iterable[int], listener: StepListener
    ) -> None:
        self._parameters, self._listener = frozenset(parameters), listener
        self._known: WeakSet[Optimizer] = WeakSet(optimizers)
        self._told: set[tuple[type[Optimizer], int]] = set()
        self._expected: set[Optimizer] = set(optimizers)  # those of the step before
        self._stepped: set[Optimizer] = set()
        self._within: set[Optimizer] = set()  # those whose step goes on: one may call another's
        self._any_ended = False

    @contextmanager
    def followed(self) -> Iterator["OptimizerSteps"]:
        """Follows all steps within the block. Raises UsageError: the parameters are in a swarm."""
        for look in before_entering:
            look()
        if not _in_a_swarm.isdisjoint(self._parameters):
            raise UsageError(
                "this model is in a swarm already: leave the first Swarm before the second begins; "
                "where it has no name any more, by murmuration.Swarm.leave_all()"
            )
        untraced: Any = torch.compiler.disable
        handles = [
            hooks.register_optimizer_step_pre_hook(untraced(self._before)),
            hooks.register_optimizer_step_post_hook(untraced(self._after)),
        ]
        _in_a_swarm.update(self._parameters)
        try:
            yield self
        finally:
            _in_a_swarm.difference_update(self._parameters)
            for handle in handles:
                handle.remove()

    def finish(self) -> None:
        if self._stepped - self._within:
            self._end(moves=True)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._counts(optimizer) or _is_within_step(optimizer):
            return
        there: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it so
        if there and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "optimizer.step() is in a CUDA graph, whose replays no swarm sees: capture the "
                "forward and backward pass alone, and let the optimizer step outside of the graph"
            )
        if optimizer in self._within:  # that one has failed
            self._stepped.discard(optimizer)
        if optimizer in self._stepped:
            self._end(moves=False)
        self._within.add(optimizer)
        known = optimizer in self._known
        self._known.add(optimizer)
        if self._stepped:
            self._stepped.add(optimizer)
            self._listener._optimizer_joins(optimizer, late=False)
        elif known and self._any_ended and optimizer not in self._expected:
            self._expected.add(optimizer)
            self._listener._optimizer_joins(optimizer, late=True)
        else:
            self._stepped.add(optimizer)
            closure = named.get("closure", args[1] if len(args) > 1 else None)
            self._listener._step_begins(in_closure=closure is not None)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if _is_within_step(optimizer):
            return
        self._within.discard(optimizer)
        if not self._within and self._stepped and self._expected <= self._stepped:
            self._end(moves=True)

    def _end(self, *, moves: bool) -> None:
        self._expected, self._stepped, self._any_ended = self._stepped, set(), True
        self._within.clear()  # a step that has failed has no end
        self._listener._step_ends(moves=moves)

    def _counts(self, optimizer: Optimizer) -> bool:
        """Tells whether it moves what the swarm trains; not where a `GradScaler` has it skip."""
        found: Any = getattr(optimizer, "found_inf", None)
        if found is not None and bool(found):
            return False
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        if (kind := (type(optimizer), len(tensors))) not in self._told:
            self._told.add(kind)
            free = [p for p in tensors if p.requires_grad and id(p) not in _in_a_swarm]
            if free:
                self._listener._others_step(optimizer, len(free))
        return any(id(each) in self._parameters for each in tensors)


def _is_within_step(optimizer: Optimizer) -> bool:
    callers = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code.co_name == "step")
    return any(frame.f_locals.get("self") is optimizer for frame in callers)


def is_scaled(optimizers: Iterable[Optimizer]) -> bool:
    return any(getattr(each, "grad_scale", None) is not None for each in optimizers)


def catch_up(schedulers: Iterable[Any], step: int, every: int) -> None:
    """Steps schedulers to where a run of this step is; none that is there or further. Args:
    schedulers: of torch's, or accelerate's around these; every: optimizer steps between two of
    theirs. Raises UsageError: one does not follow the position, or `every` is below 1."""
    if every < 1:
        raise UsageError(f"every={every}: a scheduler steps after one optimizer step or more")
    for each in schedulers:
        inner, times = each, 1
        while hasattr(inner, "scheduler"):  # accelerate's takes a step for each process
            if not getattr(inner, "split_batches", True) and dist.is_initialized():
                times *= dist.get_world_size()
            inner = inner.scheduler
        if isinstance(inner, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau follows a loss and not the position in the run, so it cannot "
                "catch up: leave it out here, or take a schedule by steps"
            )
        if (position := _steps_of(inner)) is None:
            raise UsageError(
                f"{type(inner).__name__} has no last_epoch, so nobody knows how far it is: step it "
                "by swarm.step"
            )
        advance(inner, step // every * times - position)


def left_behind(optimizers: Sequence[Optimizer]) -> list[LRScheduler]:
    """Finds the schedulers that have taken one step, as these optimizers have."""
    found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    within = {id(part) for each in found for part in getattr(each, "_schedulers", ())}
    mine = (s for s in found if id(s) not in within and any(s.optimizer is o for o in optimizers))
    return [each for each in mine if _steps_of(each) == 1]


def follows_position(scheduler: Any) -> bool:
    """Tells whether a scheduler knows its learning rate by the number of its steps."""
    return not isinstance(scheduler, ReduceLROnPlateau) and _steps_of(scheduler) is not None


def _steps_of(scheduler: Any) -> int | None:
    steps, chained = (getattr(scheduler, key, None) for key in ("last_epoch", "_schedulers"))
    if steps is None and chained:  # torch's ChainedScheduler has no count
        return _steps_of(chained[0])
    return steps if isinstance(steps, int) else None
