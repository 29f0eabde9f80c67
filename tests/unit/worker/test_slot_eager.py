"""Eager updates in a slot: a guess goes before the mean, and is taken back where it was wrong."""

from dataclasses import replace

import pytest
from torch import Tensor

from tests.unit.worker.slots import (
    ANCHOR,
    EAGER,
    LEFT,
    LOCAL,
    MEAN,
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


def eager_slot() -> tuple[FragmentReplica, Tensor]:
    """After a round of two peers: mean 4, own 2, so the other one has brought 3 to it.

    Anchor and local are at 6.
    """
    slot = slot_at(EAGER, ANCHOR)
    return slot, end(slot, done(0, MEAN), send(slot, LOCAL))


def test_there_is_no_guess_in_the_first_round() -> None:
    slot = slot_at(EAGER, ANCHOR)
    assert send(slot, LOCAL) is LOCAL
    assert slot.sent is not None
    assert slot.sent.guess is None


def test_the_first_round_is_carried_over_or_merged_to_the_anchor() -> None:
    slot, local = eager_slot()
    assert local.tolist() == slot.state.anchor.tolist() == [6] * 4


def test_the_guess_takes_the_own_fresh_part_with_the_others_last() -> None:
    """Own 1 over 2 peers, and 3: the anchor is expected 3.5 further down, at 2.5."""
    slot, local = eager_slot()
    local = send(slot, local - 1)
    assert local.tolist() == [2.5] * 4
    assert slot.state.anchor.tolist() == [6] * 4  # waits for the true mean


def test_the_true_mean_corrects_the_guess_and_keeps_the_steps_since() -> None:
    slot, local = eager_slot()
    local = send(slot, local - 1) - 0.25
    local = end(slot, done(1, values(1, 2, 3.5, 5)), local)
    assert slot.state.anchor.tolist() == [5, 4, 2.5, 1]
    assert learned(slot, local) == [0.25] * 4
    # The others' share follows: mean less half of the own 1.
    local = send(slot, slot.state.anchor - 2)
    assert local.tolist() == [5 - 1.5, 4 - 2.5, 2.5 - 4, 1 - 5.5]


def test_the_guess_goes_through_the_outer_step_with_its_momentum() -> None:
    slot = slot_at(replace(EAGER, outer_lr=0.5, outer_momentum=0.5), ANCHOR)
    local = end(slot, done(0, MEAN), send(slot, LOCAL))
    assert local.tolist() == [7] * 4  # momentum 4
    local = send(slot, local - 1)
    # Expected 0.5 * 1 + 3 = 3.5: momentum 5.5, and 0.5 * (3.5 + 2.75) down.
    assert local.tolist() == [7 - 3.125] * 4
    assert slot.state.momentum.tolist() == [4] * 4


def test_a_round_that_fails_takes_the_guess_back() -> None:
    """6 - 1 - 0.25: as if there had been none."""
    slot, local = eager_slot()
    local = send(slot, local - 1) - 0.25
    local = end(slot, failed(1), local)
    assert local.tolist() == [4.75] * 4
    assert learned(slot, local) == [1.25] * 4
    local = send(slot, local)
    assert local.tolist() == [6 - 3.625] * 4  # and guesses again


def test_where_a_round_missed_this_peer_the_guess_is_taken_back_too() -> None:
    slot, local = eager_slot()
    local = send(slot, local - 1) - 0.25
    local = end(slot, done(1, MEAN, missed=LEFT), local)
    assert slot.state.anchor.tolist() == [2] * 4
    assert learned(slot, local) == [1.25, 1.25, 0.25, 0.25]


def test_a_guess_in_the_second_try_of_a_round_that_counted_in_part() -> None:
    slot, local = eager_slot()
    local = end(slot, failed(1, counted=LEFT), send(slot, local - 1) - 0.25)
    local = send(slot, local) - 0.5  # contributes 1.25 now, of which 1 came to the left before
    local = end(slot, done(1, MEAN), local)
    assert learned(slot, local) == [0.75, 0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        (None, [1.25] * 4),
        (failed(1), [1.25] * 4),
        (failed(1, counted=LEFT), [0.25, 0.25, 1.25, 1.25]),
        (done(1, MEAN), [0.25] * 4),
        (done(1, MEAN, missed=LEFT), [1.25, 1.25, 0.25, 0.25]),
    ],
    ids=["nothing", "failed", "failed and counted", "done", "done and missed"],
)
def test_another_state_comes_while_a_guess_is_out(arrived: object, expected: list[float]) -> None:
    slot, local = eager_slot()
    local = send(slot, local - 1) - 0.25
    if arrived is not None:
        slot.take(arrived)
    local = take_over(slot, state_at(2, values(5, 5, 5, 5)), local)
    assert learned(slot, local) == expected
    assert send(slot, local) is local  # what the others brought is not known of that state


def test_a_later_round_keeps_its_guess_when_an_older_state_comes() -> None:
    slot, local = eager_slot()
    local = send(slot, local - 1)
    assert slot.give_up(0, local) is local
