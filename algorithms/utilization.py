"""A plan on a link: compute utilization, stall, bytes; and the link that a plan needs.

Compute utilization is the share of the time in which a worker computes. It is simulated over link
speeds: a due fragment is sent as a whole after step s, over one link, first come, first served;
after step s + tau training waits for it, and then sends what is due there.

The system is periodic with H; it is simulated from rest, and the first periods are not counted.
Only steps in which something is sent or awaited cost anything, whatever H is.

Ref: arXiv:2501.18512. Its own simulator goes layer by layer: tests/lab/plan_table.py has that,
beside the paper's table of link speeds. Ours beyond it: latency, any tau up to H, and bits from n
peers and two codecs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.workload import PlannedRounds, Workload, rounds_of

Floats = npt.NDArray[np.float64]

_WARM_PERIODS = 4
_COUNTED_PERIODS = 4
_HOPS = 2  # a contribution to its reducer, the reduction back
_SLOWEST_MBPS, _FASTEST_MBPS = 1e-6, 1e9
_COARSE, _FINE = 301, 101  # points of the two searches: a factor of 1.12, then of 1.0012


@dataclass(frozen=True, kw_only=True)
class PlanPrediction:
    """What one worker may expect of a plan on its link.

    Left out: encoding and outer updates (CPU time), message framing (below 1 %), lost connections,
    and peers of unequal speed, for which a round waits.

    Args:
        utilization: computing time over all time.
        stall_s_per_period: waiting in a period of H steps, in seconds.
        period_s: that period with its waiting, in seconds.
        bytes_per_step: sent by one worker, per inner step on average; as many are received.
        bytes_per_sync: sent by one worker until every parameter was exchanged once.
        largest_sync_bytes: the most that is sent after one step.
        ddp_ratio: how many times fewer bytes than data-parallel training in bf16; None: no bytes.
        link_share: of the time, how much the link is busy.
        peak_link_share: the time that `largest_sync_bytes` take, over the time they have: tau
            steps, or with tau = 0 one step. Above 1 training waits; with tau = 0 it always does.
    """

    utilization: float
    stall_s_per_period: float
    period_s: float
    bytes_per_step: float
    bytes_per_sync: float
    largest_sync_bytes: float
    ddp_ratio: float | None
    link_share: float
    peak_link_share: float


def predict(plan: Plan, workload: Workload, link: Link, peers: int) -> PlanPrediction:
    """Simulates a plan as our engine runs it: see `utilization`.

    Args:
        plan: the run's plan. workload: its model and step.
        link: of each worker. A round waits for the slowest, so all of the jitter counts as delay.
        peers: workers in the swarm; each is assumed to compute and send alike.

    Raises:
        ValueError: the plan does not fit the model.
    """
    rounds = rounds_of(plan, workload, peers)
    share = float(
        utilization(workload, rounds, np.array([link.rate_mbps]), latency_s=latency_s(link))[0]
    )
    computing_s = plan.inner_steps * workload.step_s
    bits = rounds.bits_per_period
    period_s = computing_s / share
    largest_bits = max(
        (sum(rounds.fragment_bits[f] for f in due) for due in rounds.due().values()), default=0.0
    )
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
    """The lowest speed with which a plan reaches a utilization, to 0.2 %.

    Args:
        link: its delay and jitter count, its speed does not.
        target: in 0..1, below 1.

    Returns:
        In Mbit/s, 0 where nothing is sent; None where no speed is enough, because the delay alone
        costs too much.

    Raises:
        ValueError: the plan does not fit the model.
    """
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


def most_utilization(rounds: PlannedRounds, workload: Workload, link: Link) -> float:
    """A bound from above that costs no simulation.

    A period lasts as long as the link needs for all of it; and after the largest fragment was sent,
    tau steps pass or the time that it takes, whichever is longer, and H - tau steps besides.
    """
    computing_s = rounds.inner_steps * workload.step_s
    if not rounds.fragments:
        return 1.0
    s_per_bit = 1 / (link.rate_mbps * 1e6)
    takes_s = max(rounds.fragment_bits) * s_per_bit + latency_s(link)
    stall_s = max(0.0, takes_s - rounds.overlap_steps * workload.step_s)
    return computing_s / max(computing_s + stall_s, rounds.bits_per_period * s_per_bit)


def utilization(
    workload: Workload,
    rounds: PlannedRounds,
    rates_mbps: Floats,
    *,
    latency_s: float = 0.0,
) -> Floats:
    """Computing time over all time, at each link speed.

    Args:
        workload: the model and its step.
        rounds: what is sent and when.
        rates_mbps: speeds of a worker's link, shape (R,), in Mbit/s; infinity is allowed.
        latency_s: added to each transfer without occupying the link: the one-way delay times the
            hops of an exchange (contribution and reduction: 2).

    Returns:
        Shape (R,), above 0, at most 1.
    """
    s_per_bit = 1 / (np.asarray(rates_mbps, dtype=np.float64) * 1e6)
    link = SerialLink(s_per_bit, latency_s)
    begin = _WARM_PERIODS * rounds.inner_steps
    end = begin + _COUNTED_PERIODS * rounds.inner_steps
    began, ended = _end_of(workload, rounds, link, (begin, end))
    computing_s = _COUNTED_PERIODS * rounds.inner_steps * workload.step_s
    # A queue that grows without end has not cost all of its time within the counted periods.
    carried_s = _COUNTED_PERIODS * rounds.bits_per_period * s_per_bit
    return computing_s / np.maximum(np.maximum(ended - began, computing_s), carried_s)


class SerialLink:
    """One serial link at R speeds at once."""

    def __init__(self, s_per_bit: Floats, latency_s: float) -> None:
        self._s_per_bit, self._latency_s = s_per_bit, latency_s
        self._free_s = np.zeros_like(s_per_bit)
        self.rates = s_per_bit.size

    def send(self, ready_s: Floats, bits: Floats) -> Floats:
        """When each is there, shape (R, C), if they are ready so, in order of `ready_s` (R, C)."""
        lasts_s = self._s_per_bit[:, None] * bits
        done_s = np.cumsum(lasts_s, axis=1)
        # c leaves when it and all before it, from some earliest b on, have passed without a gap.
        starts_s = np.maximum.accumulate(ready_s - (done_s - lasts_s), axis=1)
        ends_s: Floats = np.maximum(starts_s, self._free_s[:, None]) + done_s
        self._free_s = ends_s[:, -1]
        return ends_s + self._latency_s


def event_steps(rounds: PlannedRounds, after: int, last: int) -> Iterator[int]:
    """The steps up to `last` in which something is sent, or awaited `after` steps later."""
    if not rounds.fragments:
        return
    phases = {(step + later) % rounds.inner_steps for step in rounds.due() for later in (0, after)}
    yield from (step for step in range(1, last + 1) if step % rounds.inner_steps in phases)


def _end_of(
    workload: Workload, rounds: PlannedRounds, link: SerialLink, steps: Sequence[int]
) -> list[Floats]:
    """When each of these steps ends, its waiting included."""
    tau, bits = rounds.overlap_steps, rounds.fragment_bits
    sent = {step: np.array([bits[f] for f in due]) for step, due in rounds.due().items()}
    now_s, done, flight = np.zeros(link.rates), 0, dict[int, Floats]()
    times = []
    for step in sorted({*event_steps(rounds, tau, max(steps)), *steps}):
        now_s = now_s + (step - done) * workload.step_s
        done = step
        if tau and (there_s := flight.pop(step - tau, None)) is not None:
            now_s = np.maximum(now_s, there_s)
        due = sent.get((step - 1) % rounds.inner_steps + 1)
        if due is not None:
            there_s = link.send(now_s[:, None] + np.zeros(due.size), due)[:, -1]
            if tau:
                flight[step] = there_s
            else:
                now_s = np.maximum(now_s, there_s)
        if step in steps:
            times.append(now_s)
    return times
