"""Utilization: closed forms, what predictions say of a plan on a link, and what is proposed."""

import math
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.algorithms.schedule import Due, Schedule
from murmuration.algorithms.utilization import (
    PERIODS,
    PlannedRounds,
    Workload,
    least_mbps,
    needed_mbps,
    predict,
    propose,
    utilization,
)
from murmuration.worker.config import load_config
from tests.support.specification import applies

DILOCO = PRESETS["diloco"]
SMALL = Workload(step_s=0.1, layers=(1000,) * 6, outside=500)


SKIPPED = 4  # periods that the simulator leaves out, and then counts


def rounds(
    workload: Workload, inner_steps: int = 1, tau: int = 0, fragments: int = 1, bits: float = 32.0
) -> PlannedRounds:
    sent = tuple(bits * part.elements for part in workload.fragments(fragments))
    return PlannedRounds(inner_steps=inner_steps, overlap_steps=tau, fragment_bits=sent)


def at(workload: Workload, sent: PlannedRounds, mbps: float, latency_s: float = 0.0) -> float:
    return float(utilization(workload, sent, np.array([mbps]), latency_s=latency_s)[0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, PlannedRounds]:
    workload = Workload(
        step_s=draw(st.floats(0.01, 1.0)),
        layers=tuple(draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=6))),
        outside=draw(st.sampled_from((0, 5000))),
    )
    count = draw(st.integers(1, len(workload.layers)))
    inner_steps = draw(st.integers(len(workload.fragments(count)), 12))
    tau = draw(st.integers(0, inner_steps))
    return workload, rounds(workload, inner_steps, tau, count, draw(st.floats(1.0, 64.0)))


SPEEDS = st.floats(1e-3, 1e2)
LATENCIES = st.sampled_from((0.0, 0.03, 0.7))


class TestClosedForms:
    @settings(max_examples=40)
    @given(case=cases())
    def test_an_infinitely_fast_link_costs_nothing(self, case):
        assert at(*case, math.inf) == pytest.approx(1, rel=1e-9)

    def test_data_parallel_on_one_layer_waits_for_all_of_it(self):
        one = Workload(step_s=0.1, layers=(1000,))  # 32,000 bits: 0.4 s at 0.08 Mbit/s
        assert at(one, rounds(one), 0.08) == pytest.approx(0.1 / 0.5)
        assert at(one, rounds(one), 0.08, 0.5) == pytest.approx(0.1 / 1.0)

    @given(st.integers(1, 12), st.data(), SPEEDS, LATENCIES)
    def test_one_fragment_is_free_for_tau_steps(self, inner_steps, data, mbps, latency_s):
        tau = data.draw(st.integers(0, inner_steps))
        takes_s = 32 * SMALL.parameters / (mbps * 1e6) + latency_s
        waits_s, computes_s = max(0.0, takes_s - tau * SMALL.step_s), inner_steps * SMALL.step_s
        found = at(SMALL, rounds(SMALL, inner_steps, tau), mbps, latency_s)
        assert found == pytest.approx(computes_s / (computes_s + waits_s), rel=1e-9)

    @given(cases(), SPEEDS, LATENCIES)
    def test_it_is_what_the_engines_schedule_gives_step_by_step(self, case, mbps, latency_s):
        workload, sent = case
        counted = 2 * SKIPPED * sent.inner_steps
        schedule = Schedule(
            fragments=len(sent.fragment_bits),
            inner_steps=sent.inner_steps,
            overlap_steps=sent.overlap_steps,
            steps=counted + 2 * sent.inner_steps,  # beyond the closing rounds
        )
        now = free = 0.0
        there: dict[Due, float] = {}
        ends = [0.0]
        for step in range(1, counted + 1):
            now += workload.step_s
            now = max([now, *(there[due] for due in applies(schedule, step))])
            for due in schedule.sends(step):
                free = max(free, now) + sent.fragment_bits[due.fragment] / (mbps * 1e6)
                there[due] = free + latency_s
                if schedule.applies_at_once(step):
                    last = there[due]
            if schedule.applies_at_once(step) and schedule.sends(step):
                now = last
            ends.append(now)
        elapsed, computing = ends[counted] - ends[counted // 2], counted / 2 * workload.step_s
        assert at(*case, mbps, latency_s) == pytest.approx(min(1, computing / elapsed), rel=1e-9)


@settings(max_examples=40)
@given(case=cases(), mbps=SPEEDS, latency_s=LATENCIES)
def test_faster_links_and_overlap_never_cost_and_bits_and_latency_never_help(case, mbps, latency_s):
    found = utilization(*case, np.geomspace(1e-4, 1e4, 60), latency_s=latency_s)
    assert ((found > 0) & (found <= 1)).all()
    assert (np.diff(found) >= -1e-9).all()
    workload, sent = case
    overlapped = [
        at(workload, replace(sent, overlap_steps=tau), mbps, latency_s)
        for tau in range(sent.inner_steps + 1)
    ]
    assert all(more >= less - 1e-9 for less, more in pairwise(overlapped))
    base = at(workload, sent, mbps, latency_s)
    double = replace(sent, fragment_bits=tuple(2 * bits for bits in sent.fragment_bits))
    assert at(workload, double, mbps, latency_s) <= base + 1e-9
    assert at(workload, sent, mbps, latency_s + 0.1) <= base + 1e-9


class TestPrediction:
    def test_diloco_by_hand(self):
        # 1.5 x 32 bits x 6,500 parameters = 0.312 Mbit: 0.312 s, and 2 x 0.1 s of delay.
        link = Link(rate_mbps=1, delay_s=0.08, jitter_s=0.02)
        assert asdict(predict(replace(DILOCO, inner_steps=10), SMALL, link, 4)) == pytest.approx(
            {
                "stall_s_per_period": 0.512, "period_s": 1.512, "utilization": 1 / 1.512,
                "bytes_per_sync": 39_000, "largest_sync_bytes": 39_000, "bytes_per_step": 3_900,
                "ddp_ratio": 10 * 16 / 32, "link_share": 0.312 / 1.512,
                "peak_link_share": 0.512 / 0.1,
            }
        )  # fmt: skip

    def test_what_goes_ahead_costs_no_time_while_the_link_has_room(self):
        pairs, link = PRESETS["noloco"], Link(rate_mbps=1.0)
        wide = predict(pairs, SMALL, link, 4)
        assert wide.stall_s_per_period == pytest.approx(32 * 6500 / 1e6, rel=1e-6)
        narrow = predict(pairs, SMALL, replace(link, rate_mbps=0.1), 4)
        assert narrow.period_s == pytest.approx(2 * 32 * 6500 / 1e5)
        assert narrow.link_share == pytest.approx(1)

    def test_local_training_sends_nothing(self):
        told = predict(PRESETS["local"], SMALL, Link(rate_mbps=0.001, delay_s=9), 4)
        nothing = {"bytes_per_step": 0, "bytes_per_sync": 0, "largest_sync_bytes": 0}
        nothing |= {"ddp_ratio": None, "link_share": 0, "peak_link_share": 0}
        assert replace(told, **nothing) == told
        assert told.utilization == pytest.approx(1)
        assert needed_mbps(PRESETS["local"], SMALL, Link(rate_mbps=1), 4, 0.99) == 0

    @pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"local"}))
    @pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
    def test_the_needed_speed_is_just_enough(self, preset, target):
        plan, near = PRESETS[preset], Link(rate_mbps=1, delay_s=1e-6)
        mbps = needed_mbps(plan, SMALL, near, 4, target)
        assert mbps is not None
        enough = predict(plan, SMALL, replace(near, rate_mbps=mbps), 4)
        less = predict(plan, SMALL, replace(near, rate_mbps=0.995 * mbps), 4)
        assert less.utilization < target <= enough.utilization

    def test_no_speed_makes_up_for_a_delay(self):
        assert needed_mbps(DILOCO, SMALL, Link(rate_mbps=1, delay_s=5), 4, 0.5) is None


# ---------------------------------------------------------------------------------------- proposals

PLANS = {
    name: [load_config(None, [f"diloco.inner_steps={h}"], name).plan for h in PERIODS]
    for name in PRESETS
}


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
def test_each_has_the_smallest_h_that_reaches_the_target(target, mbps):
    link = Link(rate_mbps=mbps, delay_s=0.02)
    ranked = propose(target, PLANS, SMALL, link, 4)
    assert ranked
    for preset, plan, prediction in ranked:
        assert predict(plan, SMALL, link, 4) == prediction
        assert prediction.utilization >= target
        shorter = [each for each in PLANS[preset] if each.inner_steps < plan.inner_steps]
        fitting = [
            each for each in shorter if len(SMALL.fragments(each.fragments)) <= each.inner_steps
        ]
        assert all(predict(each, SMALL, link, 4).utilization < target for each in fitting)
    keys = [(preset == "co2", like_steps(plan)) for preset, plan, _ in ranked]
    assert keys == sorted(keys)
    assert {preset for preset, *_ in ranked} <= PRESETS.keys() - {"local"}


def test_what_cannot_be_reached_names_the_speed_that_could():
    slow, plans = Link(rate_mbps=1e-5), {name: PLANS[name] for name in ("streaming", "noloco")}
    assert not propose(0.9, plans, SMALL, slow, 4)
    mbps = least_mbps(0.9, plans, SMALL, slow, 4)
    assert mbps is not None
    assert propose(0.9, plans, SMALL, replace(slow, rate_mbps=mbps), 4)
    assert least_mbps(0.9, plans, SMALL, Link(rate_mbps=9, delay_s=100), 4) is None
