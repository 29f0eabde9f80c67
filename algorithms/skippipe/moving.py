"""Which stage a peer should serve while others go on: join the slowest, move only for a real gain,
and of those that could move let the one go whose links fit best.

Ref: Petals, arXiv:2209.01188: a joining server takes the blocks with the least throughput, and
moves when that gains enough; ours: a stage is never left without a replica, and placement's score
(`placement.py`) chooses among movers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from algorithms.skippipe.placement import Groups, PlacementScore

MOVE_GAIN = 1.2


@dataclass(frozen=True)
class Move:
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
) -> Move:
    """Whether a peer should leave its stage for the slowest one.

    Args:
        stages: of each stage, the throughput of each of its replicas.
        gain: by how much the slowest stage's throughput must rise, as a factor.
    """
    here = next(stage for stage, replicas in enumerate(stages) if peer in replicas)
    totals = [sum(replicas.values()) for replicas in stages]
    there = stage_to_join(totals)
    if there == here:
        return Move(None, f"stage {here} is the slowest")
    if len(stages[here]) == 1:
        return Move(None, f"it is the last replica of stage {here}")
    after = list(totals)
    after[here] -= stages[here][peer]
    after[there] += stages[here][peer]
    if min(after) < gain * min(totals):
        return Move(
            None,
            f"the slowest stage would rise from {min(totals):.3g} to {min(after):.3g} "
            f"microbatches/s, by less than a factor of {gain:g}",
        )
    return Move(there, f"stage {there} is the slowest, at {totals[there]:.3g} microbatches/s")


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
