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
    LOCAL,
    Failed,
    end,
    hash_of,
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
