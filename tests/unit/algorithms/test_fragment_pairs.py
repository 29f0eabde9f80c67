"""One fragment in a plan of pairs: two peers' means come, or none; lost rounds are not made up."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.fragment_state import RoundResult
from murmuration.algorithms.plan import PRESETS
from tests.unit.algorithms.four_values import (
    ANCHOR,
    GROUP,
    LEFT,
    LOCAL,
    Failed,
    end,
    hash_of,
    lacks,
    optimizer,
    send,
    take_over,
    values,
)

SHARED = replace(PRESETS["noloco"], outer_momentum=0.5, outer_lr=0.5)
PAIRS = replace(SHARED, shared_momentum=False, outer_pull=0.25)
KEEP = replace(SHARED, codec="sign", merge="keep")


def filled(value: float) -> Tensor:
    return torch.full((4,), float(value))


def met(
    round_: int,
    mean: float,
    mean_anchor: Tensor,
    contributors: int = 2,
    error: Tensor | None = None,
) -> RoundResult:
    return RoundResult(
        round_, filled(mean), contributors, (), (), error=error, mean_anchor=mean_anchor
    )


def test_the_outer_step_pulls_towards_the_pair() -> None:
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


def test_a_shared_momentum_travels_with_the_pseudo_gradient() -> None:
    outer = optimizer(SHARED)
    local = end(outer, met(0, 4, filled(12)), send(outer, LOCAL))
    assert outer.state.momentum.tolist() == [4] * 4
    assert outer.state.anchor.tolist() == local.tolist() == [12 - 0.5 * 4] * 4
    send(outer, local - 3)
    assert outer.in_flight is not None
    assert outer.in_flight.g.tolist() == [3] * 4
    assert outer.in_flight.values.tolist() == [0.5 * 4 + 3] * 4


def test_inner_steps_go_on_from_the_mean_anchor_of_the_next_pair() -> None:
    outer = optimizer(SHARED)
    local = outer.go_on_from(filled(11), LOCAL)
    assert local is not None
    assert local.tolist() == [9] * 4
    assert outer.state.anchor is ANCHOR
    assert outer.go_on_from(filled(11), local) is None  # once
    send(outer, local - 1)
    assert outer.in_flight is not None
    assert outer.in_flight.g.tolist() == [3] * 4
    assert outer.go_on_from(filled(11), local) is None  # too late
    after = end(outer, met(0, 3, filled(11)), local - 1)
    assert after.tolist() == [11 - 0.5 * 3] * 4
    assert outer.start is outer.state.anchor


def test_a_state_of_an_early_start_has_what_was_learned_since_it() -> None:
    before, after = optimizer(SHARED), optimizer(SHARED)
    local = before.go_on_from(filled(11), LOCAL)
    assert local is not None
    after.restore(before.plain())
    send(after, local - 1)
    assert after.in_flight is not None
    assert after.in_flight.g.tolist() == [3] * 4  # against the anchor it would be 0


@pytest.mark.parametrize("start", [None, 11.0], ids=["own anchor", "mean anchor"])
def test_what_was_not_sent_is_kept_behind_the_new_anchor(start: float | None) -> None:
    outer = optimizer(KEEP)
    local = LOCAL if start is None else outer.go_on_from(filled(start), LOCAL)
    assert local is not None
    sent = send(outer, local)  # two steps of 1, of which the encoding leaves out 0.5
    after = end(outer, met(0, 4, filled(11), error=filled(0.5)), sent - 1)
    assert lacks(outer, after) == [0.5 + 1] * 4
    assert outer.state.anchor.tolist() == [11 - 0.5 * 4] * 4


def test_a_lost_round_keeps_all_of_it() -> None:
    outer = optimizer(KEEP)
    local = send(outer, LOCAL)
    assert lacks(outer, end(outer, Failed((), filled(0.5)), local)) == [2] * 4
    send(outer, LOCAL)
    assert outer.in_flight is not None
    assert (outer.in_flight.round, outer.in_flight.g.tolist()) == (1, [2] * 4)


def test_another_peers_state_leaves_what_was_not_sent() -> None:
    outer = optimizer(KEEP)
    local = end(outer, met(0, 4, filled(11), error=filled(0.5)), send(outer, LOCAL))
    theirs = replace(outer.state, version=4, anchor=ANCHOR + 5)
    assert (theirs.anchor - take_over(outer, theirs, local)).tolist() == [0.5] * 4


def test_the_papers_update_starts_from_its_own_anchor() -> None:
    outer = optimizer(PAIRS)
    assert outer.go_on_from(filled(11), LOCAL) is None
    assert outer.start is outer.state.anchor


@pytest.mark.parametrize("lost", [True, False], ids=["lost round", "another state"])
def test_a_head_start_is_taken_back(lost: bool) -> None:
    outer = optimizer(SHARED)
    local = outer.go_on_from(filled(11), LOCAL)
    assert local is not None
    if lost:
        assert end(outer, Failed(), send(outer, local - 1)).tolist() == [7] * 4
    else:
        theirs = replace(outer.state, version=4, anchor=ANCHOR + 5)
        assert take_over(outer, theirs, local).tolist() == (LOCAL + 5).tolist()
    assert outer.start is outer.state.anchor


def test_a_peer_that_sits_out_steps_by_itself() -> None:
    outer = optimizer(PAIRS)
    end(outer, met(0, 2, filled(10), contributors=1), send(outer, LOCAL))
    assert outer.state.anchor.tolist() == [9] * 4
    assert outer.state.contributors == 1
    assert outer.spread is None


def test_a_lost_round_keeps_everything_for_the_next() -> None:
    outer = optimizer(PAIRS)
    before, outer.work_steps = outer.state, 3
    local = end(outer, Failed(), send(outer, LOCAL))
    assert local is LOCAL
    assert outer.state == replace(before, version=1)
    assert not outer.failed
    assert outer.spread is None
    outer.work_steps += 2
    send(outer, local - 1)
    assert outer.in_flight is not None
    sent = outer.in_flight
    assert (sent.round, sent.g.tolist(), sent.work_steps) == (1, [3] * 4, 5)


def test_the_steps_since_stay_when_a_round_that_overlapped_is_lost() -> None:
    outer = optimizer(replace(PAIRS, overlap_steps=2, merge_alpha=0.5))
    local = send(outer, LOCAL) - 1
    assert end(outer, Failed(), local) is local
    assert lacks(outer, local) == [3] * 4


def test_the_schedule_says_which_round_is_next() -> None:
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


def test_the_final_average_takes_the_mean_of_all_anchors_and_no_momentum() -> None:
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


@pytest.mark.parametrize("overtaken", [True, False])
def test_a_final_average_that_fails_leaves_nothing_over(overtaken: bool) -> None:
    outer = optimizer(PAIRS)
    before = outer.state
    outer.skip_to(3)
    outer.contribute_values(outer.state.anchor, step=9)
    if not overtaken:
        assert outer.abandon(LEFT, None, LOCAL) is None
        assert outer.failed
    assert outer.state == replace(before, version=3)
    theirs = replace(before, version=4, anchor=ANCHOR + 1)
    local = take_over(outer, theirs, LOCAL, Failed(LEFT) if overtaken else None)
    assert local.tolist() == (LOCAL + 1).tolist()
    assert outer.state is theirs
    assert not outer.failed
