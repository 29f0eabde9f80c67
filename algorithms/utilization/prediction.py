"""A plan on a link: utilization, stall, bytes; and the link that a plan needs."""

from dataclasses import dataclass

import numpy as np

from algorithms.link import Link
from algorithms.plan import Plan
from algorithms.utilization.simulator import utilization
from algorithms.utilization.workload import Rounds, Workload, rounds_of

_HOPS = 2  # a contribution to its reducer, the reduction back
_SLOWEST_MBPS, _FASTEST_MBPS = 1e-6, 1e9
_COARSE, _FINE = 301, 101  # points of the two searches: a factor of 1.12, then of 1.0012


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one worker may expect of a plan on its link.

    Left out: encoding and outer updates (CPU time), message framing (below 1 %), lost connections,
    and peers of unequal speed, whom a round waits for.

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


def predict(plan: Plan, workload: Workload, link: Link, peers: int) -> Prediction:
    """Simulates a plan as our engine runs it: see `simulator`, per step.

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
    share = min(share, computing_s / (bits / (link.rate_mbps * 1e6))) if bits else share
    period_s = computing_s / share
    largest_bits = max(
        (sum(rounds.fragment_bits[f] for f in due) for due in rounds.due().values()), default=0.0
    )
    given_s = max(1, plan.overlap_steps) * workload.step_s
    peak_s = largest_bits / (link.rate_mbps * 1e6) + (latency_s(link) if bits else 0.0)
    ddp_bits = 2 * (peers - 1) / peers * 16 * workload.parameters
    return Prediction(
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
        busy_s = rounds.bits_per_period / (grid * 1e6)
        reached = np.minimum(shares, plan.inner_steps * workload.step_s / busy_s) >= target
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


def most_utilization(rounds: Rounds, workload: Workload, link: Link) -> float:
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
