"""Which layers make up which stage, by what each layer costs and needs.

Stage 0 holds the embedding, the final norm and the head besides its own layers. The cut minimises
the largest stage among those that fit into memory; of equally good ones, the most even. Costs are
parameters, which are the same on every peer and in every run, or measured seconds: a run that is
cut by those has the cut in its settings, as no two measurements are alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_MIB = 2**20

_Cut = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What stages need, and what there is for each.

    Args:
        layer_bytes: of each layer.
        outer_bytes: of what stage 0 holds besides.
        stage_bytes: of any stage, whatever its layers are.
        limit_bytes: for a stage.
    """

    layer_bytes: Sequence[int]
    outer_bytes: int
    stage_bytes: int
    limit_bytes: int

    def of_stage(self, stage: int, first: int, last: int) -> int:
        """In bytes. Args: first, last: its layers, both included."""
        outer = self.outer_bytes if stage == 0 else 0
        return self.stage_bytes + outer + sum(self.layer_bytes[first : last + 1])

    def fits(self, stage: int, first: int, last: int) -> bool:
        return self.of_stage(stage, first, last) <= self.limit_bytes


def stage_layers(
    costs: Sequence[float], outer_cost: float, stages: int, memory: StageMemory | None = None
) -> list[tuple[int, int]]:
    """Cuts the layers into contiguous stages of at least one layer.

    Args:
        costs: of each layer, in the order of the forward pass: parameters, or seconds.
        outer_cost: of what stage 0 holds besides: embedding, final norm, head.
        stages: S.
        memory: what a stage may hold; None for no bound.

    Returns:
        The first and the last layer of each stage, both included.

    Raises:
        ValueError: more stages than layers, or a layer or a stage that does not fit into memory.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot be cut into {stages} stages of at least one layer"
        )
    if memory is not None:
        _check_fits(memory, stages)

    def cost(stage: int, first: int, last: int) -> float:
        return stage_cost(costs, outer_cost, stage, first, last)

    def fits(stage: int, first: int, last: int) -> bool:
        return memory is None or memory.fits(stage, first, last)

    def small(stage: int, first: int, last: int) -> bool:
        return fits(stage, first, last) and cost(stage, first, last) <= least

    def squares(before: float, stage_costs: float) -> float:
        return before + stage_costs**2

    least, _ = _best(len(costs), stages, cost, fits, max)
    return list(_best(len(costs), stages, cost, small, squares)[1])


def stage_cost(
    costs: Sequence[float], outer_cost: float, stage: int, first: int, last: int
) -> float:
    """Of a stage with these layers, both included."""
    return sum(costs[first : last + 1]) + (outer_cost if stage == 0 else 0)


def spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last layer of each stage, both included, from how many layers it has."""
    return [(end - count, end - 1) for end, count in zip(accumulate(counts), counts, strict=True)]


def _best(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    allowed: Callable[[int, int, int], bool],
    add: Callable[[float, float], float],
) -> tuple[float, _Cut]:
    """The least score of a cut of all layers, and that cut.

    Args:
        cost, allowed: of (stage, first, last).
        add: the score of some stages and the cost of the next make the score of all of them; grows
            with both, so that the best cut begins with the best cut of fewer layers.
    """
    # best[n]: of the first n layers into the stages so far.
    best: dict[int, tuple[float, _Cut]] = {0: (0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[float, _Cut]] = {}
        for first, (score, before) in best.items():
            for last in range(first, layers - (stages - stage - 1)):
                if not allowed(stage, first, last):
                    break  # nor is any longer one
                found = add(score, cost(stage, first, last))
                if last + 1 not in reached or found < reached[last + 1][0]:
                    reached[last + 1] = found, (*before, (first, last))
        best = reached
    return best[layers]


def _check_fits(memory: StageMemory, stages: int) -> None:
    """Raises ValueError: no cut fits. As many layers in each stage as it takes go furthest."""
    layers = len(memory.layer_bytes)
    first = 0
    for stage in range(stages):
        last = first
        while last < layers and memory.fits(stage, first, last):
            last += 1
        if last == first:
            held = "embedding, norm, head and " if stage == 0 else ""
            raise ValueError(
                f"stage {stage} with {held}layer {first} alone needs "
                f"{_mib(memory.of_stage(stage, first, first))}, but has "
                f"{_mib(memory.limit_bytes)}"
            )
        if last == layers:
            return
        first = last
    raise ValueError(
        f"{stages} stages of {_mib(memory.limit_bytes)} hold layers 0 to {first - 1} at most: "
        f"layer {first} of 0 to {layers - 1} does not fit"
    )


def _mib(size: int) -> str:
    return f"{size / _MIB:.4g} MiB"
