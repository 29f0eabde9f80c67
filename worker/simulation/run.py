"""A simulated run from beginning to end."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.link import MessageTime, pair_s, tree_s
from murmuration.worker.simulation.bowl import (
    Figures,
    Quadratic,
    distance_to_optimum,
    percentile,
    spread,
)
from murmuration.worker.simulation.means import MeanPeer
from murmuration.worker.simulation.pairs import PairPeer
from murmuration.worker.simulation.peer import Account
from murmuration.worker.simulation.scenario import FaultPlan, Scenario, last_s
from murmuration.worker.simulation.simulated_swarm import SimulatedSwarm
from murmuration.worker.simulation.virtual_loop import running

_TREES = 200


def simulate(scenario: Scenario, faults: FaultPlan | None = None) -> Figures:
    """Runs the scenario, with these faults instead of its own if there are any. The same scenario
    and faults give the same figures."""
    swarm, account = SimulatedSwarm(scenario, faults), Account()
    peers = _peers(swarm, account)
    swarm.endpoints = peers
    with _uncollected(), running(swarm.clock):
        for peer in peers:
            peer.start()
        swarm.clock.run(lambda: account.unfinished == 0, _limit_s(swarm))
    live = [peer for peer in peers if peer.number not in swarm.dead]
    anchors = [peer.anchor for peer in live or peers]
    pair_model_s, tree_model_s = predictions(scenario)
    return Figures(
        peers=scenario.peers,
        sync_median_s=percentile(account.syncs_s, 0.5),
        sync_mean_s=sum(account.syncs_s) / len(account.syncs_s) if account.syncs_s else None,
        sync_p99_s=percentile(account.syncs_s, 0.99),
        pair_model_s=pair_model_s,
        tree_model_s=tree_model_s,
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


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for reference cycles, of which there are few and a third of the time is lost
    to them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def predictions(scenario: Scenario) -> tuple[float | None, float | None]:
    """What the paper's latency model says of a pair and of a tree, in seconds.

    The model's messages have no size: the time that bytes take on an idle link is added. For a pair
    these are a pseudo-gradient, and what has not gone ahead of the anchor where there is but one
    pair, which does not wait for it before it computes; for the tree the 2 (n-1)/n
    pseudo-gradients that no all-reduce can do without. None where the model does not apply: with
    faults, with peers that do not come at the same time, in groups that are no pairs, and on a link
    whose delay is 0 or jitters.
    """
    link = scenario.link
    if not (scenario.is_calm and link.delay_s) or link.jitter_s or scenario.group_size > 2:
        return None, None
    message = MessageTime(link.delay_s, scenario.latency_spread)
    payload_bytes = codec_by_name(scenario.codec).encoded_bytes(scenario.params)
    transfer_s = payload_bytes * 8 / (link.rate_mbps * 1e6)
    anchor_s = scenario.params * 32 / (link.rate_mbps * 1e6)
    meanwhile_s = scenario.inner_steps * scenario.step_s
    late_s = max(0.0, anchor_s - meanwhile_s) if scenario.peers == 2 else 0.0
    trees = tree_s(message, scenario.peers, _TREES, np.random.default_rng(scenario.seed))
    share = 2 * (scenario.peers - 1) / scenario.peers
    return pair_s(message) + late_s + transfer_s, float(trees.mean()) + share * transfer_s


def _peers(swarm: SimulatedSwarm, account: Account) -> Sequence[PairPeer | MeanPeer]:
    scenario = swarm.scenario
    task, numbers = Quadratic(scenario.peers, scenario.seed), range(scenario.peers)
    if scenario.preset == "noloco":
        pairs: list[PairPeer] = []
        pairs += (PairPeer(swarm, number, task, account, pairs) for number in numbers)
        return pairs
    means: list[MeanPeer] = []
    means += (MeanPeer(swarm, number, task, account, means) for number in numbers)
    return means


def _limit_s(swarm: SimulatedSwarm) -> float:
    """When to stop waiting: long after the slowest peer would have ended its last round at its
    deadline."""
    scenario = swarm.scenario
    slowest_s = scenario.inner_steps * scenario.step_s * scenario.slow_factor
    round_s = swarm.config.round_s(8 * scenario.params, swarm.detection_s())
    return 4 * scenario.rounds * (slowest_s + round_s) + last_s(swarm.faults)
