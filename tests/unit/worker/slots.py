"""Slots of four values to test, numbers that add up, and how a trainer handles one."""

from dataclasses import replace

import torch
from torch import Tensor

from algorithms.fragment_state import FragmentState
from algorithms.fragments import Fragment, TensorSpec
from algorithms.plan import Plan
from worker.training.fragment import FragmentReplica
from worker.training.inbox import RoundDone, RoundFailed
from worker.wire import state_hash

GROUP = ("a", "b")
PLAIN = Plan(outer_lr=1.0, outer_momentum=0.0)
EAGER = replace(PLAIN, overlap_steps=1, eager=True)
FEEDBACK = replace(PLAIN, codec="int4", error_feedback=True, error_decay=0.5)

LEFT = ((0, 2),)
RIGHT = ((2, 4),)

Ranges = tuple[tuple[int, int], ...]


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


ANCHOR = values(10, 10, 10, 10)
LOCAL = values(8, 8, 8, 8)  # two steps of 1 down
MEAN = values(4, 4, 4, 4)


def state_at(version: int, anchor: Tensor, momentum: Tensor | None = None) -> FragmentState:
    momentum = torch.zeros_like(anchor) if momentum is None else momentum
    hashed = state_hash(anchor, momentum, GROUP)
    return FragmentState(version, len(GROUP), GROUP, anchor, momentum, hashed)


def slot_at(plan: Plan, anchor: Tensor, version: int = 0) -> FragmentReplica:
    fragment = Fragment(0, (TensorSpec("x", tuple(anchor.shape)),))
    return FragmentReplica(fragment, plan, state_at(version, anchor))


def done(
    round_: int,
    mean: Tensor,
    missed: Ranges = (),
    error: Tensor | None = None,
    contributors: int = 2,
) -> RoundDone:
    return RoundDone(0, round_, mean, contributors, GROUP, missed, error=error)


def failed(round_: int, counted: Ranges = (), error: Tensor | None = None) -> RoundFailed:
    return RoundFailed(0, round_, "the link broke", (), counted, error)


def send(slot: FragmentReplica, local: Tensor, step: int = 1) -> Tensor:
    """Contributes what was learned; the local parameters to go on from."""
    sent = slot.send(slot.start - local, step)
    return local if sent.guess is None else sent.guess


def end(slot: FragmentReplica, result: RoundDone | RoundFailed, local: Tensor) -> Tensor:
    """The round in flight ends so; the local parameters to go on from."""
    slot.take(result)
    sent, arrived = slot.sent, slot.arrived
    assert sent is not None
    assert arrived is result
    slot.sent = slot.arrived = None
    if isinstance(result, RoundDone):
        return slot.apply(sent, result, local)
    kept = slot.fail(sent, result, local)
    return local if kept is None else kept


def take_over(
    slot: FragmentReplica, theirs: FragmentState, local: Tensor, *, keep: bool = True
) -> Tensor:
    """Another peer's state comes; the local parameters to go on from."""
    return slot.adopt(theirs, slot.give_up(theirs.version, local), keep=keep)


def learned(slot: FragmentReplica, local: Tensor) -> list[float]:
    """What the anchor still lacks of this peer's own: anchor - local."""
    found: list[float] = (slot.state.anchor - local).tolist()
    return found
