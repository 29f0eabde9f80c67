"""The pipeline that routes are planned on: costs, the peers of each stage, and its layers.

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
class Costs:
    """The times of one microbatch on P peers."""

    delay_s: Floats  # of a message between two, (P, P), 0 on the diagonal; as the next
    transfer_s: Floats
    forward_s: Floats  # of a visit, (P,); as the others
    backward_s: Floats
    loss_s: Floats

    @cached_property
    def edge_s(self) -> Floats:
        """From sending to being there, shape (P, P)."""
        return self.delay_s + self.transfer_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """The replicas of each stage, by number, 0..P-1."""

    stages: tuple[tuple[int, ...], ...]
    memory: tuple[int, ...]  # how many microbatches each may hold between forward and backward
    costs: Costs

    @property
    def peers(self) -> int:
        return len(self.memory)

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        placed = {peer: stage for stage, replicas in enumerate(self.stages) for peer in replicas}
        return tuple(placed[peer] for peer in range(self.peers))

    @cached_property
    def edges(self) -> tuple[tuple[float, ...], ...]:
        """`costs.edge_s` as plain numbers: loops read them faster than arrays."""
        return tuple(map(tuple, self.costs.edge_s.tolist()))


def stage_layers(costs: Sequence[float], outer_cost: float, stages: int) -> list[tuple[int, int]]:
    """Cuts the layers into contiguous stages of at least one layer, as (first, last) of each. The
    largest stage is as small as can be; of equals the most even cut is taken.

    Args: costs: of each layer, in order: parameters, or seconds; outer_cost: of what stage 0 holds
    besides: embedding, final norm, head. Raises ValueError: more stages than layers."""
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
    """The least score of a cut of all layers, and that cut. `cost` is of (stage, first, last), at
    most `most`; `add` makes the score of all from that of some stages, and grows with both."""
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
