"""Utilization: closed forms, and what predictions say of a plan on a link."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import PRESETS
from murmuration.algorithms.schedule import Due, Schedule
from murmuration.algorithms.utilization import (
    PlannedRounds,
    PlanPrediction,
    Workload,
    needed_mbps,
    predict,
    rounds_of,
    utilization,
)
from tests.support.specification import applies

DILOCO = PRESETS["diloco"]
SMALL = Workload(step_s=0.1, layers=(1000,) * 6, outside=500)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_s": 0.0}, "a step of 0 s"),
        ({"step_s": math.nan}, "a step of nan s"),
        ({"layers": ()}, "at least one layer"),
        ({"layers": (3, 0)}, "at least one layer, and each layer a parameter"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="7 fragments of 6 layers"):
        rounds_of(replace(DILOCO, fragments=7), SMALL, 4)
    with pytest.raises(ValueError, match="7 fragments do not fit into inner_steps = 5"):
        rounds_of(replace(DILOCO, fragments=6, inner_steps=5), SMALL, 4)


PERIODS = 4  # that the simulator leaves out, and then counts


def rounds(
    workload: Workload,
    inner_steps: int = 1,
    tau: int = 0,
    fragments: int = 1,
    bits: float = 32.0,
) -> PlannedRounds:
    parts = workload.fragments(fragments)
    return PlannedRounds(
        inner_steps=inner_steps,
        overlap_steps=tau,
        fragment_bits=tuple(bits * part.elements for part in parts),
    )


def at(
    workload: Workload,
    sent: PlannedRounds,
    mbps: float,
    latency_s: float = 0.0,
) -> float:
    return float(utilization(workload, sent, np.array([mbps]), latency_s=latency_s)[0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, PlannedRounds]:
    workload = Workload(
        step_s=draw(st.floats(0.01, 1.0)),
        layers=tuple(draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=6))),
        outside=draw(st.sampled_from((0, 5000))),
    )
    count = draw(st.integers(1, len(workload.layers)))
    least = len(workload.fragments(count))
    inner_steps = draw(st.integers(least, 12))
    tau = draw(st.integers(0, inner_steps))
    return workload, rounds(workload, inner_steps, tau, count, draw(st.floats(1.0, 64.0)))


SPEEDS = st.floats(1e-3, 1e2)
LATENCIES = st.sampled_from((0.0, 0.03, 0.7))


class TestClosedForms:
    @settings(max_examples=40)
    @given(case=cases())
    def test_an_infinitely_fast_link_costs_nothing(
        self, case: tuple[Workload, PlannedRounds]
    ) -> None:
        assert at(*case, math.inf) == pytest.approx(1, rel=1e-9)

    def test_data_parallel_on_one_layer_waits_for_all_of_it(self) -> None:
        one = Workload(step_s=0.1, layers=(1000,))  # 32,000 bits: 0.4 s at 0.08 Mbit/s
        sent = rounds(one)
        assert at(one, sent, 0.08) == pytest.approx(0.1 / 0.5)
        assert at(one, sent, 0.08, 0.5) == pytest.approx(0.1 / 1.0)

    @given(st.integers(1, 12), st.data(), SPEEDS, LATENCIES)
    def test_one_fragment_is_free_for_tau_steps(
        self, inner_steps: int, data: st.DataObject, mbps: float, latency_s: float
    ) -> None:
        tau = data.draw(st.integers(0, inner_steps))
        takes_s = 32 * SMALL.parameters / (mbps * 1e6) + latency_s
        waits_s = max(0.0, takes_s - tau * SMALL.step_s)
        computes_s = inner_steps * SMALL.step_s
        found = at(SMALL, rounds(SMALL, inner_steps, tau), mbps, latency_s)
        assert found == pytest.approx(computes_s / (computes_s + waits_s), rel=1e-9)

    @given(cases(), SPEEDS)
    def test_no_plan_computes_faster_than_its_link_carries(
        self, case: tuple[Workload, PlannedRounds], mbps: float
    ) -> None:
        workload, sent = case
        bound = sent.inner_steps * workload.step_s / (sent.bits_per_period / (mbps * 1e6))
        assert at(*case, mbps) <= bound * (1 + 1e-9)

    @given(cases(), SPEEDS, LATENCIES)
    def test_it_is_what_the_engines_schedule_gives_step_by_step(
        self, case: tuple[Workload, PlannedRounds], mbps: float, latency_s: float
    ) -> None:
        workload, sent = case
        counted = 2 * PERIODS * sent.inner_steps
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
        elapsed = ends[counted] - ends[counted // 2]
        computing = counted / 2 * workload.step_s
        assert at(*case, mbps, latency_s) == pytest.approx(min(1, computing / elapsed), rel=1e-9)


@settings(max_examples=40)
@given(case=cases(), mbps=SPEEDS, latency_s=LATENCIES)
def test_faster_links_and_overlap_never_cost_and_bits_and_latency_never_help(
    case: tuple[Workload, PlannedRounds], mbps: float, latency_s: float
) -> None:
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
    def test_diloco_by_hand(self) -> None:
        # 1.5 x 32 bits x 6,500 parameters = 0.312 Mbit: 0.312 s, and 2 x 0.1 s of delay.
        link = Link(rate_mbps=1, delay_s=0.08, jitter_s=0.02)
        told = predict(replace(DILOCO, inner_steps=10), SMALL, link, 4)
        assert told.stall_s_per_period == pytest.approx(0.512)
        assert told.period_s == pytest.approx(1.512)
        assert told.utilization == pytest.approx(1 / 1.512)
        assert told.bytes_per_sync == told.largest_sync_bytes == pytest.approx(39_000)
        assert told.bytes_per_step == pytest.approx(3_900)
        assert told.ddp_ratio == pytest.approx(10 * 16 / 32)
        assert told.link_share == pytest.approx(0.312 / 1.512)
        assert told.peak_link_share == pytest.approx(0.512 / 0.1)

    def test_what_goes_ahead_costs_no_time_while_the_link_has_room(self) -> None:
        pairs, link = PRESETS["noloco"], Link(rate_mbps=1.0)
        wide = predict(pairs, SMALL, link, 4)
        assert wide.stall_s_per_period == pytest.approx(32 * 6500 / 1e6, rel=1e-6)
        narrow = predict(pairs, SMALL, replace(link, rate_mbps=0.1), 4)
        assert narrow.period_s == pytest.approx(2 * 32 * 6500 / 1e5)
        assert narrow.link_share == pytest.approx(1)

    def test_fragments_lower_the_peak_not_the_total(self) -> None:
        link = Link(rate_mbps=1)
        whole = predict(replace(DILOCO, overlap_steps=2), SMALL, link, 4)
        parts = predict(replace(DILOCO, overlap_steps=2, fragments=6), SMALL, link, 4)
        assert parts.bytes_per_sync == pytest.approx(whole.bytes_per_sync)
        assert parts.largest_sync_bytes == pytest.approx(whole.bytes_per_sync * 1000 / 6500)
        assert whole.peak_link_share == pytest.approx(0.312 / 0.2)
        assert whole.utilization < parts.utilization == pytest.approx(1)

    def test_local_training_sends_nothing(self) -> None:
        told = predict(PRESETS["local"], SMALL, Link(rate_mbps=0.001, delay_s=9), 4)
        assert told == PlanPrediction(
            utilization=told.utilization,
            stall_s_per_period=told.stall_s_per_period,
            period_s=told.period_s,
            bytes_per_step=0,
            bytes_per_sync=0,
            largest_sync_bytes=0,
            ddp_ratio=None,
            link_share=0,
            peak_link_share=0,
        )
        assert told.utilization == pytest.approx(1)
        assert needed_mbps(PRESETS["local"], SMALL, Link(rate_mbps=1), 4, 0.99) == 0

    @pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"local"}))
    @pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
    def test_the_needed_speed_is_just_enough(self, preset: str, target: float) -> None:
        plan, near = PRESETS[preset], Link(rate_mbps=1, delay_s=1e-6)
        mbps = needed_mbps(plan, SMALL, near, 4, target)
        assert mbps is not None
        enough = predict(plan, SMALL, replace(near, rate_mbps=mbps), 4)
        less = predict(plan, SMALL, replace(near, rate_mbps=0.995 * mbps), 4)
        assert less.utilization < target <= enough.utilization

    def test_no_speed_makes_up_for_a_delay(self) -> None:
        assert needed_mbps(DILOCO, SMALL, Link(rate_mbps=1, delay_s=5), 4, 0.5) is None
