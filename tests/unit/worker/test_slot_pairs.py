"""A slot in a plan of pairs: two peers' means come, or none; nobody makes up for a lost round."""

from dataclasses import replace

import pytest
import torch

from algorithms.plan import PRESETS, Plan
from tests.unit.worker.slots import (
    GROUP,
    end,
    failed,
    learned,
    send,
    slot_at,
    values,
)
from worker.training.fragment import FragmentReplica
from worker.training.inbox import PrefetchedAnchor, RoundDone
from worker.wire import state_hash

ANCHOR, LOCAL = torch.full((4,), 10.0), torch.full((4,), 8.0)
SHARED = replace(PRESETS["noloco"], outer_momentum=0.5, outer_lr=0.5)
PAIRS = replace(SHARED, shared_momentum=False, outer_pull=0.25)


def met(
    round_: int, mean: list[float], mean_anchor: list[float], contributors: int = 2
) -> RoundDone:
    means = torch.tensor([mean, mean_anchor])
    return RoundDone(0, round_, means[0], contributors, (), (), mean_anchor=means[1])


def test_the_outer_step_pulls_towards_the_pair() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    local = end(slot, met(0, [4.0] * 4, [12.0] * 4), send(slot, LOCAL))
    momentum = -0.5 * 4 - 0.25 * (10 - 12)
    assert slot.state.momentum.tolist() == [momentum] * 4
    assert slot.state.anchor.tolist() == local.tolist() == [10 + momentum] * 4
    assert (slot.state.version, slot.state.contributors, slot.state.group) == (1, 2, GROUP)
    assert slot.state.hash == state_hash(slot.state.anchor, slot.state.momentum, GROUP)
    assert slot.spread == pytest.approx(2 / 12)
    local = end(slot, met(1, [4.0] * 4, slot.state.anchor.tolist()), send(slot, local))
    assert slot.state.momentum.tolist() == [0.5 * momentum - 0.5 * 4] * 4
    assert slot.spread == 0.0


def test_a_shared_momentum_travels_with_the_pseudo_gradient() -> None:
    slot = slot_at(SHARED, ANCHOR)
    local = end(slot, met(0, [4.0] * 4, [12.0] * 4), send(slot, LOCAL))
    assert slot.state.momentum.tolist() == [4] * 4
    assert slot.state.anchor.tolist() == local.tolist() == [12 - 0.5 * 4] * 4
    send(slot, local - 3)
    assert slot.sent is not None
    assert slot.sent.g.tolist() == [3] * 4
    assert slot.sent.values.tolist() == [0.5 * 4 + 3] * 4


def head_start(
    slot: FragmentReplica, local: torch.Tensor, round_: int, mean: float
) -> torch.Tensor | None:
    slot.take(PrefetchedAnchor(0, round_, torch.full((4,), mean)))
    return slot.go_on_from_group(local)


def test_inner_steps_go_on_from_the_mean_anchor_of_the_next_pair() -> None:
    slot = slot_at(SHARED, ANCHOR)
    assert slot.go_on_from_group(LOCAL) is None
    local = head_start(slot, LOCAL, 0, 11.0)
    assert local is not None
    assert local.tolist() == [9] * 4
    assert slot.own(local).tolist() == [8] * 4
    assert slot.state.anchor is ANCHOR
    assert slot.go_on_from_group(local) is None
    send(slot, local - 1)
    assert slot.sent is not None
    assert slot.sent.g.tolist() == [3] * 4
    after = end(slot, met(0, [3.0] * 4, [11.0] * 4), local - 1)
    assert after.tolist() == [11 - 0.5 * 3] * 4
    assert slot.start is slot.state.anchor


def test_a_head_start_is_taken_back_when_the_round_is_lost() -> None:
    slot = slot_at(SHARED, ANCHOR)
    local = head_start(slot, LOCAL, 0, 11.0)
    assert local is not None
    assert end(slot, failed(0), send(slot, local - 1)).tolist() == [7] * 4
    assert slot.start is slot.state.anchor is ANCHOR


def test_a_head_start_is_taken_back_when_another_state_comes() -> None:
    slot = slot_at(SHARED, ANCHOR)
    local = head_start(slot, LOCAL, 0, 11.0)
    assert local is not None
    theirs = replace(slot.state, version=4, anchor=ANCHOR + 5)
    kept = slot.adopt(theirs, slot.give_up(4, local), keep=True)
    assert kept.tolist() == (LOCAL + 5).tolist()


@pytest.mark.parametrize("plan", [SHARED, PAIRS], ids=["shared momentum", "the paper's"])
def test_no_head_start_comes_too_late_or_for_another_round(plan: Plan) -> None:
    slot = slot_at(plan, ANCHOR)
    assert head_start(slot, LOCAL, 1, 11.0) is None
    assert slot.go_on_from_group(LOCAL) is None
    send(slot, LOCAL)
    assert head_start(slot, LOCAL, 0, 11.0) is None
    assert slot.start is slot.state.anchor


def test_who_sits_out_steps_by_itself() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    end(slot, met(0, [2.0] * 4, [10.0] * 4, contributors=1), send(slot, LOCAL))
    assert slot.state.anchor.tolist() == [9] * 4
    assert slot.state.contributors == 1
    assert slot.spread is None


def test_a_lost_round_keeps_the_local_parameters_and_goes_on_to_the_next() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    before = slot.state
    local = end(slot, failed(0), send(slot, LOCAL))
    assert local is LOCAL
    assert slot.state.version == 1
    assert not slot.failed
    assert slot.state.anchor is before.anchor
    assert slot.state.momentum is before.momentum
    assert slot.state.hash == before.hash
    assert slot.spread is None


def test_what_was_learned_before_a_lost_round_goes_into_the_next() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    slot.work_steps = 3
    local = end(slot, failed(0), send(slot, LOCAL)) - 1
    slot.work_steps += 2
    send(slot, local)
    assert slot.sent is not None
    assert (slot.sent.round, slot.sent.g.tolist(), slot.sent.work_steps) == (1, [3] * 4, 5)


def test_the_steps_since_stay_when_a_round_that_overlapped_is_lost() -> None:
    slot = slot_at(replace(PAIRS, overlap_steps=2, merge_alpha=0.5), ANCHOR)
    local = send(slot, LOCAL) - 1
    assert end(slot, failed(0), local) is local
    assert learned(slot, local) == [3] * 4


def test_the_schedule_says_which_round_is_next() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    before = slot.state
    slot.enter(7)
    assert replace(slot.state, version=0) == before
    send(slot, LOCAL)
    assert slot.sent is not None
    assert slot.sent.round == 7


def test_agreeing_takes_the_mean_of_all_anchors_and_no_momentum() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    end(slot, met(0, [4.0] * 4, [12.0] * 4), send(slot, LOCAL))
    sent = slot.send_anchor(1, step=9)
    assert (sent.round, sent.step, sent.values) == (1, 9, slot.state.anchor)
    mean, everyone = values(1.0, 2.0, 3.0, 4.0), (*GROUP, "z")
    local = slot.agree(RoundDone(0, 1, mean, 4, everyone, ()))
    assert local.tolist() == slot.state.anchor.tolist() == [1, 2, 3, 4]
    assert slot.state.momentum.tolist() == [0] * 4
    assert (slot.state.version, slot.sent, slot.spread) == (2, None, 0.0)
    assert (slot.state.contributors, slot.state.group) == (4, everyone)
    assert slot.state.hash == state_hash(slot.state.anchor, slot.state.momentum, everyone)


def test_whose_pass_has_failed_keeps_its_anchor_until_it_takes_that_of_the_others() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    before = slot.state
    sent = slot.send_anchor(3, step=9)
    assert slot.fail(sent, failed(3, counted=((0, 2),)), LOCAL) is None
    assert slot.failed
    assert slot.state == replace(before, version=3)
    theirs = replace(before, version=4, anchor=ANCHOR + 1)
    assert slot.adopt(theirs, LOCAL, keep=True).tolist() == (LOCAL + 1).tolist()
    assert slot.state is theirs
    assert not slot.failed


def test_a_pass_that_another_state_supersedes_leaves_nothing_over() -> None:
    slot = slot_at(PAIRS, ANCHOR)
    slot.send_anchor(3, step=9)
    slot.take(RoundDone(0, 3, ANCHOR, 4, GROUP, ()))
    assert slot.give_up(4, LOCAL) is LOCAL
    theirs = replace(slot.state, version=4, anchor=ANCHOR + 1)
    assert slot.adopt(theirs, LOCAL, keep=True).tolist() == (LOCAL + 1).tolist()
