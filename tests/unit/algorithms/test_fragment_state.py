"""One fragment by hand: what is contributed, and what becomes of it, however its round ends."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.counted import CountedRound
from murmuration.algorithms.diloco import merge
from murmuration.algorithms.fragment_state import FragmentOptimizer
from murmuration.algorithms.plan import Plan
from tests.unit.algorithms.four_values import (
    ANCHOR,
    BOTH,
    GROUP,
    LEFT,
    LOCAL,
    MEAN,
    PLAIN,
    RIGHT,
    Failed,
    done,
    end,
    hash_of,
    lacks,
    optimizer,
    send,
    state_at,
    take_over,
    values,
)

# ------------------------------------------------------------------------------ the outer step


def test_a_round_without_overlap_ends_on_the_new_anchor() -> None:
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


def test_the_outer_step_is_nesterovs() -> None:
    outer = optimizer(replace(PLAIN, outer_lr=0.5, outer_momentum=0.5))
    local = end(outer, done(0), send(outer, LOCAL))
    assert outer.state.momentum.tolist() == [4] * 4
    assert outer.state.anchor.tolist() == [10 - 0.5 * (4 + 0.5 * 4)] * 4 == [7] * 4
    end(outer, done(1), send(outer, local))
    assert outer.state.momentum.tolist() == [6] * 4
    assert outer.state.anchor.tolist() == [7 - 0.5 * (4 + 0.5 * 6)] * 4


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_advancing_and_merging_is_applying(alpha: float) -> None:
    plan = replace(PLAIN, merge_alpha=alpha)
    one, other = optimizer(plan), optimizer(plan)
    local = send(one, LOCAL) - 1
    assert torch.equal(send(other, LOCAL) - 1, local)
    result = done(0, MEAN.clone())
    applied = end(one, result, local)
    assert other.only_merges(result)
    other.advance(result)
    assert torch.equal(merge(local, other.state.anchor, plan.merge_alpha), applied)
    assert other.state.hash == one.state.hash
    assert (other.state.version, other.state.group) == (one.state.version, one.state.group)


KEEP = replace(PLAIN, overlap_steps=2, codec="sign", merge="keep")
UNSENT = values(1.0, -1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("learned_since", "missed", "expected"),
    [
        (0, (), [1, -1, 0.5, 0]),
        (1, (), [2, 0, 1.5, 1]),
        (1, LEFT, [3, 3, 1.5, 1]),
        (1, BOTH, [3, 3, 3, 3]),
    ],
)
def test_what_was_not_sent_stays_in_the_local_parameters(
    learned_since: float, missed: tuple[tuple[int, int], ...], expected: list[float]
) -> None:
    """2 contributed of which UNSENT is left out; where the round closed without it, all stays."""
    outer = optimizer(KEEP)
    local = send(outer, LOCAL) - learned_since
    local = end(outer, done(0, missed=missed, error=UNSENT), local)
    assert outer.state.anchor.tolist() == [6] * 4
    assert lacks(outer, local) == expected


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        (None, [3, 3, 3, 3]),
        (Failed(error=UNSENT), [3, 3, 3, 3]),
        (Failed(LEFT, UNSENT), [2, 0, 3, 3]),
        (Failed(BOTH, UNSENT), [2, 0, 1.5, 1]),
    ],
)
def test_only_what_was_sent_of_a_round_that_was_overtaken_is_taken_out(
    arrived: Failed | None, expected: list[float]
) -> None:
    outer = optimizer(KEEP)
    local = send(outer, LOCAL) - 1
    theirs = state_at(3, values(1, 2, 3, 4))
    assert lacks(outer, take_over(outer, theirs, local, arrived)) == expected


def test_what_two_states_one_after_the_other_have_counted_is_taken_out_once() -> None:
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


def test_what_was_contributed_before_a_restart_is_not_contributed_again() -> None:
    """The state is from a checkpoint: the process that wrote it was in its round, on the left."""
    theirs = state_at(6, values(5, 5, 5, 5), history=(CountedRound(4, ((0, 2, GROUP),)),))
    outer = optimizer(PLAIN, version=4)
    assert lacks(outer, take_over(outer, theirs, LOCAL)) == [0, 0, 2, 2]


@pytest.mark.parametrize("plan", [PLAIN, replace(PLAIN, merge="keep")], ids=["reset", "keep"])
def test_an_earlier_state_ends_the_round_and_forgets_what_was_sent(plan: Plan) -> None:
    """This peer goes back: a state of the others that counts rounds of these numbers counts others
    than those that it has sent."""
    outer = optimizer(plan, version=3)
    local = end(outer, done(3, error=torch.zeros(4)), send(outer, LOCAL)) - 1
    local = end(outer, Failed(LEFT), send(outer, local)) - 1
    local = send(outer, local)
    lacked = lacks(outer, local)
    local = take_over(outer, state_at(2, values(5, 5, 5, 5)), local)
    assert outer.in_flight is None
    assert lacks(outer, local) == lacked
    later = replace(
        state_at(6, values(4, 4, 4, 4)),
        history=tuple(CountedRound(round_, ((0, 4, ("a",)),)) for round_ in (3, 4, 5)),
    )
    local = take_over(outer, later, local)
    assert lacks(outer, local) == lacked


@pytest.mark.parametrize(("given_up", "back"), [(3, 2), (2, 2), (1, 0), (0, 0)])
def test_what_a_minority_was_given_is_to_come_again(given_up: int, back: float) -> None:
    """Two rounds of one of two peers, each of 2, and 1 learned since; of the second the right was
    missed, where the local parameters keep it."""
    outer = optimizer(PLAIN, version=5)
    local = end(outer, done(5, contributors=1), send(outer, LOCAL))
    local = end(outer, done(6, missed=RIGHT, contributors=1), send(outer, local - 2)) - 1
    came = lacks(outer, outer.take_back(given_up, local))
    assert came == [1 + 2 * back, 1 + 2 * back, 3 + back, 3 + back]
    assert lacks(outer, outer.take_back(given_up, local)) == [1, 1, 3, 3]  # once


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        (None, [3, 3, 3, 3]),
        (Failed(), [3, 3, 3, 3]),
        (Failed(LEFT), [1, 1, 3, 3]),
        (Failed(BOTH), [1, 1, 1, 1]),
    ],
)
def test_what_counted_in_a_round_that_was_overtaken_is_not_contributed_again(
    arrived: Failed | None, expected: list[float]
) -> None:
    """2 contributed, 1 learned since."""
    outer = optimizer(replace(PLAIN, overlap_steps=2))
    local = send(outer, LOCAL) - 1
    local = take_over(outer, state_at(2, values(5, 5, 5, 5)), local, arrived)
    assert outer.in_flight is None
    assert lacks(outer, local) == expected


# ------------------------------------------------------------------- a round that is tried again


def first_try_counted_left(plan: Plan = PLAIN) -> tuple[FragmentOptimizer, Tensor]:
    """2 contributed, 1 learned since."""
    outer = optimizer(plan)
    return outer, end(outer, Failed(LEFT), send(outer, LOCAL)) - 1


@pytest.mark.parametrize(
    ("counted", "expected"),
    [((), [1, 1, 3, 3]), (RIGHT, [1, 1, 1, 1]), (LEFT, [1, 1, 3, 3]), (BOTH, [1, 1, 1, 1])],
)
@pytest.mark.parametrize("overtaken", [True, False])
def test_a_second_try_does_not_forget_what_the_first_has_counted(
    counted: tuple[tuple[int, int], ...], expected: list[float], overtaken: bool
) -> None:
    """Either try has sent 2; 1 was learned since."""
    outer, local = first_try_counted_left()
    local, failed = send(outer, local), Failed(counted)
    if not overtaken:
        local = end(outer, failed, local)
    arrived = failed if overtaken else None
    local = take_over(outer, state_at(1, values(6, 6, 6, 6)), local, arrived)
    assert lacks(outer, local) == expected
