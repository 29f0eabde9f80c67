"""A model, a plan and a link: what is sent when, compute utilization, and the link that is needed.

Compute utilization is the share of the time in which a worker computes. It is simulated over link
speeds: a due fragment is sent as a whole after step s, over one link, first come, first served;
after step s + tau training waits for it, and then sends what is due there. The system is periodic
with H; it is simulated from rest, and the first periods are not counted.

Ref: arXiv:2501.18512, whose own simulator goes layer by layer. Ours beyond it: latency, any tau up
to H, and bits from n peers and two codecs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from murmuration.algorithms.codecs import bits_per_value, codec_by_name, has_few_bits
from murmuration.algorithms.fragments import Fragment, TensorSpec, layer_of, partition
from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.schedule import Schedule

_OUTSIDE = "outside"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, and the time of a step on one worker. Raises ValueError: a value that cannot be."""

    step_s: float  # one inner step, in seconds
    layers: tuple[int, ...]  # parameters of each layer, in the order of the forward pass
    outside: int = 0  # parameters outside of the layers: embeddings, head, last norm
    # Those that data-parallel training would send, where these are others: with `kseed` the layers
    # are the vector of coefficients.
    ddp_parameters: int | None = None

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise ValueError(f"a step of {self.step_s:g} s; it must take more than 0 s")
        if not self.layers or min(self.layers) < 1 or self.outside < 0:
            raise ValueError("a model needs at least one layer, and each layer a parameter")

    @property
    def parameters(self) -> int:
        return sum(self.layers) + self.outside

    def fragments(self, count: int, pattern: str = "strided") -> tuple[Fragment, ...]:
        """The fragments that `partition` makes of such a model; raises as it."""
        schema = [TensorSpec(f"layers.{index}", (size,)) for index, size in enumerate(self.layers)]
        if self.outside:
            schema.append(TensorSpec(_OUTSIDE, (self.outside,)))
        return partition(schema, count, pattern)


def workload_of(parameters: dict[str, int], step_s: float) -> Workload:
    """A model's workload from its number of parameters by name, which is read as `partition` reads
    it; a model without layers counts as one layer."""
    layers: Counter[int | None] = Counter()
    for name, elements in parameters.items():
        layers[layer_of(name)] += elements
    outside = layers.pop(None, 0)
    if not layers:
        return Workload(step_s=step_s, layers=(outside,))
    in_order = tuple(size for _, size in sorted(layers.items()))
    return Workload(step_s=step_s, layers=in_order, outside=outside)


@dataclass(frozen=True, kw_only=True)
class PlannedRounds:
    """The traffic of a period: fragment f after step offset(f), and every H steps from there."""

    inner_steps: int  # H
    overlap_steps: int  # tau in 0..H
    # Of each fragment, the bits that one worker sends for one round of it (and receives: links are
    # the same both ways), from the moment it is due; none where nothing is exchanged.
    fragment_bits: tuple[float, ...]
    ahead_bits: float = 0.0  # those that it sends for all fragments in a period before they are due

    @property
    def bits_per_period(self) -> float:
        return sum(self.fragment_bits) + self.ahead_bits

    def due_bits(self) -> dict[int, float]:
        """The bits that are due after step 1..H of a period, by step; steps without any left out.
        Raises ValueError: H, tau and the number of fragments do not fit one another."""
        if not self.fragment_bits:
            return {}
        count, inner, tau = len(self.fragment_bits), self.inner_steps, self.overlap_steps
        schedule = Schedule(fragments=count, inner_steps=inner, overlap_steps=tau, steps=1)
        due: dict[int, float] = {}
        for index, bits in enumerate(self.fragment_bits):
            due[schedule.offset(index)] = due.get(schedule.offset(index), 0) + bits
        return due


def rounds_of(plan: Plan, workload: Workload, peers: int) -> PlannedRounds:
    """The traffic of one of `peers` workers by a plan. Raises ValueError: the plan does not fit the
    model: more fragments than layers, or than H.

    Each worker reduces 1/n of a fragment: it sends (n-1)/n of its contribution to the others'
    reducers, and its shard's reduction to n-1 peers. In pairs each gives its partners its whole
    contribution when it is due, and its anchor ahead of that."""
    fragments = workload.fragments(plan.fragments, plan.pattern)
    plan.schedule(fragments=len(fragments), steps=1)  # checks, even where nothing is exchanged
    inner_steps, tau = plan.inner_steps, plan.overlap_steps
    if plan.exchange == "none" or peers < 2:
        return PlannedRounds(inner_steps=inner_steps, overlap_steps=tau, fragment_bits=())
    codecs = [codec_by_name(plan.codec), codec_by_name(plan.reduction_codec)]
    share, ahead_bits = (peers - 1) / peers, 0.0
    if plan.exchange == "pairs":
        share, anchors = min(plan.group_size, peers) - 1, codec_by_name(plan.anchor_codec)
        ahead_bits = 8 * share * sum(anchors.encoded_bytes(f.elements) for f in fragments)
        codecs = codecs[:1]
    sizes = (sum(codec.encoded_bytes(f.elements) for codec in codecs) for f in fragments)
    bits = tuple(8 * share * size for size in sizes)
    return PlannedRounds(
        inner_steps=inner_steps, overlap_steps=tau, fragment_bits=bits, ahead_bits=ahead_bits
    )


Floats = npt.NDArray[np.float64]

_WARM_PERIODS = 4
_COUNTED_PERIODS = 4
_HOPS = 2  # a contribution to its reducer, the reduction back
_SLOWEST_MBPS, _FASTEST_MBPS = 1e-6, 1e9
_COARSE, _FINE = 301, 101  # points of the two searches: a factor of 1.12, then of 1.0012


@dataclass(frozen=True, kw_only=True)
class PlanPrediction:
    """The prospects of one worker with a plan on its link.

    Left out: encoding and outer updates (CPU time), message framing (below 1 %), lost connections,
    and peers of unequal speed, for which a round waits."""

    utilization: float  # computing time over all time
    stall_s_per_period: float  # the waiting in a period of H steps
    period_s: float  # computing and waiting together
    bytes_per_step: float  # sent by one worker, per inner step on average; as many are received
    bytes_per_sync: float  # sent by one worker until every parameter was exchanged once
    largest_sync_bytes: float  # the most that is sent after one step
    # How many times fewer bytes than data-parallel training in bf16; None: no bytes.
    ddp_ratio: float | None
    link_share: float  # the share of the time in which the link is busy
    # The time that `largest_sync_bytes` take, over the time they have: tau steps, or with tau = 0
    # one step. Above 1 training waits; with tau = 0 it always does.
    peak_link_share: float


def predict(plan: Plan, workload: Workload, link: Link, peers: int) -> PlanPrediction:
    """Simulates a plan as our engine runs it, all peers alike. A round waits for the slowest link,
    so all of the jitter counts as delay. Raises ValueError: it does not fit the model."""
    rounds, rates_mbps = rounds_of(plan, workload, peers), np.array([link.rate_mbps])
    share = float(utilization(workload, rounds, rates_mbps, latency_s=latency_s(link))[0])
    computing_s = plan.inner_steps * workload.step_s
    bits, period_s = rounds.bits_per_period, computing_s / share
    largest_bits = max(rounds.due_bits().values(), default=0.0)
    given_s = max(1, plan.overlap_steps) * workload.step_s
    peak_s = largest_bits / (link.rate_mbps * 1e6) + (latency_s(link) if bits else 0.0)
    ddp_bits = 2 * (peers - 1) / peers * 16 * (workload.ddp_parameters or workload.parameters)
    return PlanPrediction(
        utilization=share,
        stall_s_per_period=period_s - computing_s,
        period_s=period_s,
        bytes_per_step=bits / 8 / plan.inner_steps,
        bytes_per_sync=bits / 8,
        largest_sync_bytes=largest_bits / 8,
        ddp_ratio=ddp_bits * plan.inner_steps / bits if bits else None,
        link_share=bits / (link.rate_mbps * 1e6) / period_s,
        peak_link_share=peak_s / given_s,
    )


def needed_mbps(
    plan: Plan, workload: Workload, link: Link, peers: int, target: float
) -> float | None:
    """The lowest speed in Mbit/s with which a plan reaches a utilization below 1, to 0.2 %. It is 0
    where nothing is sent, and None where the delay alone costs too much. Of the link its delay and
    jitter count. Raises ValueError: the plan does not fit the model."""
    rounds = rounds_of(plan, workload, peers)
    if not rounds.bits_per_period:
        return 0.0
    grid = np.geomspace(_SLOWEST_MBPS, _FASTEST_MBPS, _COARSE)
    for points in (_FINE, 0):
        shares = utilization(workload, rounds, grid, latency_s=latency_s(link))
        reached = shares >= target
        if not reached.any():
            return None
        first = int(reached.argmax())
        if not points or first == 0:
            return float(grid[first])
        grid = np.geomspace(grid[first - 1], grid[first], points)
    raise AssertionError("unreachable")


def latency_s(link: Link) -> float:
    """Seconds that an exchange takes beside its bytes: two hops, each with all of the jitter."""
    return _HOPS * (link.delay_s + link.jitter_s)


def utilization(
    workload: Workload, rounds: PlannedRounds, rates_mbps: Floats, *, latency_s: float = 0.0
) -> Floats:
    """Computing time over all time, at each link speed (Mbit/s, infinity allowed): shape (R,). The
    latency, as `latency_s` gives it, is added to each transfer without occupying the link."""
    s_per_bit = 1 / (np.asarray(rates_mbps, dtype=np.float64) * 1e6)
    inner_steps, tau, sent = rounds.inner_steps, rounds.overlap_steps, rounds.due_bits()
    begin = _WARM_PERIODS * inner_steps
    end = begin + _COUNTED_PERIODS * inner_steps
    # The other steps neither send nor wait.
    phases = {(step + later) % inner_steps for step in sent for later in (0, tau)}
    events = {step for step in range(1, end + 1) if step % inner_steps in phases}
    now_s, done, flight = np.zeros_like(s_per_bit), 0, dict[int, Floats]()
    free_s, began_s = np.zeros_like(s_per_bit), np.zeros_like(s_per_bit)
    for step in sorted(events | {begin, end}):
        now_s, done = now_s + (step - done) * workload.step_s, step
        if tau and (there_s := flight.pop(step - tau, None)) is not None:
            now_s = np.maximum(now_s, there_s)
        if (due := sent.get((step - 1) % inner_steps + 1)) is not None:
            free_s = np.maximum(now_s, free_s) + s_per_bit * due
            there_s = free_s + latency_s
            if tau:
                flight[step] = there_s
            else:
                now_s = np.maximum(now_s, there_s)
        if step == begin:
            began_s = now_s
    computing_s = _COUNTED_PERIODS * inner_steps * workload.step_s
    # A queue that grows without end has not cost all of its time within the counted periods.
    carried_s = _COUNTED_PERIODS * rounds.bits_per_period * s_per_bit
    return computing_s / np.maximum(np.maximum(now_s - began_s, computing_s), carried_s)


PERIODS = (
    *(1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 60, 75),
    *(100, 125, 150, 200, 250, 300, 400, 500),
)
# How many times its H a plan of few bits counts as: `streaming` with that H loses as much, by the
# figures of docs/evidence/bytes.md. No H below 7 was measured: a shorter one counts as that.
_H_OF_SIGN, _H_OF_TOPK = 1.3, 3.4
_LEAST_BITS_OF_SIGN, _LEAST_H_OF_FEW_BITS = 1, 7


def propose(
    target: float, plans: Mapping[str, Sequence[Plan]], workload: Workload, link: Link, peers: int
) -> list[tuple[str, Plan, PlanPrediction]]:
    """The first plan of each preset that reaches the target (utilization, below 1), best first; may
    be empty. Plans are by preset, the smallest H first; those that average nothing are passed over,
    and those that do not fit the model."""
    found = []
    for preset, of_preset in plans.items():
        for plan, prediction in _predictions(of_preset, workload, link, peers):
            if prediction.utilization >= target:
                found.append((preset, plan, prediction))
                break
    return sorted(found, key=lambda each: _rank(each[1]))


def least_mbps(
    target: float, plans: Mapping[str, Sequence[Plan]], workload: Workload, link: Link, peers: int
) -> float | None:
    """The lowest speed (Mbit/s) at which a preset with its largest H reaches the target; None where
    no speed is enough. Takes what `propose` takes."""
    needed = [
        needed_mbps(fitting[-1], workload, link, peers, target)
        for of_preset in plans.values()
        if (fitting := [plan for plan, _ in _predictions(of_preset, workload, link, peers)])
    ]
    return min((mbps for mbps in needed if mbps is not None), default=None)


def bits_per_parameter(plan: Plan) -> float:
    """On the wire, scales and the like included; mean of contribution and reduction."""
    return (bits_per_value(plan.codec) + bits_per_value(plan.reduction_codec)) / 2


def _predictions(
    plans: Sequence[Plan], workload: Workload, link: Link, peers: int
) -> Iterator[tuple[Plan, PlanPrediction]]:
    for plan in plans:
        if plan.exchange != "none":
            try:
                yield plan, predict(plan, workload, link, peers)
            except ValueError:  # more fragments than layers, or than H
                continue


def _rank(plan: Plan) -> tuple[bool, float]:
    """(whether a round takes the whole period, the H of a plan of four bits that loses as much)."""
    like_steps: float = plan.inner_steps
    if plan.payload == "gradient":
        like_steps = 0
    elif has_few_bits(plan.codec):
        signs = bits_per_value(plan.codec) >= _LEAST_BITS_OF_SIGN
        like_steps = max(like_steps, _LEAST_H_OF_FEW_BITS) * (_H_OF_SIGN if signs else _H_OF_TOPK)
    return plan.overlap_steps == plan.inner_steps, like_steps
