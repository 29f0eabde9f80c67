"""Proposals keep what they promise."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.algorithms.utilization import (
    PERIODS,
    Proposal,
    Workload,
    least_mbps,
    predict,
    propose,
)
from murmuration.worker.config import load_config

SMALL = Workload(step_s=0.1, layers=(1000,) * 6, outside=500)
LLAMA = Workload(step_s=0.4, layers=(110_784,) * 3, outside=49_248)
PLANS = {
    name: [load_config(None, [f"diloco.inner_steps={h}"], name).plan for h in PERIODS]
    for name in PRESETS
}


def proposed(
    target: float, link: Link, *presets: str, workload: Workload = SMALL
) -> list[Proposal]:
    plans: Mapping[str, Sequence[Plan]] = {name: PLANS[name] for name in presets or PRESETS}
    return propose(target, plans, workload, link, 4)


def like_steps(plan: Plan) -> float:
    """One bit loses as much as four bits and 1.3 times the period, fewer as 3.4 times, and both as
    much before step 7. Gradients lose nothing."""
    if plan.payload == "gradient":
        return 0
    few = {"sign": 1.3, "topk128": 3.4}.get(plan.codec)
    return few * max(7, plan.inner_steps) if few else plan.inner_steps


@pytest.mark.parametrize(
    ("target", "mbps"), [(0.5, 0.3), (0.95, 0.3), (0.99, 3.0), (0.95, 300.0), (0.99, 300.0)]
)
def test_each_has_the_smallest_h_that_reaches_the_target(target: float, mbps: float) -> None:
    link = Link(rate_mbps=mbps, delay_s=0.02)
    ranked = proposed(target, link)
    assert ranked
    for proposal in ranked:
        plan = proposal.plan
        assert predict(plan, SMALL, link, 4) == proposal.prediction
        assert proposal.prediction.utilization >= target
        shorter = [each for each in PLANS[proposal.preset] if each.inner_steps < plan.inner_steps]
        fitting = [
            each for each in shorter if len(SMALL.fragments(each.fragments)) <= each.inner_steps
        ]
        assert all(predict(each, SMALL, link, 4).utilization < target for each in fitting)
    keys = [(each.preset == "co2", like_steps(each.plan)) for each in ranked]
    assert keys == sorted(keys)
    assert {each.preset for each in ranked} <= PRESETS.keys() - {"local"}


def test_on_a_link_that_carries_gradients_ddp_comes_first() -> None:
    first = proposed(0.9, Link(rate_mbps=1e4))[0]
    assert (first.preset, first.plan) == ("ddp", PRESETS["ddp"])


@pytest.mark.parametrize(
    "link", [Link(rate_mbps=1, delay_s=0.02), Link(rate_mbps=1000, delay_s=0.02)]
)
def test_a_whole_period_of_overlap_comes_last(link: Link) -> None:
    *others, last = proposed(0.98, link)
    assert last.preset == "co2"
    assert last.plan.overlap_steps == last.plan.inner_steps
    assert others


def test_what_cannot_be_reached_names_the_speed_that_could() -> None:
    slow = Link(rate_mbps=1e-5)
    plans = {name: PLANS[name] for name in ("streaming", "noloco")}
    assert not propose(0.9, plans, SMALL, slow, 4)
    mbps = least_mbps(0.9, plans, SMALL, slow, 4)
    assert mbps is not None
    assert propose(0.9, plans, SMALL, replace(slow, rate_mbps=mbps), 4)
    assert least_mbps(0.9, plans, SMALL, Link(rate_mbps=9, delay_s=100), 4) is None


@pytest.mark.parametrize(
    ("mbps", "ranked"),
    [
        (0.003, [("sparse", 20), ("onebit", 150), ("streaming", 200)]),
        (0.01, [("sparse", 10), ("streaming", 60), ("onebit", 50)]),
    ],
)
def test_few_bits_count_as_a_longer_period(mbps: float, ranked: list[tuple[str, int]]) -> None:
    """1.3 times for a bit, 3.4 times for less: docs/evidence/bytes.md."""
    found = proposed(0.95, Link(rate_mbps=mbps, delay_s=0.02), "streaming", "onebit", "sparse")
    assert [(each.preset, each.plan.inner_steps) for each in found] == ranked


def test_few_bits_come_behind_a_period_that_is_short_with_more_bits() -> None:
    """`onebit` reaches the target at H 5, where nothing says that it loses less than at H 7."""
    link = Link(rate_mbps=150, delay_s=0.01)
    best, second = proposed(0.95, link, "diloco", "onebit", workload=LLAMA)
    assert (best.preset, best.plan.inner_steps) == ("diloco", 8)
    assert (second.preset, second.plan.inner_steps) == ("onebit", 5)
