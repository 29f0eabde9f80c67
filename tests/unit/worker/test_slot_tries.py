"""A round that is tried again: what an earlier try had counted stays counted, once."""

from dataclasses import replace

from torch import Tensor

from algorithms.plan import Plan
from tests.unit.worker.slots import (
    ANCHOR,
    FEEDBACK,
    LEFT,
    LOCAL,
    MEAN,
    PLAIN,
    RIGHT,
    done,
    end,
    failed,
    learned,
    send,
    slot_at,
    state_at,
    take_over,
    values,
)
from worker.training.fragment import FragmentReplica


def first_try_counted_left(
    plan: Plan = PLAIN, error: Tensor | None = None
) -> tuple[FragmentReplica, Tensor]:
    slot = slot_at(plan, ANCHOR)
    local = end(slot, failed(0, counted=LEFT, error=error), send(slot, LOCAL))
    return slot, local - 1  # 2 contributed, 1 learned since


def test_the_second_try_takes_the_part_that_the_first_has_brought_for_granted() -> None:
    """On the left the first try's 2 are in the reduction; the 1 learned since is still to come."""
    slot = slot_at(PLAIN, ANCHOR)
    local = end(slot, failed(0, counted=LEFT), send(slot, LOCAL))
    assert local.tolist() == LOCAL.tolist()
    local = send(slot, local - 1)
    local = end(slot, done(0, MEAN), local)
    assert slot.state.anchor.tolist() == [6] * 4
    assert learned(slot, local) == [1, 1, 0, 0]


def test_a_second_try_that_was_missed_on_the_right() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    local = end(slot, failed(0, counted=LEFT), send(slot, LOCAL))
    local = send(slot, local - 1)
    local = end(slot, done(0, MEAN, missed=RIGHT), local)
    assert learned(slot, local) == [1, 1, 3, 3]


def test_what_counted_is_forgotten_when_its_round_is_over() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    local = end(slot, failed(0, counted=LEFT), send(slot, LOCAL))
    local = end(slot, done(0, MEAN), send(slot, local))
    local = local - 1
    local = end(slot, done(1, MEAN), send(slot, local))
    assert learned(slot, local) == [0] * 4
    local = take_over(slot, state_at(5, values(1, 1, 1, 1)), local - 1)
    assert learned(slot, local) == [1] * 4


def test_a_second_try_that_fails_without_counting_leaves_the_first_ones_part_counted() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    local = end(slot, failed(0, counted=LEFT), send(slot, LOCAL))
    local = end(slot, failed(0), send(slot, local - 1))
    local = take_over(slot, state_at(1, values(6, 6, 6, 6)), local)
    assert learned(slot, local) == [1, 1, 3, 3]


def test_a_second_try_given_up_does_not_forget_what_the_first_has_counted() -> None:
    slot, local = first_try_counted_left()
    local = send(slot, local)
    slot.take(failed(0))
    local = take_over(slot, state_at(1, values(6, 6, 6, 6)), local)
    assert learned(slot, local) == [1, 1, 3, 3]


def test_a_second_try_that_fails_elsewhere_does_not_forget_what_the_first_has_counted() -> None:
    slot, local = first_try_counted_left()
    local = end(slot, failed(0, counted=RIGHT), send(slot, local))
    local = take_over(slot, state_at(1, values(6, 6, 6, 6)), local)
    assert learned(slot, local) == [1, 1, 0, 0]


def test_a_second_try_that_is_told_again_keeps_the_part_of_the_first() -> None:
    """The reducer answers with what it closed in the first try: 2, not 3."""
    slot, local = first_try_counted_left()
    local = end(slot, failed(0, counted=LEFT), send(slot, local))
    local = take_over(slot, state_at(1, values(6, 6, 6, 6)), local)
    assert learned(slot, local) == [1, 1, 3, 3]


def test_a_second_try_done_but_overtaken_keeps_the_part_of_the_first() -> None:
    slot, local = first_try_counted_left()
    local = send(slot, local)
    slot.take(done(0, MEAN))
    local = take_over(slot, state_at(1, values(6, 6, 6, 6)), local)
    assert learned(slot, local) == [1, 1, 0, 0]


def test_alpha_does_not_keep_what_error_feedback_keeps_already() -> None:
    """alpha of the error stays in the local parameters, the rest is the residual."""
    slot = slot_at(replace(FEEDBACK, merge_alpha=0.5, error_decay=1.0), ANCHOR)
    local = send(slot, LOCAL)  # 2
    local = end(slot, done(0, values(1, 1, 1, 1), error=values(1, 1, 1, 1), contributors=1), local)
    # 2 learned, 1 counted: 1 is left.
    assert slot.residual is not None
    assert (values(*learned(slot, local)) + slot.residual).tolist() == [1] * 4
