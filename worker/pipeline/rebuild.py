"""A stage made anew from its neighbours, when nobody is left who served it."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from worker.config import Config
from worker.membership import Member
from worker.pipeline.assembly import whole_model
from worker.pipeline.config import cut_of
from worker.pipeline.profile import Profile
from worker.tasks import Staged, Task


def neighbour_weights(stage: int, members: Sequence[Member]) -> dict[int, float]:
    """The stages to make this one from, and their weights: the norms of their last gradients.

    The last stage has but one neighbour. Where no norm is known, neighbours count alike; empty when
    none is there.

    Ref: arXiv:2506.15461 (CheckFree): W_i = (n_{i-1} W_{i-1} + n_{i+1} W_{i+1}) / their sum.
    """
    norms: dict[int, float] = {}
    for member in members:
        if member.live and abs(member.stage - stage) == 1:
            norm = Profile.unpack(member.profile).gradient_norm
            norms[member.stage] = max(norm, norms.get(member.stage, 0.0))
    return weights_of(norms, norms)


def weights_of(there: Iterable[int], weights: Mapping[int, float]) -> dict[int, float]:
    """The weights of the stages that are there, with a sum of 1; alike where all of them are 0."""
    left = {stage: weights[stage] for stage in there}
    total = sum(left.values())
    return {n: weight / total if total > 0 else 1 / len(left) for n, weight in left.items()}


def rebuilt(
    task: Task,
    config: Config,
    stage: int,
    anchors: Mapping[int, Sequence[Tensor]],
    weights: Mapping[int, float],
) -> dict[str, Tensor]:
    """The stage's parameters by name: the weighted mean of its neighbours', layer by layer.

    Args:
        anchors: of the neighbours, by stage and fragment.
        weights: of the neighbours, with a sum of 1.
    """
    assert isinstance(task, Staged)
    cut = cut_of(task, config.stages)
    known = whole_model(task, config, anchors)
    first, last = cut[stage]
    made: dict[str, Tensor] = {}
    for name, _ in task.stage(first, last, outer=False).named_parameters():
        parts = [
            weight * known[_instead(name, cut[stage], cut[neighbour])]
            for neighbour, weight in weights.items()
        ]
        made[name] = torch.stack(parts).sum(dim=0)
    return made


def _instead(name: str, here: tuple[int, int], there: tuple[int, int]) -> str:
    """The parameter of a neighbour's layer at the same place; of its last one, if it has fewer."""

    def moved(match: re.Match[str]) -> str:
        return str(min(there[0] + int(match[0]) - here[0], there[1]))

    return re.sub(r"(?<=\.)\d+(?=\.)", moved, name, count=1)
