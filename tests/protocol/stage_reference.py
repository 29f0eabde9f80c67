"""What one process computes of the whole model, to hold a swarm in stages against."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from worker.inner import Replica
from worker.tasks import Task


@dataclass(frozen=True)
class Reference:
    """What one process computes: the gradients of the first iteration, and all parameters."""

    first: Mapping[str, Tensor]
    last: Mapping[str, Tensor]


def reference(problem: StagedProblem, origins: Iterable[str]) -> Reference:
    """Trains the whole model on the microbatches of all origins, without stages."""
    task: Task = problem.task
    model = task.model()
    replica = Replica(task, model, problem.inner, problem.cursor("unused"), problem.steps)
    streams = [task.batches("train", problem.cursor(origin)) for origin in origins]
    first: dict[str, Tensor] = {}
    for step in range(1, problem.steps + 1):
        batches = [next(stream) for stream in streams for _ in range(problem.microbatches)]
        model.zero_grad()
        (sum(task.loss(model, batch) for batch in batches) / len(batches)).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        first = first or gradients
        replica.inner_step(step, {name: value.clone() for name, value in gradients.items()})
    return Reference(first, {n: p.detach().clone() for n, p in model.named_parameters()})


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    distances = [
        float((found[name] - value).norm() / max(float(value.norm()), 1e-12))
        for name, value in expected.items()
    ]
    assert not any(map(math.isnan, distances))
    return max(distances)


def first_gradients(swarm: StageSwarm) -> dict[str, Tensor]:
    """Of the whole model, in the first iteration, as one replica of each stage found them."""
    found: dict[str, Tensor] = {}
    for stage in range(swarm.problem.count):
        found.update(swarm.of_stage(stage)[0].replica.iterations[0].gradient)
    return found
