"""One fragment of four values by hand: what is contributed, and what becomes of it, however its
round ends; in means, and in pairs, whose lost rounds are not made up."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.counted import CountedRound, History
from murmuration.algorithms.fragment_state import FragmentOptimizer, FragmentState, RoundResult
from murmuration.algorithms.fragments import Ranges
from murmuration.algorithms.plan import PRESETS, Plan

GROUP = ("a", "b")
PLAIN = Plan(outer_lr=1.0, outer_momentum=0.0)

LEFT = ((0, 2),)
RIGHT = ((2, 4),)


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
    round_: int, mean: Tensor = MEAN, missed: Ranges = (), error: Tensor | None = None,
    contributors: int = 2,
) -> RoundResult:  # fmt: skip
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
    outer: FragmentOptimizer, theirs: FragmentState, local: Tensor, arrived: Failed | None = None
) -> Tensor:
    """Another peer's state comes, perhaps after word of the round in flight; the local parameters
    to go on from."""
    counted, error = ((), None) if arrived is None else (arrived.counted, arrived.error)
    own = outer.release(theirs.version, local, counted, error)
    return outer.adopt(theirs, own, keep=True, me="a")


def lacks(outer: FragmentOptimizer, local: Tensor) -> list[float]:
    """The values of this peer that the anchor still lacks: anchor - local."""
    found: list[float] = (outer.state.anchor - local).tolist()
    return found


def test_a_round_without_overlap_ends_on_the_new_anchor():
    outer = optimizer(PLAIN)
    local = send(outer, LOCAL, step=5)
    assert outer.in_flight is not None
    sent = outer.in_flight
    assert (sent.round, sent.step) == (0, 5)
    assert sent.g.tolist() == sent.values.tolist() == [2, 2, 2, 2]
    local = end(outer, done(0, contributors=3), local)
    assert local.tolist() == outer.state.anchor.tolist() == [6, 6, 6, 6]
    assert outer.state.momentum.tolist() == MEAN.tolist()
    assert (outer.state.version, outer.state.contributors, outer.state.group) == (1, 3, GROUP)
    assert outer.state.hash == hash_of(outer.state.anchor, outer.state.momentum, GROUP)
    assert ANCHOR.tolist() == [10, 10, 10, 10]  # nothing known outside was written


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_advancing_and_merging_is_applying(alpha):
    plan = replace(PLAIN, merge_alpha=alpha)
    one, other = optimizer(plan), optimizer(plan)
    local = send(one, LOCAL) - 1
    assert torch.equal(send(other, LOCAL) - 1, local)
    result = done(0, MEAN.clone())
    applied = end(one, result, local)
    assert other.only_merges(result)
    after, kept = other.outcome(result)()
    other.advance(result, after)
    assert torch.equal(other.merged(local, *kept), applied)
    assert other.state.hash == one.state.hash
    assert (other.state.version, other.state.group) == (one.state.version, one.state.group)


KEEP = replace(PLAIN, overlap_steps=2, codec="sign", merge="keep")


def test_what_two_states_one_after_the_other_have_counted_is_taken_out_once():
    """Its round had all of its contribution, the first state has half of it, the second none."""
    outer = optimizer(KEEP)
    local = send(outer, LOCAL)
    sent = replace(done(0, error=values(0, 0, 0, 0)), sent=lambda: values(2, 2, 2, 2))
    local = end(outer, replace(sent, parts=((0, 4, ("a", "b")),)), local)
    assert lacks(outer, local) == [0] * 4
    for parts, lacked in (
        (((0, 2, ("a", "b")), (2, 4, ("b",))), [0, 0, 2, 2]),
        (((0, 4, ("b",)),), [2, 2, 2, 2]),
    ):
        history = (replace(outer.state.history[0], parts=parts),)
        local = take_over(outer, replace(outer.state, history=history), local)
        assert lacks(outer, local) == lacked


# ----------------------------------------------------------------------- another peer's state


def test_what_was_contributed_before_a_restart_is_not_contributed_again():
    """The state is from a checkpoint: the process that wrote it was in its round, on the left."""
    theirs = state_at(6, values(5, 5, 5, 5), history=(CountedRound(4, ((0, 2, GROUP),)),))
    outer = optimizer(PLAIN, version=4)
    assert lacks(outer, take_over(outer, theirs, LOCAL)) == [0, 0, 2, 2]


@pytest.mark.parametrize("plan", [PLAIN, replace(PLAIN, merge="keep")], ids=["reset", "keep"])
def test_an_earlier_state_ends_the_round_and_forgets_what_was_sent(plan):
    """This peer goes back: a state of the others that counts rounds of these numbers counts others
    than those that it has sent."""
    outer = optimizer(plan, version=3)
    local = end(outer, done(3, error=torch.zeros(4)), send(outer, LOCAL)) - 1
    local = end(outer, Failed(LEFT), send(outer, local)) - 1
    local = send(outer, local)
    lacked, local = lacks(outer, local), take_over(outer, state_at(2, values(5, 5, 5, 5)), local)
    assert outer.in_flight is None
    assert lacks(outer, local) == lacked
    later = replace(
        state_at(6, values(4, 4, 4, 4)),
        history=tuple(CountedRound(round_, ((0, 4, ("a",)),)) for round_ in (3, 4, 5)),
    )
    assert lacks(outer, take_over(outer, later, local)) == lacked


@pytest.mark.parametrize(("given_up", "back"), [(3, 2), (2, 2), (1, 0), (0, 0)])
def test_what_a_minority_was_given_is_to_come_again(given_up, back):
    """Two rounds of one of two peers, each of 2, and 1 learned since; of the second the right was
    missed, where the local parameters keep it."""
    outer = optimizer(PLAIN, version=5)
    local = end(outer, done(5, contributors=1), send(outer, LOCAL))
    local = end(outer, done(6, missed=RIGHT, contributors=1), send(outer, local - 2)) - 1
    came = lacks(outer, outer.take_back(given_up, local))
    assert came == [1 + 2 * back, 1 + 2 * back, 3 + back, 3 + back]
    assert lacks(outer, outer.take_back(given_up, local)) == [1, 1, 3, 3]  # once


# ---------------------------------------------------------------------------------------- pairs


SHARED = replace(PRESETS["noloco"], outer_momentum=0.5, outer_lr=0.5)
PAIRS = replace(SHARED, shared_momentum=False, outer_pull=0.25)


def filled(value: float) -> Tensor:
    return torch.full((4,), float(value))


def met(round_: int, mean: float, mean_anchor: Tensor) -> RoundResult:
    return RoundResult(round_, filled(mean), 2, (), (), mean_anchor=mean_anchor)


def test_the_outer_step_pulls_towards_the_pair():
    outer = optimizer(PAIRS)
    local = end(outer, met(0, 4, filled(12)), send(outer, LOCAL))
    momentum = -0.5 * 4 - 0.25 * (10 - 12)
    assert outer.state.momentum.tolist() == [momentum] * 4
    assert outer.state.anchor.tolist() == local.tolist() == [10 + momentum] * 4
    assert (outer.state.version, outer.state.contributors, outer.state.group) == (1, 2, GROUP)
    assert outer.state.hash == hash_of(outer.state.anchor, outer.state.momentum, GROUP)
    assert outer.spread == pytest.approx(2 / 12)
    end(outer, met(1, 4, outer.state.anchor), send(outer, local))
    assert outer.state.momentum.tolist() == [0.5 * momentum - 0.5 * 4] * 4
    assert outer.spread == 0.0


@pytest.mark.parametrize("lost", [True, False], ids=["lost round", "another state"])
def test_an_early_start_is_taken_back(lost):
    """The update of the paper has none: it starts from its own anchor."""
    outer = optimizer(PAIRS)
    assert outer.go_on_from(filled(11), LOCAL) is None
    assert outer.start is outer.state.anchor
    outer = optimizer(SHARED)
    local = outer.go_on_from(filled(11), LOCAL)
    assert local is not None
    if lost:
        assert end(outer, Failed(), send(outer, local - 1)).tolist() == [7] * 4
    else:
        theirs = replace(outer.state, version=4, anchor=ANCHOR + 5)
        assert take_over(outer, theirs, local).tolist() == (LOCAL + 5).tolist()
    assert outer.start is outer.state.anchor


def test_the_schedule_says_which_round_is_next():
    outer = optimizer(PAIRS)
    before = outer.state
    outer.skip_to(7)
    assert replace(outer.state, version=0) == before
    send(outer, LOCAL, step=9)
    assert outer.in_flight is not None
    assert outer.in_flight.round == 7
    for step, expected in ((12, 9), (4, 4)):  # never later than where the peer is now
        outer.reposition(step)
        assert outer.in_flight.step == expected


def test_the_final_average_takes_the_mean_of_all_anchors_and_no_momentum():
    outer = optimizer(PAIRS)
    end(outer, met(0, 4, filled(12)), send(outer, LOCAL))
    sent = outer.contribute_values(outer.state.anchor, step=9)
    assert (sent.round, sent.step, sent.values) == (1, 9, outer.state.anchor)
    mean, everyone = values(1.0, 2.0, 3.0, 4.0), (*GROUP, "z")
    local = outer.apply_final_average(RoundResult(1, mean, 4, everyone, ()))
    assert local.tolist() == outer.state.anchor.tolist() == [1, 2, 3, 4]
    assert outer.state.momentum.tolist() == [0] * 4
    assert (outer.state.version, outer.in_flight, outer.spread) == (2, None, 0.0)
    assert (outer.state.contributors, outer.state.group) == (4, everyone)
    assert outer.state.hash == hash_of(outer.state.anchor, outer.state.momentum, everyone)
