"""One fragment on a peer: which messages it takes, and what it writes into the parameters."""

from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.mailbox import RoundDone, RoundFailed

PLAIN = Plan(outer_lr=1.0, outer_momentum=0.0, overlap_steps=2)
SHARED = replace(PRESETS["noloco"], outer_momentum=0.5, outer_lr=0.5)
DONE = RoundDone(0, torch.full((4,), 4.0), 2, ("a", "b"), ((2, 4),), fragment=0)
FAILED = RoundFailed(0, 0, "the link broke", (), counted=((2, 4),))


class Peer:
    """Four values in two parameters; the anchor is 10, the local ones are 8."""

    def __init__(self, plan: Plan) -> None:
        self.parameters = {"x": torch.full((1, 2), 10.0), "y": torch.full((2,), 10.0)}
        specs = (TensorSpec("x", (1, 2)), TensorSpec("y", (2,)))
        self.fragment = FragmentReplica(Fragment(0, specs), plan, self.parameters)
        for parameter in self.parameters.values():
            parameter.fill_(8.0)

    @property
    def local(self) -> list[float]:
        return torch.cat([value.flatten() for value in self.parameters.values()]).tolist()

    def contribute(self) -> None:
        self.fragment.contribute(self.fragment.start - self.fragment.local, 1)

    def theirs(self, version: int, value: float) -> FragmentState:
        return replace(self.fragment.state, version=version, anchor=torch.full((4,), value))


@pytest.mark.parametrize(
    ("message", "learned"),
    [(None, [2] * 4), (FAILED, [2, 2, 0, 0]), (DONE, [0, 0, 2, 2])],
    ids=["nothing", "failed", "done"],
)
def test_another_state_ends_the_round_and_keeps_what_is_not_counted(
    message: RoundDone | RoundFailed | None, learned: list[float]
) -> None:
    """As the contributor tells what is known of the round before the state comes."""
    fragment = (peer := Peer(PLAIN)).fragment
    peer.contribute()
    if message is not None:
        fragment.handle(message)
    theirs = peer.theirs(2, 5.0)
    fragment.take_over(theirs, keep=True)
    assert fragment.state is theirs
    assert (fragment.in_flight, fragment.arrived) == (None, None)
    assert peer.local == [5 - each for each in learned]


def test_an_older_state_leaves_a_later_round_and_what_has_arrived_of_it() -> None:
    fragment = (peer := Peer(PLAIN)).fragment
    peer.contribute()
    fragment.handle(DONE)
    fragment.take_over(peer.theirs(0, 11.0), keep=True)
    assert fragment.arrived is DONE
    assert fragment.in_flight_round == 0
    assert peer.local == [9] * 4
