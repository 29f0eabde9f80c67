"""Rounds of thousands of peers on a virtual clock: the code that runs live, all in one process. In
order: `scenario` (what is asked for, and what goes wrong), `virtual_loop` (on which the live
coroutines run), `network` (and their streams over it), `simulated_swarm` (membership and faults),
`peer` (what it learns, and the account of time), `means`, `pairs`; here is what comes out."""

import gc
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmuration.worker.simulation.means import MeanPeer
from murmuration.worker.simulation.pairs import PairPeer
from murmuration.worker.simulation.peer import VALUES, Account
from murmuration.worker.simulation.scenario import Scenario, last_s
from murmuration.worker.simulation.simulated_swarm import SimulatedSwarm
from murmuration.worker.simulation.virtual_loop import running

__all__ = ["Figures", "Scenario", "simulate"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one run."""

    peers: int  # at the beginning
    # Time of a round, from a peer's last inner step to its new anchor, of the rounds in which it
    # exchanged something; None if there was none.
    sync_median_s: float | None
    sync_mean_s: float | None
    sync_p99_s: float | None
    idle_share: float  # of the peers' time, spent in rounds
    spread: float  # as `spread` gives it, of the live peers' anchors
    distance: float  # likewise, by `distance_to_optimum`
    rounds: int  # of all peers together, as the next
    rounds_failed: int
    reasons: dict[str, int]  # the most frequent first
    half_applied: int  # rounds that some of their group have applied and others not
    bytes_per_round: float  # sent by a peer in a round
    unfinished: int  # peers that lived, and did not come to the end
    virtual_s: float  # how long the run would have taken
    events: int  # that were simulated


def simulate(scenario: Scenario) -> Figures:
    """Runs the scenario. The same one gives the same figures."""
    swarm, account = SimulatedSwarm(scenario), Account()
    kind: Any = PairPeer if scenario.preset == "noloco" else MeanPeer
    peers = [kind(swarm, number, account) for number in range(scenario.peers)]
    swarm.endpoints = peers
    # Long after the slowest peer would have ended its last round at its deadline.
    slowest_s = scenario.inner_steps * scenario.step_s * scenario.slow_factor
    round_s = swarm.config.round_s(8 * scenario.params, swarm.detection_s())
    limit_s = 4 * scenario.rounds * (slowest_s + round_s) + last_s(swarm.faults)
    gc.disable()  # reference cycles are few, and looking for them takes a third of the time
    try:
        with running(swarm.clock):
            for peer in peers:
                peer.start()
            swarm.clock.run(lambda: account.unfinished == 0, limit_s)
    finally:
        gc.enable()
    live = [peer for peer in peers if peer.number not in swarm.dead]
    anchors = [peer.anchor for peer in live or peers]
    return Figures(
        peers=scenario.peers,
        sync_median_s=percentile(account.syncs_s, 0.5),
        sync_mean_s=sum(account.syncs_s) / len(account.syncs_s) if account.syncs_s else None,
        sync_p99_s=percentile(account.syncs_s, 0.99),
        idle_share=account.idle_s / max(account.idle_s + account.compute_s, 1e-9),
        spread=spread(anchors),
        distance=distance_to_optimum(anchors),
        rounds=account.rounds,
        rounds_failed=account.failures,
        reasons=dict(sorted(account.reasons.items(), key=lambda each: (-each[1], each[0]))),
        half_applied=sum(n < len(group) for (_, group), n in account.applied.items()),
        bytes_per_round=swarm.network.sent_bytes / max(1, account.rounds),
        unfinished=account.unfinished,
        virtual_s=swarm.clock.now,
        events=swarm.clock.events,
    )


def spread(anchors: list[Tensor]) -> float:
    """Root mean square distance of the anchors from their mean, over the norm of the mean."""
    stacked = torch.stack(anchors).double()
    mean = stacked.mean(0)
    distance = (stacked - mean).square().sum(1).mean().sqrt()
    return float(distance / mean.norm()) if mean.any() else 0.0


def distance_to_optimum(anchors: list[Tensor]) -> float:
    """Distance of the anchors' mean from the optimum, over the norm of the optimum."""
    mean = torch.stack(anchors).double().mean(0)
    return float((mean - 1).norm() / VALUES**0.5)


def percentile(values: list[float], share: float) -> float | None:
    """The smallest of the values that so large a share of them does not exceed; None of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None
