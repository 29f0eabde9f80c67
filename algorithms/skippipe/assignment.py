"""Which peer should serve which stage: at the beginning, when it joins, and when others are slow.

At the beginning: the searched placement, turned to where it is fastest. The tour of a placement is
a circle, so its score does not say which of its stages is stage 0 or which way round it goes; an
iteration does. Each turn is judged by a quick search and a simulation.

Later: a peer joins the slowest stage, moves only for a real gain, and of those that could move that
one goes whose links fit best.

Ref: Petals, arXiv:2209.01188: a joining server takes the blocks with the least throughput, and
moves when that gains enough; ours: a stage is never left without a replica, and placement's score
chooses among movers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from algorithms.skippipe.pipeline import Costs, Floats, Links, Pipeline
from algorithms.skippipe.placement import Groups, PlacementScore, place
from algorithms.skippipe.route import Rules
from algorithms.skippipe.routing import origins_in_turns, predict

MOVE_GAIN = 1.2
_JUDGING_EFFORT_S = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCandidates:
    """P peers that could serve any of S stages.

    Args:
        links: between them.
        message_bytes: of one microbatch's activations, and of their gradient.
        exchange_s: what two replicas of a stage take to exchange its parameters, as a share of the
            time of one wave of microbatches, shape (P, P); zeros leave it out.
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
    seed: int = 0,
    shared_uplinks: bool = False,
) -> Groups:
    """The peers of each stage.

    Args:
        sizes: replicas of each stage.
        rules: of the routes by which turns are judged.
        microbatches: of each replica of stage 0.

    Raises:
        ValueError: sizes that do not add up to the peers.
    """
    edge_s = candidates.links.edge_s(candidates.message_bytes)
    placement = place(sizes, edge_s, candidates.exchange_s, seed=seed)

    def iteration_s(stages: Groups) -> float:
        pipeline = candidates.pipeline(stages)
        return predict(
            pipeline,
            rules,
            origins_in_turns(pipeline, microbatches),
            "skip",
            seed,
            shared_uplinks=shared_uplinks,
            effort_s=_JUDGING_EFFORT_S,
        ).iteration_s

    return min(_turned(placement.stages), key=lambda stages: (iteration_s(stages), stages))


def _turned(stages: Groups) -> Iterator[Groups]:
    """The circle from each of its stages and either way, where that keeps the stages' sizes."""
    sizes = list(map(len, stages))
    seen = set()
    for circle in (stages, stages[::-1]):
        for begin in range(len(circle)):
            turned = (*circle[begin:], *circle[:begin])
            if turned not in seen and list(map(len, turned)) == sizes:
                seen.add(turned)
                yield turned


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


def best_mover(movers: Sequence[int], to: int, stages: Groups, score: PlacementScore) -> int:
    """The one after whose move the swarm's placement scores best; the first of equals.

    Args:
        movers: each on a stage with other replicas.
        to: the stage that is to have one of them.
        stages: the peers of each; those that have none are no part of the tour.
    """

    def moved(peer: int) -> Groups:
        groups = [tuple(each for each in group if each != peer) for group in stages]
        groups[to] = tuple(sorted((*groups[to], peer)))
        return tuple(group for group in groups if group)

    return min(movers, key=lambda peer: score.of(moved(peer)))
