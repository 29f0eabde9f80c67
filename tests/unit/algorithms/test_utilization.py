"""Utilization: closed forms, the paper's table, and proposals that keep what they promise."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.link import Link
from algorithms.plan import PRESETS, Plan
from algorithms.schedule import Due, Schedule
from algorithms.utilization import (
    Prediction,
    Rounds,
    Workload,
    needed_mbps,
    predict,
    propose,
    rounds_of,
    utilization,
    workload_of,
)
from tests.bench.plan_table import METHODS, MODELS, PAPER_GBPS, first_points, nearest_point

DILOCO = PRESETS["diloco"]
SMALL = Workload(step_s=0.1, layers=(1000,) * 6, outside=500)
PERIODS = 4  # that the simulator leaves out, and then counts


def rounds(
    workload: Workload,
    inner_steps: int = 1,
    tau: int = 0,
    fragments: int = 1,
    bits: float = 32.0,
) -> Rounds:
    parts = workload.fragments(fragments)
    return Rounds(
        inner_steps=inner_steps,
        overlap_steps=tau,
        fragments=parts,
        fragment_bits=tuple(bits * part.elements for part in parts),
    )


def at(
    workload: Workload,
    sent: Rounds,
    mbps: float,
    latency_s: float = 0.0,
    per_layer: bool = False,
) -> float:
    return float(
        utilization(workload, sent, np.array([mbps]), latency_s=latency_s, per_layer=per_layer)[0]
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, Rounds]:
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


class TestPaper:
    @pytest.mark.parametrize(("method", "model"), PAPER_GBPS)
    def test_every_entry_is_reproduced_within_one_point_of_the_grid(
        self, method: str, model: str
    ) -> None:
        paper = [nearest_point(gbps) for gbps in PAPER_GBPS[method, model]]
        ours = first_points(method, model)
        assert max(abs(a - b) for a, b in zip(paper, ours, strict=True)) <= 1

    def test_the_table_has_75_entries_and_most_are_reproduced_exactly(self) -> None:
        assert set(PAPER_GBPS) == {(method, model) for method in METHODS for model in MODELS}
        distances = [
            ours - nearest_point(paper)
            for (method, model), row in PAPER_GBPS.items()
            for paper, ours in zip(row, first_points(method, model), strict=True)
        ]
        assert len(distances) == 75
        assert distances.count(0) >= 68


class TestClosedForms:
    @pytest.mark.parametrize("per_layer", [False, True])
    @settings(max_examples=40)
    @given(case=cases())
    def test_an_infinitely_fast_link_costs_nothing(
        self, per_layer: bool, case: tuple[Workload, Rounds]
    ) -> None:
        assert at(*case, math.inf, per_layer=per_layer) == pytest.approx(1, rel=1e-9)

    @pytest.mark.parametrize("per_layer", [False, True])
    def test_data_parallel_on_one_layer_waits_for_all_of_it(self, per_layer: bool) -> None:
        one = Workload(step_s=0.1, layers=(1000,))  # 32,000 bits: 0.4 s at 0.08 Mbit/s
        sent = rounds(one)
        assert at(one, sent, 0.08, per_layer=per_layer) == pytest.approx(0.1 / 0.5)
        assert at(one, sent, 0.08, 0.5, per_layer) == pytest.approx(0.1 / 1.0)

    @pytest.mark.parametrize(
        ("layer_s", "period_s"),
        [
            (0.05, 0.5 + 0.05),  # layer 2 is through before layer 1 is ready
            (0.1, 0.4 + 0.2),
            (0.3, 0.4 + 0.6),  # from when layer 2 is ready, the link is busy
        ],
    )
    def test_data_parallel_on_two_layers_by_hand(self, layer_s: float, period_s: float) -> None:
        # Five nodes of 0.1 s: forward 1, forward 2, activations 2, parameters 2, parameters 1.
        two = Workload(step_s=0.5, layers=(1000, 1000))
        mbps = 32_000 / layer_s / 1e6
        assert at(two, rounds(two), mbps, per_layer=True) == pytest.approx(0.5 / period_s)

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
        self, case: tuple[Workload, Rounds], mbps: float
    ) -> None:
        workload, sent = case
        bound = sent.inner_steps * workload.step_s / (sent.bits_per_period / (mbps * 1e6))
        for per_layer in (False, True):
            assert at(*case, mbps, per_layer=per_layer) <= bound * (1 + 1e-9)

    @given(cases(), SPEEDS, LATENCIES)
    def test_it_is_what_the_engines_schedule_gives_step_by_step(
        self, case: tuple[Workload, Rounds], mbps: float, latency_s: float
    ) -> None:
        workload, sent = case
        counted = 2 * PERIODS * sent.inner_steps
        schedule = Schedule(
            fragments=len(sent.fragments),
            inner_steps=sent.inner_steps,
            overlap_steps=sent.overlap_steps,
            steps=counted + 2 * sent.inner_steps,  # beyond the closing rounds
        )
        now = free = 0.0
        there: dict[Due, float] = {}
        ends = [0.0]
        for step in range(1, counted + 1):
            now += workload.step_s
            now = max([now, *(there[due] for due in schedule.applies(step))])
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


@pytest.mark.parametrize("per_layer", [False, True])
class TestOrder:
    @settings(max_examples=40)
    @given(case=cases(), latency_s=LATENCIES)
    def test_faster_links_never_cost(
        self, per_layer: bool, case: tuple[Workload, Rounds], latency_s: float
    ) -> None:
        grid = np.geomspace(1e-4, 1e4, 60)
        found = utilization(*case, grid, latency_s=latency_s, per_layer=per_layer)
        assert ((found > 0) & (found <= 1)).all()
        assert (np.diff(found) >= -1e-9).all()

    @settings(max_examples=40)
    @given(case=cases(), mbps=SPEEDS, latency_s=LATENCIES)
    def test_more_overlap_never_costs(
        self, per_layer: bool, case: tuple[Workload, Rounds], mbps: float, latency_s: float
    ) -> None:
        workload, sent = case
        found = [
            at(workload, replace(sent, overlap_steps=tau), mbps, latency_s, per_layer)
            for tau in range(sent.inner_steps + 1)
        ]
        assert all(more >= less - 1e-9 for less, more in pairwise(found))

    @settings(max_examples=40)
    @given(case=cases(), mbps=SPEEDS, latency_s=LATENCIES)
    def test_more_bits_and_more_latency_never_help(
        self, per_layer: bool, case: tuple[Workload, Rounds], mbps: float, latency_s: float
    ) -> None:
        workload, sent = case
        base = at(workload, sent, mbps, latency_s, per_layer)
        double = replace(sent, fragment_bits=tuple(2 * bits for bits in sent.fragment_bits))
        assert at(workload, double, mbps, latency_s, per_layer) <= base + 1e-9
        assert at(workload, sent, mbps, latency_s + 0.1, per_layer) <= base + 1e-9


class TestWorkload:
    def test_names_are_read_as_fragments_read_them(self) -> None:
        sizes = {"embed": 7, "layers.1.a": 2, "layers.0.a": 3, "layers.1.b": 4}
        assert workload_of(sizes, 0.5) == Workload(step_s=0.5, layers=(3, 6), outside=7)

    def test_a_model_without_layers_is_one_layer(self) -> None:
        assert workload_of({"w": 7}, 0.5) == Workload(step_s=0.5, layers=(7,))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"step_s": 0.0}, "a step of 0 s"),
            ({"step_s": math.nan}, "a step of nan s"),
            ({"layers": ()}, "at least one layer"),
            ({"layers": (3, 0)}, "at least one layer, and each layer a parameter"),
        ],
    )
    def test_what_cannot_be_is_refused(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            replace(SMALL, **changes)

    @pytest.mark.parametrize("peers", [2, 3, 4, 16])
    def test_each_direction_costs_the_optimum_of_an_all_reduce(self, peers: int) -> None:
        sent = rounds_of(DILOCO, SMALL, peers)
        assert sent.bits_per_period == pytest.approx(2 * (peers - 1) / peers * 32 * 6500)

    def test_contribution_and_reduction_may_differ(self) -> None:
        sent = rounds_of(replace(DILOCO, codec="bf16"), SMALL, 2)
        assert sent.bits_per_period == pytest.approx(1 / 2 * (16 + 32) * 6500)

    @pytest.mark.parametrize("peers", [2, 4, 64])
    def test_a_pair_costs_the_same_in_any_swarm(self, peers: int) -> None:
        """The anchor goes ahead, so that only the pseudo-gradient is waited for."""
        sent = rounds_of(PRESETS["noloco"], SMALL, peers)
        assert sum(sent.fragment_bits) == sent.ahead_bits == 32 * 6500
        assert sent.bits_per_period == 2 * 32 * 6500
        in_fours = rounds_of(replace(PRESETS["noloco"], group_size=4), SMALL, peers)
        assert in_fours.bits_per_period == (min(4, peers) - 1) * sent.bits_per_period

    def test_what_goes_ahead_costs_no_time_while_the_link_has_room(self) -> None:
        pairs, link = PRESETS["noloco"], Link(rate_mbps=1.0)
        wide = predict(pairs, SMALL, link, 4)
        assert wide.stall_s_per_period == pytest.approx(32 * 6500 / 1e6, rel=1e-6)
        narrow = predict(pairs, SMALL, replace(link, rate_mbps=0.1), 4)
        assert narrow.period_s == pytest.approx(2 * 32 * 6500 / 1e5)
        assert narrow.link_share == pytest.approx(1)

    def test_a_plan_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="7 fragments of 6 layers"):
            rounds_of(replace(DILOCO, fragments=7), SMALL, 4)
        with pytest.raises(ValueError, match="7 fragments do not fit into inner_steps = 5"):
            rounds_of(replace(DILOCO, fragments=6, inner_steps=5), SMALL, 4)


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
        assert told == Prediction(
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


class TestProposals:
    @pytest.mark.parametrize("target", [0.5, 0.95, 0.99])
    @pytest.mark.parametrize("mbps", [0.3, 3.0, 300.0])
    def test_each_reaches_the_target_and_none_replaces_another(
        self, target: float, mbps: float
    ) -> None:
        link = Link(rate_mbps=mbps, delay_s=0.02)
        ranked = propose(target, PRESETS, SMALL, link, 4, most=99).ranked
        assert ranked
        keys = []
        for proposal in ranked:
            plan = proposal.plan
            assert predict(plan, SMALL, link, 4) == proposal.prediction
            assert proposal.prediction.utilization >= target
            assert plan.overlap_steps <= min(10, plan.inner_steps / 4)
            assert (plan.merge_alpha > 0) == (plan.overlap_steps > 0) or plan.eager
            assert proposal.fragments == len(SMALL.fragments(plan.fragments))
            keys.append((plan.inner_steps, -proposal.bits, plan.overlap_steps))
        assert keys == sorted(keys)
        for first, later in pairwise(keys):
            assert any(a < b for a, b in zip(later[1:], first[1:], strict=True))

    def test_a_fast_link_needs_no_change_but_the_smallest_h(self) -> None:
        best = propose(0.9, {"mine": DILOCO}, SMALL, Link(rate_mbps=1e6), 4).ranked
        assert [(p.base, p.plan) for p in best] == [("mine", replace(DILOCO, inner_steps=1))]

    def test_a_larger_h_is_proposed_where_it_saves_overlap(self) -> None:
        ranked = propose(0.95, {"mine": DILOCO}, SMALL, Link(rate_mbps=1), 4).ranked
        assert ranked[0].plan.overlap_steps > 0
        assert ranked[-1].plan.overlap_steps == 0
        assert ranked[-1].plan.inner_steps > ranked[0].plan.inner_steps
        assert len(ranked) <= 5

    def test_what_cannot_be_reached_names_the_speed_that_could(self) -> None:
        slow = Link(rate_mbps=1e-5)
        proposals = propose(0.9, PRESETS, SMALL, slow, 4)
        assert proposals.ranked == ()
        assert proposals.needed_mbps is not None
        faster = replace(slow, rate_mbps=proposals.needed_mbps)
        assert propose(0.9, PRESETS, SMALL, faster, 4).ranked

    def test_a_delay_that_no_speed_makes_up_for_is_said(self) -> None:
        proposals = propose(0.9, PRESETS, SMALL, Link(rate_mbps=9, delay_s=100), 4)
        assert proposals.ranked == ()
        assert proposals.needed_mbps is None

    def test_only_a_plan_that_is_sparse_itself_is_proposed_with_a_sparse_codec(self) -> None:
        sparse = replace(DILOCO, codec="topk")
        for bases in ({"mine": DILOCO}, {"mine": DILOCO, "sparse": sparse}):
            for proposal in propose(0.95, bases, SMALL, Link(rate_mbps=1), 4, most=99).ranked:
                assert proposal.bits >= 4
        own = propose(0.95, {"sparse": sparse}, SMALL, Link(rate_mbps=1), 4, most=99).ranked
        assert "topk" in {proposal.plan.codec for proposal in own}

    def test_eager_plans_stay_eager_with_overlap_only(self) -> None:
        eager = {"eager": Plan(eager=True, overlap_steps=1)}
        for proposal in propose(0.95, eager, SMALL, Link(rate_mbps=1), 4).ranked:
            assert proposal.plan.eager == (proposal.plan.overlap_steps > 0)
            assert proposal.plan.merge_alpha == 0

    def test_without_anything_to_vary_or_a_possible_target_it_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no plan to start from"):
            propose(0.9, {"local": PRESETS["local"]}, SMALL, Link(rate_mbps=1), 4)
        with pytest.raises(ValueError, match="the target is 1; a utilization is between 0 and 1"):
            propose(1.0, PRESETS, SMALL, Link(rate_mbps=1), 4)
