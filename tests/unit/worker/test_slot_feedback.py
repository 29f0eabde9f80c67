"""Error feedback in a slot: what an encoding has left out is in the residual, once."""

import pytest
import torch

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


def test_what_the_encoding_left_out_comes_with_the_next_round() -> None:
    slot = slot_at(FEEDBACK, ANCHOR)
    local = send(slot, LOCAL)
    assert slot.sent is not None
    assert slot.sent.values is slot.sent.g
    local = end(slot, done(0, MEAN, error=values(0.5, 0.25, 0, -1)), local)
    assert slot.residual is not None
    assert slot.residual.tolist() == [0.5, 0.25, 0, -1]
    send(slot, local - 1)
    assert slot.sent.g.tolist() == [1] * 4
    assert slot.sent.values.tolist() == [1.25, 1.125, 1, 0.5]  # decay 0.5


def test_where_a_contribution_was_missed_its_residual_is_as_before() -> None:
    slot = slot_at(FEEDBACK, ANCHOR)
    local = end(slot, done(0, MEAN, error=values(1, 1, 1, 1)), send(slot, LOCAL))
    local = end(slot, done(1, MEAN, missed=LEFT, error=values(3, 3, 3, 3)), send(slot, local - 1))
    assert slot.residual is not None
    assert slot.residual.tolist() == [1, 1, 3, 3]
    assert learned(slot, local) == [1, 1, 0, 0]


def test_a_failed_round_leaves_the_residual_and_the_next_try_has_it_again() -> None:
    slot = slot_at(FEEDBACK, ANCHOR)
    local = end(slot, done(0, MEAN, error=values(4, 4, 4, 4)), send(slot, LOCAL))
    local = end(slot, failed(1, error=values(7, 7, 7, 7)), send(slot, local - 1))
    assert slot.residual is not None
    assert slot.residual.tolist() == [4] * 4
    send(slot, local)
    assert slot.sent is not None
    assert slot.sent.values.tolist() == [3] * 4  # 1 and half of 4


def test_where_a_failed_try_counted_its_own_error_is_what_is_left() -> None:
    """Left: of the first try, which closed there. Right: of the second."""
    slot = slot_at(FEEDBACK, ANCHOR)
    local = send(slot, LOCAL)
    local = end(slot, failed(0, counted=LEFT, error=values(1, 1, 1, 1)), local)
    assert slot.residual is None
    local = end(slot, done(0, MEAN, error=values(2, 2, 2, 2)), send(slot, local - 1))
    assert slot.residual is not None
    assert slot.residual.tolist() == [1, 1, 2, 2]
    assert learned(slot, local) == [1, 1, 0, 0]


@pytest.mark.parametrize("before", [None, 4.0])
def test_adopting_keeps_the_residual_and_takes_the_error_where_it_counted(
    before: float | None,
) -> None:
    slot = slot_at(FEEDBACK, ANCHOR, version=1)
    slot.residual = None if before is None else torch.full((4,), before)
    local = end(slot, failed(1, counted=LEFT, error=values(1, 1, 1, 1)), send(slot, LOCAL))
    local = take_over(slot, state_at(2, values(6, 6, 6, 6)), local)
    assert slot.residual is not None
    assert slot.residual.tolist() == [1, 1, before or 0, before or 0]
    assert learned(slot, local) == [0, 0, 2, 2]


def test_adopting_what_arrived_unapplied_takes_its_error_too() -> None:
    slot = slot_at(FEEDBACK, ANCHOR)
    local = send(slot, LOCAL)
    slot.take(done(0, MEAN, missed=RIGHT, error=values(1, 2, 3, 4)))
    local = take_over(slot, state_at(1, values(6, 6, 6, 6)), local)
    assert slot.residual is not None
    assert slot.residual.tolist() == [1, 2, 0, 0]
    assert learned(slot, local) == [0, 0, 2, 2]


def test_without_feedback_there_is_no_residual() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    local = end(slot, failed(0, counted=LEFT), send(slot, LOCAL))
    local = end(slot, done(0, MEAN), send(slot, local))
    assert slot.residual is None
