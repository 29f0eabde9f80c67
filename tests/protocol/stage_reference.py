"""What a swarm in stages on the virtual clock is held against."""

from collections.abc import Iterable

from torch import Tensor

from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from tests.support.whole_training import Whole, trained_whole


def reference(problem: StagedProblem, origins: Iterable[str]) -> Whole:
    """The whole model, trained on the microbatches of all origins, without stages."""
    cursors = [problem.cursor(origin) for origin in origins]
    return trained_whole(problem.task, problem.inner, cursors, problem.microbatches, problem.steps)


def first_gradients(swarm: StageSwarm) -> dict[str, Tensor]:
    """Of the whole model, in the first iteration, as one replica of each stage found them."""
    found: dict[str, Tensor] = {}
    for stage in range(swarm.problem.count):
        found.update(swarm.of_stage(stage)[0].replica.iterations[0].gradient)
    return found
