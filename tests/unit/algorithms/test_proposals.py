"""Proposals keep what they promise."""

from dataclasses import replace
from itertools import pairwise

import pytest

from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.presets import PRESETS
from murmuration.algorithms.proposals import propose
from murmuration.algorithms.utilization import Workload, predict

DILOCO = PRESETS["diloco"]
SMALL = Workload(step_s=0.1, layers=(1000,) * 6, outside=500)
LLAMA = Workload(step_s=0.4, layers=(110_784,) * 3, outside=49_248)
LINK = Link(rate_mbps=1)
TWO = {name: PRESETS[name] for name in ("streaming", "noloco")}


def like_steps(plan: Plan) -> float:
    """One bit loses as much as four bits and 1.3 times the period, fewer as 3.4 times, and both as
    much before step 7. Gradients lose nothing."""
    if plan.payload == "gradient":
        return 0
    few = {"sign": 1.3, "topk128": 3.4}.get(plan.codec)
    return few * max(7, plan.inner_steps) if few else plan.inner_steps


def is_whole(plan: Plan) -> bool:
    return plan.overlap_steps == plan.inner_steps


@pytest.mark.parametrize(
    ("target", "mbps"), [(0.5, 0.3), (0.95, 0.3), (0.99, 3.0), (0.95, 300.0), (0.99, 300.0)]
)
def test_each_reaches_the_target_and_none_replaces_another(target: float, mbps: float) -> None:
    link = Link(rate_mbps=mbps, delay_s=0.02)
    ranked = propose(target, PRESETS, SMALL, link, 4, most=99).ranked
    assert ranked
    keys = []
    for proposal in ranked:
        plan = proposal.plan
        assert predict(plan, SMALL, link, 4) == proposal.prediction
        assert proposal.prediction.utilization >= target
        if proposal.base == "co2":
            assert is_whole(plan)
        else:
            assert plan.overlap_steps <= min(10, plan.inner_steps / 4)
        assert (plan.merge_alpha > 0) == (plan.overlap_steps > 0) or plan.keeps
        assert proposal.fragments == len(SMALL.fragments(plan.fragments))
        keys.append((is_whole(plan), like_steps(plan), -proposal.bits, plan.overlap_steps))
    assert keys == sorted(keys)
    for first, later in pairwise(keys):
        assert later[0] or any(a < b for a, b in zip(later[2:], first[2:], strict=True))


def test_a_fast_link_needs_no_change_but_the_smallest_h() -> None:
    best = propose(0.9, {"mine": DILOCO}, SMALL, Link(rate_mbps=1e6), 4).ranked
    assert [(p.base, p.plan) for p in best] == [("mine", replace(DILOCO, inner_steps=1))]


def test_on_a_link_that_carries_gradients_ddp_comes_first() -> None:
    fast = propose(0.9, PRESETS, SMALL, Link(rate_mbps=1e4), 4).ranked
    assert [(p.base, p.plan) for p in fast] == [("ddp", PRESETS["ddp"])]
    # In bf16 a link of half the speed will do, and in fewer bits it would not be what DDP is.
    half, *others = propose(0.9, PRESETS, SMALL, Link(rate_mbps=20), 4).ranked
    assert (half.base, half.plan.codec, half.plan.payload) == ("ddp", "bf16", "gradient")
    assert all(other.base != "ddp" and other.bits > half.bits for other in others)


@pytest.mark.parametrize(
    ("target", "link"),
    [
        (0.95, Link(rate_mbps=1, delay_s=0.02)),
        (0.98, Link(rate_mbps=1000, delay_s=0.02)),
    ],
)
def test_a_whole_period_of_overlap_stays_one_and_comes_last(target: float, link: Link) -> None:
    for bases in ({"co2": PRESETS["co2"]}, PRESETS):
        *others, last = propose(target, bases, SMALL, link, 4, most=99).ranked
        assert (last.base, last.plan.codec) == ("co2", PRESETS["co2"].codec)
        assert is_whole(last.plan)
        assert not any(is_whole(other.plan) for other in others)
        assert (bases is PRESETS) == bool(others)


@pytest.mark.parametrize("name", ["streaming", "onebit", "sparse"])
def test_a_measured_overlap_is_fixed_where_there_is_none(name: str) -> None:
    base = replace(PRESETS[name], overlap="measured")
    ranked = propose(0.95, {name: base}, SMALL, Link(rate_mbps=0.02), 4, most=99).ranked
    assert {proposal.plan.overlap_steps > 0 for proposal in ranked} == {False, True}
    for proposal in ranked:
        measured = proposal.plan.overlap == "measured"
        assert measured == (proposal.plan.overlap_steps > 0)


def test_a_larger_h_is_proposed_where_it_saves_overlap() -> None:
    ranked = propose(0.95, {"mine": DILOCO}, SMALL, Link(rate_mbps=1), 4).ranked
    assert ranked[0].plan.overlap_steps > 0
    assert ranked[-1].plan.overlap_steps == 0
    assert ranked[-1].plan.inner_steps > ranked[0].plan.inner_steps
    assert len(ranked) <= 5


def test_what_cannot_be_reached_names_the_speed_that_could() -> None:
    slow = Link(rate_mbps=1e-5)
    proposals = propose(0.9, TWO, SMALL, slow, 4)
    assert proposals.ranked == ()
    assert proposals.needed_mbps is not None
    faster = replace(slow, rate_mbps=proposals.needed_mbps)
    assert propose(0.9, TWO, SMALL, faster, 4).ranked


def test_a_delay_that_no_speed_makes_up_for_is_said() -> None:
    proposals = propose(0.9, TWO, SMALL, Link(rate_mbps=9, delay_s=100), 4)
    assert proposals.ranked == ()
    assert proposals.needed_mbps is None


def test_only_a_plan_that_is_sparse_itself_is_proposed_with_a_sparse_codec() -> None:
    sparse = replace(DILOCO, codec="topk", merge="keep")
    for proposal in propose(0.95, {"mine": DILOCO}, SMALL, Link(rate_mbps=1), 4, most=99).ranked:
        assert proposal.bits >= 4
    own = propose(0.95, {"sparse": sparse}, SMALL, Link(rate_mbps=0.1), 4, most=99).ranked
    assert "topk" in {proposal.plan.codec for proposal in own}


def test_on_a_slow_link_a_preset_of_few_bits_comes_before_a_long_period() -> None:
    """Four bits reach the target too, but at a period that loses more."""
    link = Link(rate_mbps=0.003, delay_s=0.02)
    best = propose(0.95, PRESETS, SMALL, link, 4).ranked[0]
    assert best.base in ("onebit", "sparse")
    assert best.plan.merge == "keep"
    assert (best.plan.codec, best.plan.outer_lr) == (
        PRESETS[best.base].codec, PRESETS[best.base].outer_lr
    )  # fmt: skip
    others = {name: plan for name, plan in PRESETS.items() if not plan.keeps}
    without = propose(0.95, others, SMALL, link, 4).ranked[0]
    assert without.plan.inner_steps > like_steps(best.plan)


def test_one_bit_counts_for_less_than_half_of_what_fewer_count_for() -> None:
    """After 2,400 steps `onebit`, H 28, and `sparse`, H 10, lose alike: docs/evidence/bytes.md."""
    link = Link(rate_mbps=1, delay_s=0.02)
    bases = {name: PRESETS[name] for name in ("onebit", "sparse")}
    first, second, *_ = propose(0.95, bases, replace(LLAMA, step_s=0.027), link, 4, most=99).ranked
    assert (first.base, first.plan.inner_steps) == ("onebit", 40)
    assert (second.base, second.plan.inner_steps) == ("sparse", 20)


def test_few_bits_come_behind_a_period_that_is_short_with_more_bits() -> None:
    """`onebit` reaches the target at H 3, where nothing says that it loses less than at H 7."""
    link = Link(rate_mbps=100, delay_s=0.02)
    bases = {name: PRESETS[name] for name in ("diloco", "onebit")}
    best = propose(0.95, bases, LLAMA, link, 4).ranked[0]
    assert (best.plan.inner_steps, best.plan.codec) == (5, "fp32")
    own = propose(0.95, {"onebit": PRESETS["onebit"]}, LLAMA, link, 4).ranked[0]
    assert own.plan.inner_steps < best.plan.inner_steps


def test_without_anything_to_vary_or_a_possible_target_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no plan to start from"):
        propose(0.9, {"local": PRESETS["local"]}, SMALL, Link(rate_mbps=1), 4)
    with pytest.raises(ValueError, match="the target is 1; a utilization is between 0 and 1"):
        propose(1.0, PRESETS, SMALL, Link(rate_mbps=1), 4)
