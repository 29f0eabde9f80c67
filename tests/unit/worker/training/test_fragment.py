"""One fragment on a peer: which messages it takes, and what it writes into the parameters."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.mailbox import PrefetchedAnchor, RoundDone, RoundFailed
from murmuration.worker.wire import state_hash

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


def test_it_begins_with_the_parameters_as_anchor_and_writes_into_them_by_name() -> None:
    peer = Peer(PLAIN)
    state = peer.fragment.state
    assert (state.anchor.tolist(), state.momentum.tolist()) == ([10] * 4, [0] * 4)
    assert state.hash == state_hash(state.anchor, state.momentum, ())
    assert peer.fragment.local.tolist() == [8] * 4
    peer.fragment.write(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert peer.parameters["x"].tolist() == [[1, 2]]
    assert peer.parameters["y"].tolist() == [3, 4]
    assert state.anchor.tolist() == [10] * 4


def test_only_the_end_of_the_round_in_flight_is_taken_and_once() -> None:
    fragment = (peer := Peer(PLAIN)).fragment
    fragment.handle(DONE)
    assert (fragment.arrived, fragment.in_flight_round, fragment.awaits_result) == (
        None,
        None,
        False,
    )
    peer.contribute()
    fragment.handle(replace(DONE, round=1))
    assert (fragment.arrived, fragment.in_flight_round, fragment.awaits_result) == (None, 0, True)
    fragment.handle(FAILED)
    assert not fragment.awaits_result
    assert fragment.take_result() is FAILED
    assert fragment.take_result() is None


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


@pytest.mark.parametrize(("keep", "learned"), [(True, True), (False, True), (True, False)])
def test_without_progress_or_where_none_is_kept_it_goes_on_from_their_anchor(
    keep: bool, learned: bool
) -> None:
    fragment = (peer := Peer(PLAIN)).fragment
    if not learned:
        fragment.write(fragment.state.anchor)
    theirs = peer.theirs(2, 0.1)
    fragment.take_over(theirs, keep=keep)
    exact: Tensor = theirs.anchor if not (keep and learned) else theirs.anchor - 2
    assert peer.local == pytest.approx(exact.tolist())
    if not (keep and learned):
        assert torch.equal(fragment.local, theirs.anchor)


@pytest.mark.parametrize(
    ("round_", "mean", "late", "local"),
    [(0, 11.0, False, 9), (0, None, False, 8), (1, 11.0, False, 8), (0, 11.0, True, 8)],
    ids=["in time", "none comes", "of another round", "too late"],
)
def test_a_head_start_from_the_prefetched_anchor(
    round_: int, mean: float | None, late: bool, local: float
) -> None:
    fragment = (peer := Peer(SHARED)).fragment
    assert not fragment.knows_next_anchor
    assert not fragment.take_head_start()
    if late:
        peer.contribute()
    anchor = None if mean is None else torch.full((4,), mean)
    fragment.handle(PrefetchedAnchor(0, round_, anchor))
    assert fragment.knows_next_anchor is (round_ == 0)
    assert fragment.take_head_start() is (local == 9)
    assert peer.local == [local] * 4
    assert not fragment.knows_next_anchor  # once
