"""Which layers make up which stage, by measured cost and memory.

Stage 0 holds the embedding, the final norm and the head besides its own layers. The cut minimises
the slowest stage; of equally good ones, the most even.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9  # relative: sums of the same layers in another order are the same cost


@dataclass(frozen=True)
class Layer:
    """Args: forward_s: measured, for one microbatch. bytes: weights, gradients, optimizer state."""

    forward_s: float
    bytes: int


@dataclass(frozen=True)
class Stage:
    """Layers first..last-1, with what stage 0 holds besides counted in."""

    first: int
    last: int
    forward_s: float
    bytes: int


def partition_layers(
    layers: Sequence[Layer],
    stages: int,
    *,
    outside: Layer | None = None,
    limit_bytes: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """Cuts the layers into contiguous stages of at least one layer.

    Args:
        layers: in the order of the forward pass.
        stages: S.
        outside: embedding, final norm and head, which stage 0 holds.
        limit_bytes: of each stage, what its peers can hold beside the activations in flight.

    Raises:
        ValueError: more stages than layers, or no cut within the limits, with the reason.
    """
    if not 1 <= stages <= len(layers):
        raise ValueError(
            f"{len(layers)} layers cannot be cut into {stages} stages of at least one layer"
        )
    extra = outside or Layer(0.0, 0)
    limits = limit_bytes if limit_bytes is not None else [None] * stages
    if len(limits) != stages:
        raise ValueError(f"{len(limits)} memory limits for {stages} stages")

    def cut(stage: int, first: int, last: int) -> Stage:
        part = (*layers[first:last], *([extra] if stage == 0 else []))
        held = sum(layer.bytes for layer in part)
        return Stage(first, last, sum(layer.forward_s for layer in part), held)

    def fits(stage: Stage, limit: int | None) -> bool:
        return limit is None or stage.bytes <= limit

    # best[last]: (slowest stage, sum of squares, cut) of the first stages, ending before `last`.
    best: dict[int, tuple[float, float, tuple[Stage, ...]]] = {0: (0.0, 0.0, ())}
    for index in range(stages):
        reached: dict[int, tuple[float, float, tuple[Stage, ...]]] = {}
        for first, (slowest_s, squares, before) in best.items():
            for last in range(first + 1, len(layers) - (stages - index - 1) + 1):
                stage = cut(index, first, last)
                if not fits(stage, limits[index]):
                    break
                cost_s = max(slowest_s, stage.forward_s)
                found = (cost_s, squares + stage.forward_s**2, (*before, stage))
                if last not in reached or _better(found, reached[last]):
                    reached[last] = found
        if not reached:
            raise ValueError(_why(index, layers, extra, limits[index]))
        best = reached
    if len(layers) not in best:
        held = sum(layer.bytes for layer in (*layers, extra))
        raise ValueError(
            f"no cut into {stages} stages keeps within the memory of its peers: the model takes "
            f"{held} bytes, the stages may take {list(limits)}; add stages or memory"
        )
    return best[len(layers)][2]


def stage_layers(layer_sizes: Sequence[int], outer_size: int, stages: int) -> list[tuple[int, int]]:
    """Cuts a model by its parameters alone, so that every peer finds the same stages.

    Args:
        layer_sizes: parameters of each layer, in order.
        outer_size: parameters of what stage 0 holds besides: embedding, final norm, head.
        stages: S.

    Returns:
        The first and the last layer of each stage, both included.

    Raises:
        ValueError: more stages than layers.
    """
    layers = [Layer(float(size), 0) for size in layer_sizes]
    cut = partition_layers(layers, stages, outside=Layer(float(outer_size), 0))
    return [(stage.first, stage.last - 1) for stage in cut]


def _better(
    one: tuple[float, float, tuple[Stage, ...]], other: tuple[float, float, tuple[Stage, ...]]
) -> bool:
    if abs(one[0] - other[0]) > _ROUNDING * max(one[0], other[0]):
        return one[0] < other[0]
    return one[1] < other[1] * (1 - _ROUNDING)


def _why(stage: int, layers: Sequence[Layer], extra: Layer, limit: int | None) -> str:
    smallest = min(layer.bytes for layer in layers) + (extra.bytes if stage == 0 else 0)
    return (
        f"stage {stage} can hold {limit} bytes, but the layers that are left for it take more (a "
        f"single layer takes {smallest} bytes or more there); give its peers more memory"
    )
