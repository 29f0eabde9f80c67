"""A stage is made from whichever of its neighbours can be fetched; else it begins anew."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.protocol.stage_swarm import StagedProblem
from worker.membership import Card
from worker.stages import life
from worker.stages.assembly import stage_fragments
from worker.stages.part import part_of
from worker.stages.profile import Profile

PROBLEM = StagedProblem(count=3, layers=3)


class OneThread:
    """An I/O thread's answers, on this thread."""

    def __init__(self, cards: tuple[Card, ...]) -> None:
        context = SimpleNamespace(stage=1, cards=lambda: cards, transport=None, run=0, me="me")
        self.node = SimpleNamespace(stages=SimpleNamespace(context=context))

    def ask(self, question: Callable[[], Any]) -> Any:
        return question()

    def do(self, work: Callable[[], Coroutine[None, None, Any]], _timeout_s: float) -> Any:
        return asyncio.run(work())


@dataclass
class Made:
    """What has become of stage 1."""

    events: list[dict[str, Any]]
    before: dict[str, Tensor]
    parameters: Mapping[str, Tensor]
    anchors: list[Tensor]


def card(stage: int, norm: float) -> Card:
    profile = replace(Profile.unpack(b""), gradient_norm=norm)
    return Card(str(stage), str(stage), 1, stage=stage, profile=profile.pack())


def made_from(there: list[int], monkeypatch: pytest.MonkeyPatch) -> Made:
    """Stage 1 with neighbours 0 and 2, of which only some can be fetched; all values of stage n
    are n + 1, and their norms 1 and 3."""
    task, config = PROBLEM.task, PROBLEM.config

    async def fetch_stages(*_: object) -> dict[int, list[Tensor]]:
        return {
            stage: [
                torch.full((fragment.elements,), stage + 1.0)
                for fragment in stage_fragments(task, config, stage)
            ]
            for stage in there
        }

    monkeypatch.setattr(life, "fetch_stages", fetch_stages)
    part = part_of(task, config, 1)
    parameters = {name: value.detach() for name, value in part.module.named_parameters()}
    before = {name: value.clone() for name, value in parameters.items()}
    anchors: list[Tensor] = []
    slots = [
        SimpleNamespace(fragment=fragment, commit=lambda *, anchor: anchors.append(anchor))
        for fragment in PROBLEM.fragments(part)
    ]
    trainer: Any = SimpleNamespace(replica=SimpleNamespace(parameters=parameters), slots=slots)
    io: Any = OneThread((card(0, 1.0), card(2, 3.0)))
    events: list[dict[str, Any]] = []
    offload: Any = None
    stage = life.StageLife(
        task=task,
        config=config,
        manifest=PROBLEM.manifest,
        io=io,
        offload=offload,
        out=Path(),
        log=events.append,
    )
    stage.rebuild(trainer, lambda: False)
    return Made(events, before, parameters, anchors)


@pytest.mark.parametrize(
    ("there", "weights", "value"),
    [([0, 2], {0: 0.25, 2: 0.75}, 2.5), ([0], {0: 1.0}, 1.0), ([2], {2: 1.0}, 3.0)],
)
def test_made_from_the_neighbours_that_came(
    there: list[int],
    weights: dict[int, float],
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = made_from(there, monkeypatch)
    assert made.events == [{"event": "rebuilt", "stage": 1, "from": weights}]
    for values in (*made.parameters.values(), *made.anchors):
        assert torch.equal(values, torch.full_like(values, value))
    assert sum(map(torch.numel, made.anchors)) == sum(map(torch.numel, made.before.values()))


def test_begins_anew_where_no_neighbour_came(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_from([], monkeypatch)
    assert [event["event"] for event in made.events] == ["warning"]
    assert "begins anew" in made.events[0]["text"]
    assert not made.anchors
    for name, values in made.parameters.items():
        assert torch.equal(values, made.before[name])
