"""A slot by hand: four values, an outer step that just follows the mean, numbers to add up.

`learned` is what the anchor still lacks of this peer's own: anchor - local.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.worker.slots import (
    EAGER,
    FEEDBACK,
    GROUP,
    PLAIN,
    done,
    end,
    failed,
    send,
    slot_at,
    state_at,
    take_over,
    values,
)
from worker.slot import Slot, complement
from worker.wire import state_hash

ANCHOR = values(10, 10, 10, 10)
LOCAL = values(8, 8, 8, 8)  # two steps of 1 down
MEAN = values(4, 4, 4, 4)
LEFT = ((0, 2),)
RIGHT = ((2, 4),)


def learned(slot: Slot, local: Tensor) -> list[float]:
    found: list[float] = (slot.state.anchor - local).tolist()
    return found


# ------------------------------------------------------------------------------------ plain merge


def test_a_round_without_overlap_ends_on_the_new_anchor() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    local = send(slot, LOCAL, step=5)
    assert slot.sent is not None
    assert (slot.sent.round, slot.sent.step, slot.sent.guess) == (0, 5, None)
    assert slot.sent.g.tolist() == slot.sent.values.tolist() == [2, 2, 2, 2]
    local = end(slot, done(0, MEAN, contributors=3), local)
    assert local.tolist() == slot.state.anchor.tolist() == [6, 6, 6, 6]
    assert slot.state.momentum.tolist() == MEAN.tolist()
    assert (slot.state.version, slot.state.contributors, slot.state.group) == (1, 3, GROUP)
    assert slot.state.hash == state_hash(slot.state.anchor, slot.state.momentum, GROUP)
    assert ANCHOR.tolist() == [10, 10, 10, 10]  # nothing known outside was written


def test_the_outer_step_is_nesterovs() -> None:
    slot = slot_at(replace(PLAIN, outer_lr=0.5, outer_momentum=0.5), ANCHOR)
    local = end(slot, done(0, MEAN), send(slot, LOCAL))
    assert slot.state.momentum.tolist() == [4] * 4
    assert slot.state.anchor.tolist() == [10 - 0.5 * (4 + 0.5 * 4)] * 4 == [7] * 4
    end(slot, done(1, MEAN), send(slot, local))
    assert slot.state.momentum.tolist() == [6] * 4
    assert slot.state.anchor.tolist() == [7 - 0.5 * (4 + 0.5 * 6)] * 4


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 6.0), (0.5, 6.5), (0.25, 6.25)])
def test_alpha_is_the_share_of_the_local_parameters_that_stays(
    alpha: float, expected: float
) -> None:
    slot = slot_at(replace(PLAIN, overlap_steps=1, merge_alpha=alpha), ANCHOR)
    local = send(slot, LOCAL)
    local = end(slot, done(0, MEAN), local - 1)  # 7 now, and 6 is the anchor
    assert local.tolist() == [expected] * 4


def test_what_was_missed_is_carried_over_with_the_steps_since() -> None:
    """On the left the round closed without this peer: what it learned moves along."""
    slot = slot_at(replace(PLAIN, overlap_steps=1, merge_alpha=0.5), ANCHOR)
    local = send(slot, LOCAL)
    local = end(slot, done(0, MEAN, missed=LEFT), local - 1)
    assert learned(slot, local) == [3, 3, -0.5, -0.5]
    send(slot, local)
    assert slot.sent is not None
    assert slot.sent.g.tolist() == [3, 3, -0.5, -0.5]


def test_only_the_round_in_flight_is_taken() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    slot.take(done(0, MEAN))
    assert slot.arrived is None
    send(slot, LOCAL)
    slot.take(done(1, MEAN))
    assert slot.arrived is None
    slot.take(failed(0))
    assert slot.arrived == failed(0)


def test_a_failed_round_leaves_everything_and_is_sent_again() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    before = slot.state
    local = end(slot, failed(0), send(slot, LOCAL))
    assert slot.failed
    assert slot.state is before
    local = local - 1
    send(slot, local)
    assert slot.sent is not None
    assert (slot.sent.round, slot.sent.g.tolist()) == (0, [3] * 4)
    end(slot, done(0, MEAN), local)
    assert not slot.failed


@pytest.mark.parametrize(
    ("ranges", "rest"),
    [
        ((), ((0, 6),)),
        (((0, 6),), ()),
        (((0, 2), (4, 6)), ((2, 4),)),
        (((2, 3), (3, 4)), ((0, 2), (4, 6))),
        (((0, 0), (3, 3)), ((0, 3), (3, 6))),
    ],
)
def test_the_complement_of_ranges(
    ranges: tuple[tuple[int, int], ...], rest: tuple[tuple[int, int], ...]
) -> None:
    assert complement(ranges, 6) == rest


# ------------------------------------------------------ a failed round that counted all the same


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


# --------------------------------------------------------------------- another peer's state


def test_adopting_keeps_what_was_learned_against_the_new_anchor() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    theirs = state_at(3, values(1, 2, 3, 4), momentum=values(9, 9, 9, 9))
    local = take_over(slot, theirs, LOCAL)
    assert slot.state is theirs
    assert local.tolist() == [-1, 0, 1, 2]
    assert learned(slot, local) == [2] * 4
    assert LOCAL.tolist() == [8] * 4


def test_adopting_without_keeping_goes_on_from_their_anchor() -> None:
    slot = slot_at(PLAIN, ANCHOR)
    theirs = state_at(3, values(1, 2, 3, 4))
    assert take_over(slot, theirs, LOCAL, keep=False).tolist() == [1, 2, 3, 4]


def test_adopting_a_round_that_has_this_peer_in_it_in_part() -> None:
    """The others' state holds the 2 of the left; the right, and a step since, are still to come."""
    slot = slot_at(PLAIN, ANCHOR)
    local = end(slot, failed(0, counted=LEFT), send(slot, LOCAL))
    assert slot.failed
    before = local - 1
    local = take_over(slot, state_at(1, values(6, 6, 6, 6)), before)
    assert learned(slot, local) == [1, 1, 3, 3]
    assert before.tolist() == [7] * 4
    assert not slot.failed


def test_adopting_the_same_version_does_not_hold_the_failed_round() -> None:
    """Round 0 is not in a state of version 0, so what counted in it is not either."""
    slot = slot_at(PLAIN, ANCHOR)
    local = end(slot, failed(0, counted=LEFT), send(slot, LOCAL))
    local = take_over(slot, state_at(0, values(9, 9, 9, 9)), local)
    assert learned(slot, local) == [2] * 4


def test_a_round_that_arrived_but_was_overtaken_is_not_contributed_again() -> None:
    slot = slot_at(replace(PLAIN, overlap_steps=2), ANCHOR)
    local = send(slot, LOCAL)
    slot.take(done(0, MEAN, missed=RIGHT))
    local = take_over(slot, state_at(2, values(5, 5, 5, 5)), local - 1)
    assert (slot.sent, slot.arrived) == (None, None)
    assert learned(slot, local) == [1, 1, 3, 3]


def test_a_round_given_up_on_the_way_counts_where_its_reduction_was_known() -> None:
    """As `Contributor.give_up` tells it before the state comes."""
    slot = slot_at(replace(PLAIN, overlap_steps=2), ANCHOR)
    local = send(slot, LOCAL)
    slot.take(failed(0, counted=RIGHT))
    local = take_over(slot, state_at(2, values(5, 5, 5, 5)), local - 1)
    assert learned(slot, local) == [3, 3, 1, 1]


def test_an_older_state_leaves_a_later_round_on_its_way() -> None:
    slot = slot_at(PLAIN, ANCHOR, version=4)
    send(slot, LOCAL)
    assert slot.give_up(3, LOCAL) is LOCAL
    assert slot.sent is not None


# ------------------------------------------------------------------------------- error feedback


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


# ------------------------------------------------------------------------------------------ eager


def eager_slot() -> tuple[Slot, Tensor]:
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
