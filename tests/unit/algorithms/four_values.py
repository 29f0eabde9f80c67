"""A fragment of four values to test by hand, and numbers that add up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from murmuration.algorithms.counted import History
from murmuration.algorithms.fragment_state import FragmentOptimizer, FragmentState, RoundResult
from murmuration.algorithms.fragments import Ranges
from murmuration.algorithms.plan import Plan

GROUP = ("a", "b")
PLAIN = Plan(outer_lr=1.0, outer_momentum=0.0)

LEFT = ((0, 2),)
RIGHT = ((2, 4),)
BOTH = ((0, 4),)


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


ANCHOR = values(10, 10, 10, 10)
LOCAL = values(8, 8, 8, 8)  # two steps of 1 down
MEAN = values(4, 4, 4, 4)


@dataclass(frozen=True)
class Failed:
    """A round that comes to nothing."""

    counted: Ranges = ()
    error: Tensor | None = None


def hash_of(anchor: Tensor, momentum: Tensor, group: tuple[str, ...]) -> int:
    return hash((*anchor.tolist(), *momentum.tolist(), *group))


def state_at(
    version: int, anchor: Tensor, momentum: Tensor | None = None, history: History = ()
) -> FragmentState:
    momentum = torch.zeros_like(anchor) if momentum is None else momentum
    hashed = hash_of(anchor, momentum, GROUP)
    return FragmentState(version, len(GROUP), GROUP, anchor, momentum, hashed, history)


def optimizer(plan: Plan, anchor: Tensor = ANCHOR, version: int = 0) -> FragmentOptimizer:
    return FragmentOptimizer(plan, state_at(version, anchor), hash_of)


def done(
    round_: int,
    mean: Tensor = MEAN,
    missed: Ranges = (),
    error: Tensor | None = None,
    contributors: int = 2,
) -> RoundResult:
    return RoundResult(round_, mean, contributors, GROUP, missed, error)


def send(outer: FragmentOptimizer, local: Tensor, step: int = 1) -> Tensor:
    """Contributes what was learned; the local parameters to go on from."""
    outer.contribute(outer.start - local, step)
    return local


def end(outer: FragmentOptimizer, result: RoundResult | Failed, local: Tensor) -> Tensor:
    """The round in flight ends so; the local parameters to go on from."""
    if isinstance(result, RoundResult):
        local = outer.apply(result, local)
    else:
        kept = outer.abandon(result.counted, result.error, local)
        local = local if kept is None else kept
    assert outer.in_flight is None
    return local


def take_over(
    outer: FragmentOptimizer,
    theirs: FragmentState,
    local: Tensor,
    arrived: Failed | None = None,
    *,
    keep: bool = True,
    me: str = "a",
) -> Tensor:
    """Another peer's state comes, perhaps after word of the round in flight; the local parameters
    to go on from."""
    counted, error = ((), None) if arrived is None else (arrived.counted, arrived.error)
    own = outer.release(theirs.version, local, counted, error)
    return outer.adopt(theirs, own, keep=keep, me=me)


def lacks(outer: FragmentOptimizer, local: Tensor) -> list[float]:
    """What the anchor still lacks of this peer's own: anchor - local."""
    found: list[float] = (outer.state.anchor - local).tolist()
    return found
