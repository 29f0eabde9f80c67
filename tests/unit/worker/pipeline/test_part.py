"""A stage made anew: from which neighbours, and how much of each."""

from dataclasses import replace

import pytest
import torch

from murmuration.worker.membership import Health, Member
from murmuration.worker.pipeline.part import (
    neighbour_weights,
    rebuilt_stage,
    stage_fragments,
)
from murmuration.worker.pipeline.profile import Profile
from tests.protocol.stage_swarm import StagedProblem


def member(stage: int, norm: float, health: Health = Health.ALIVE) -> Member:
    profile = replace(Profile.unpack(b""), gradient_norm=norm)
    name = f"{stage}/{norm}"
    return Member(name, name, epoch=1, stage=stage, health=health, profile=profile.pack())


def test_neighbours_count_by_the_norms_of_their_gradients() -> None:
    members = [member(0, 9.0), member(1, 1.0), member(3, 3.0), member(2, 7.0), member(4, 5.0)]
    assert neighbour_weights(2, members) == pytest.approx({1: 0.25, 3: 0.75})


def test_a_neighbour_with_fewer_layers_lends_its_last_one() -> None:
    problem = StagedProblem(count=3, cut=(1, 3, 2), layers=6)
    task, config = problem.task, problem.config
    values = dict(task.model().named_parameters())
    anchors = {
        stage: [
            fragment.flatten({name: value.detach() for name, value in values.items()})
            for fragment in stage_fragments(task, config, stage)
        ]
        for stage in (0, 2)
    }
    made = rebuilt_stage(task, config, 1, anchors, {0: 0.25, 2: 0.75})
    for layer, behind in ((1, 4), (2, 5), (3, 5)):
        name = "model.layers.{}.mlp.down_proj.weight"
        expected = 0.25 * values[name.format(0)] + 0.75 * values[name.format(behind)]
        torch.testing.assert_close(made[name.format(layer)], expected.detach())
