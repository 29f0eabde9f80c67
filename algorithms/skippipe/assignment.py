"""Which peer should serve which stage: at the beginning, when it joins, and when others are slow.

At the beginning: a short search over placements, each of which is judged by a quick search of
routes, and simulated. Later: a peer joins the slowest stage, and moves only for a real gain.

Ref: Petals, arXiv:2209.01188: a joining server takes the blocks with the least throughput, and
moves when that gains enough; ours: a stage is never left without a replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from murmuration.algorithms.skippipe.pipeline import Costs, Floats, Links, Pipeline
from murmuration.algorithms.skippipe.route import Draws, Rules
from murmuration.algorithms.skippipe.routing import origins_in_turns, predict

Groups = tuple[tuple[int, ...], ...]

MOVE_GAIN = 1.2
_DRAWN, _SWAPS = 16, 32
_JUDGING_EFFORT_S = 0.02


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCandidates:
    """P peers that could serve any of S stages.

    Args:
        links: between them.
        message_bytes: of one microbatch's activations, and of their gradient.
        exchange_s: what two replicas of a stage take to exchange its parameters, spread over the
            iterations from one exchange to the next, shape (P, P); zeros leave it out.
        memory: of each peer, how many microbatches it may hold.
        forward_s, backward_s: of a visit of each stage on each peer, shape (P, S).
        loss_s: on each peer, shape (P,).
    """

    links: Links
    message_bytes: float
    exchange_s: Floats
    memory: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    loss_s: Floats

    def pipeline(self, stages: Groups) -> Pipeline:
        """With these peers on each stage. Raises ValueError as Pipeline does."""
        stage_of = np.zeros(self.links.peers, dtype=np.int64)
        for stage, replicas in enumerate(stages):
            stage_of[list(replicas)] = stage
        everyone = np.arange(self.links.peers)
        costs = Costs(
            delay_s=self.links.delay_s(),
            transfer_s=self.links.transfer_s(self.message_bytes),
            forward_s=self.forward_s[everyone, stage_of],
            backward_s=self.backward_s[everyone, stage_of],
            loss_s=self.loss_s,
        )
        return Pipeline(stages=stages, memory=self.memory, costs=costs)


def propose_placement(
    candidates: StageCandidates,
    sizes: Sequence[int],
    rules: Rules,
    microbatches: int,
    *,
    routing: str = "skip",
    seed: int = 0,
    shared_uplinks: bool = False,
) -> Groups:
    """The peers of each stage: the best of some drawn placements, then of swaps of two peers.

    Each is judged by its predicted iteration, after a quick search where routes are searched, and
    by its slowest exchange inside a stage.

    Args:
        sizes: replicas of each stage.
        rules: of the routes by which placements are judged.
        microbatches: of each replica of stage 0.
        routing: by which they go.

    Raises:
        ValueError: sizes that do not add up to the peers.
    """
    peers, exchange_s = range(candidates.links.peers), candidates.exchange_s
    if sum(sizes) != len(peers) or min(sizes) < 1:
        raise ValueError(f"stages of sizes {tuple(sizes)} do not share out {len(peers)} peers")

    def judged(stages: Groups) -> tuple[float, Groups]:
        pipeline = candidates.pipeline(stages)
        told = predict(
            pipeline,
            rules,
            origins_in_turns(pipeline, microbatches),
            routing,
            seed,
            shared_uplinks=shared_uplinks,
            effort_s=_JUDGING_EFFORT_S,
        )
        slowest_s = max(exchange_s[np.ix_(group, group)].max() for group in stages)
        return told.iteration_s + float(slowest_s), stages

    draws = Draws(seed)
    best = min(judged(_cut(draws.shuffled(peers), sizes)) for _ in range(_DRAWN))
    for _ in range(_SWAPS if len(sizes) > 1 else 0):
        best = min(best, judged(_swapped(best[1], draws)))
    return best[1]


def _cut(peers: Sequence[int], sizes: Sequence[int]) -> Groups:
    groups, begin = [], 0
    for size in sizes:
        groups.append(tuple(sorted(peers[begin : begin + size])))
        begin += size
    return tuple(groups)


def _swapped(groups: Groups, draws: Draws) -> Groups:
    """Two peers of two groups change places."""
    one = draws.below(len(groups))
    other = (one + 1 + draws.below(len(groups) - 1)) % len(groups)
    mine, theirs = draws.one_of(groups[one]), draws.one_of(groups[other])
    changed = list(groups)
    changed[one] = tuple(sorted({*groups[one], theirs} - {mine}))
    changed[other] = tuple(sorted({*groups[other], mine} - {theirs}))
    return tuple(changed)


@dataclass(frozen=True)
class MoveDecision:
    """Args: stage: to serve; None to stay. reason: in words."""

    stage: int | None
    reason: str


def stage_to_join(throughput: Sequence[float]) -> int:
    """The stage with the least throughput (of all its replicas); the first of equals.

    Divide by how often a stage is visited where that differs.
    """
    return min(range(len(throughput)), key=lambda stage: (throughput[stage], stage))


def stage_to_move_to(
    peer: int, stages: Sequence[Mapping[int, float]], gain: float = MOVE_GAIN
) -> MoveDecision:
    """Whether a peer should leave its stage for the slowest one.

    Args:
        stages: of each stage, the throughput of each of its replicas.
        gain: by how much the slowest stage's throughput must rise, as a factor.
    """
    here = next(stage for stage, replicas in enumerate(stages) if peer in replicas)
    totals = [sum(replicas.values()) for replicas in stages]
    there = stage_to_join(totals)
    if there == here:
        return MoveDecision(None, f"stage {here} is the slowest")
    if len(stages[here]) == 1:
        return MoveDecision(None, f"it is the last replica of stage {here}")
    after = list(totals)
    after[here] -= stages[here][peer]
    after[there] += stages[here][peer]
    if min(after) < gain * min(totals):
        return MoveDecision(
            None,
            f"the slowest stage would rise from {min(totals):.3g} to {min(after):.3g} "
            f"microbatches/s, by less than a factor of {gain:g}",
        )
    return MoveDecision(
        there, f"stage {there} is the slowest, at {totals[there]:.3g} microbatches/s"
    )
