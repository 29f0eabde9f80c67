"""What routes are planned on: links, what a hop and a visit cost, who serves which stage of layers.

    edge(i, j) = latency + bytes / rate

A visit costs w forward and 1.5 w backward, the loss on stage 0 costs w / 4; with recomputation on
backward, or where they were measured, the ratios are others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_Cut = tuple[tuple[int, int], ...]

BACKWARD_RATIO = 1.5
LOSS_RATIO = 0.25


@dataclass(frozen=True, kw_only=True, eq=False)
class Links:
    """Between all pairs of P peers; row i is what i sends.

    Args:
        latency_s: one way, shape (P, P); the diagonal is not read.
        rate_bytes_per_s: shape (P, P); the diagonal is not read.

    Raises:
        ValueError: shapes that do not fit, a rate of 0, a negative or unmeasured time.
    """

    latency_s: Floats
    rate_bytes_per_s: Floats

    def __post_init__(self) -> None:
        peers = len(self.latency_s)
        if not self.latency_s.shape == self.rate_bytes_per_s.shape == (peers, peers):
            raise ValueError(
                f"latencies {self.latency_s.shape} and rates {self.rate_bytes_per_s.shape} of "
                "links must both be square, a row for every peer"
            )
        others = ~np.eye(peers, dtype=bool)
        if not (self.rate_bytes_per_s[others] > 0).all():
            raise ValueError("a link's rate must be above 0 bytes/s between any two peers")
        if not (self.latency_s[others] >= 0).all():
            raise ValueError("a link's latency must be at least 0 s")

    @property
    def peers(self) -> int:
        return len(self.latency_s)

    def delay_s(self) -> Floats:
        """What a message waits however small it is, shape (P, P), 0 to oneself."""
        return _without_diagonal(self.latency_s)

    def transfer_s(self, message_bytes: float) -> Floats:
        """How long the sender's link is taken by a message, shape (P, P), 0 to oneself."""
        rates = np.where(np.eye(self.peers, dtype=bool), 1.0, self.rate_bytes_per_s)
        return _without_diagonal(message_bytes / rates)

    def edge_s(self, message_bytes: float) -> Floats:
        """From sending to being there, shape (P, P), 0 to oneself."""
        return self.delay_s() + self.transfer_s(message_bytes)


def _without_diagonal(times_s: Floats) -> Floats:
    times_s = np.array(times_s, dtype=np.float64)
    np.fill_diagonal(times_s, 0.0)
    return times_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """What the P peers take for one microbatch, each on the stage that it serves.

    Args:
        delay_s, transfer_s: of a message between two peers, shape (P, P), 0 on the diagonal.
        forward_s, backward_s, loss_s: of a visit, shape (P,).
    """

    delay_s: Floats
    transfer_s: Floats
    forward_s: Floats
    backward_s: Floats
    loss_s: Floats

    def __post_init__(self) -> None:
        peers = len(self.forward_s)
        for name in ("delay_s", "transfer_s"):
            hops = getattr(self, name)
            if hops.shape != (peers, peers) or not (hops >= 0).all() or np.diagonal(hops).any():
                raise ValueError(f"{name} must be at least 0 for each pair of {peers} peers")
        for name in ("forward_s", "backward_s", "loss_s"):
            times = getattr(self, name)
            if times.shape != (peers,) or not (times > 0).all():
                raise ValueError(f"{name} must be above 0 for each of {peers} peers")

    @cached_property
    def edge_s(self) -> Floats:
        """From sending to being there, shape (P, P)."""
        return self.delay_s + self.transfer_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """Peers are the numbers 0..P-1.

    Args:
        stages: the peers that serve each stage, its replicas. Each peer serves one stage.
        memory: of each peer, how many microbatches it may hold between forward and backward.
        costs: of hops and visits.

    Raises:
        ValueError: a stage without a replica, a peer without a stage or memory.
    """

    stages: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]
    costs: Costs

    def __post_init__(self) -> None:
        for stage, replicas in enumerate(self.stages):
            if not replicas:
                raise ValueError(f"stage {stage} has no replica: place a peer on it")
        serving = sorted(peer for replicas in self.stages for peer in replicas)
        if serving != list(range(len(self.costs.forward_s))):
            raise ValueError(
                f"peers {serving} serve a stage; each of 0 to {len(self.costs.forward_s) - 1} "
                "must serve exactly one"
            )
        if len(self.memory) != len(serving) or min(self.memory) < 1:
            raise ValueError(
                f"memory {self.memory} must be at least 1 for each of {len(serving)} peers"
            )

    @property
    def peers(self) -> int:
        return len(self.memory)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage that each peer serves."""
        stage_of = [0] * self.peers
        for stage, replicas in enumerate(self.stages):
            for peer in replicas:
                stage_of[peer] = stage
        return tuple(stage_of)

    @cached_property
    def edges(self) -> tuple[tuple[float, ...], ...]:
        """`costs.edge_s` as plain numbers: loops read them faster than arrays."""
        return tuple(map(tuple, self.costs.edge_s.tolist()))


# --------------------------------------------------------------------- which layers make up a stage


def stage_layers(costs: Sequence[float], outer_cost: float, stages: int) -> list[tuple[int, int]]:
    """Cuts the layers into contiguous stages of at least one layer.

    The largest stage is as small as can be; of equally good cuts the most even one is taken. Costs
    are parameters, which are the same on every peer and in every run, or measured seconds: a run
    that is cut by those has the cut in its settings, as no two measurements are alike.

    Args:
        costs: of each layer, in the order of the forward pass: parameters, or seconds.
        outer_cost: of what stage 0 holds besides: embedding, final norm, head.
        stages: S.

    Returns:
        The first and the last layer of each stage, both included.

    Raises:
        ValueError: more stages than layers.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot be cut into {stages} stages of at least one layer"
        )

    def cost(stage: int, first: int, last: int) -> float:
        return sum(costs[first : last + 1]) + (outer_cost if stage == 0 else 0)

    def squares(before: float, stage_costs: float) -> float:
        return before + stage_costs**2

    least, _ = _best_cut(len(costs), stages, cost, math.inf, max)
    return list(_best_cut(len(costs), stages, cost, least, squares)[1])


def spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last layer of each stage, both included, from how many layers it has."""
    return [(end - count, end - 1) for end, count in zip(accumulate(counts), counts, strict=True)]


def _best_cut(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    most: float,
    add: Callable[[float, float], float],
) -> tuple[float, _Cut]:
    """The least score of a cut of all layers, and that cut.

    Args:
        cost: of (stage, first, last), at most `most`.
        add: the score of some stages and the cost of the next make the score of all of them; grows
            with both, so that the best cut begins with the best cut of fewer layers.
    """
    # best[n]: of the first n layers into the stages so far.
    best: dict[int, tuple[float, _Cut]] = {0: (0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[float, _Cut]] = {}
        for first, (score, before) in best.items():
            for last in range(first, layers - (stages - stage - 1)):
                if (taken := cost(stage, first, last)) > most:
                    break  # and so is any longer one
                found = add(score, taken)
                if last + 1 not in reached or found < reached[last + 1][0]:
                    reached[last + 1] = found, (*before, (first, last))
        best = reached
    return best[layers]
