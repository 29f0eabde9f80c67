"""A slot by hand: an outer step that just follows the mean, and another peer's state."""

from dataclasses import replace

import pytest

from tests.unit.worker.slots import (
    ANCHOR,
    GROUP,
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
from worker.training.fragment import complement
from worker.wire import state_hash


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
