"""The whole model trained in one process, to hold a swarm in stages against."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from murmuration.worker.tasks import Cursor, Task
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica


@dataclass(frozen=True)
class Whole:
    """What one process computes: the gradients of the first iteration, and all parameters."""

    first: Mapping[str, Tensor]
    last: Mapping[str, Tensor]


def trained_whole(
    task: Task, inner: InnerConfig, origins: Sequence[Cursor], microbatches: int, steps: int
) -> Whole:
    """Trains without stages on the microbatches of all origins: an AdamW step by their mean.

    Args:
        origins: where each origin's samples begin.
        microbatches: of each origin in a step.
    """
    model = task.model()
    replica = InnerReplica(task, model, inner, Cursor(seed=0, stream="unused"), steps)
    streams = [task.batches("train", cursor) for cursor in origins]
    first: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        batches = [next(stream) for stream in streams for _ in range(microbatches)]
        model.zero_grad()
        (sum(task.loss(model, batch) for batch in batches) / len(batches)).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        first = first or gradients
        replica.inner_step(step, {name: value.clone() for name, value in gradients.items()})
    return Whole(first, {n: p.detach().clone() for n, p in model.named_parameters()})


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    distances = [
        float((found[name] - value).norm() / max(float(value.norm()), 1e-12))
        for name, value in expected.items()
    ]
    assert not any(map(math.isnan, distances))
    return max(distances)
