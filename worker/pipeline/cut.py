"""Which layers make up which stage of a run."""

from algorithms.skippipe.partition import spans, stage_layers
from worker.pipeline.config import StagesConfig
from worker.tasks import Staged


def cut_of(task: Staged, stages: StagesConfig) -> list[tuple[int, int]]:
    """The first and the last layer of each stage, both included; the same on every peer.

    Raises:
        ValueError: more stages than layers, or other layers in the settings than in the model.
    """
    sizes = task.layer_sizes()
    if not stages.layers:
        return stage_layers(sizes, task.outer_size(), stages.count)
    if sum(stages.layers) != len(sizes):
        raise ValueError(
            f"layers is {list(stages.layers)}, {sum(stages.layers)} in all, but the model has "
            f"{len(sizes)}; write {stages.count} numbers that add up to {len(sizes)}, or leave "
            "layers out to have them shared out"
        )
    return spans(stages.layers)
