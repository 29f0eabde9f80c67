"""Which layers make up which stage, by their parameters.

Stage 0 holds the embedding, the final norm and the head besides its own layers. The cut minimises
the largest stage; of equally good ones, the most even. Times and memory of peers have no say: the
same model is cut alike on every peer, and in every run.
"""

from collections.abc import Sequence

_Cut = tuple[int, int, tuple[tuple[int, int], ...]]
"""(the largest stage, the sum of squares, the layers of each stage), in parameters."""


def stage_layers(layer_sizes: Sequence[int], outer_size: int, stages: int) -> list[tuple[int, int]]:
    """Cuts the layers into contiguous stages of at least one layer.

    Args:
        layer_sizes: parameters of each layer, in the order of the forward pass.
        outer_size: parameters of what stage 0 holds besides: embedding, final norm, head.
        stages: S.

    Returns:
        The first and the last layer of each stage, both included.

    Raises:
        ValueError: more stages than layers.
    """
    layers = len(layer_sizes)
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages of at least one layer"
        )
    # best[n]: the best cut of the first n layers into the stages so far.
    best: dict[int, _Cut] = {0: (0, 0, ())}
    for stage in range(stages):
        reached: dict[int, _Cut] = {}
        for first, (largest, squares, before) in best.items():
            size = outer_size if stage == 0 else 0
            for last in range(first, layers - (stages - stage - 1)):
                size += layer_sizes[last]
                found = (max(largest, size), squares + size**2, (*before, (first, last)))
                if last + 1 not in reached or found[:2] < reached[last + 1][:2]:
                    reached[last + 1] = found
        best = reached
    return list(best[layers][2])
