"""A stage is rebuilt from the neighbours that can be fetched; else it begins afresh. In the end one
replica of stage 0 puts the whole model together, also where another was stopped meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline import part as parts
from murmuration.worker.pipeline.part import neighbour_weights, part_of, rebuilt_stage
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.mailbox import Mailbox, Published, Started, Stop, ToIO
from tests.protocol.stage_swarm import StagedProblem

PROBLEM = StagedProblem(count=3, layers=3)


def one_thread(members: tuple[Member, ...], stage: int = 1) -> Any:
    """An I/O thread's answers, on this thread; `given`: whose results are here."""
    known, given = {"members": lambda: members, "transport": None, "run": 0}, set[str]()
    context = SimpleNamespace(stage=stage, me="me", **known)
    results = SimpleNamespace(has=given.__contains__)
    node = SimpleNamespace(stages=SimpleNamespace(context=context), results=results)
    thread = {"ask": lambda question: question(), "do": lambda work: asyncio.run(work())}
    return SimpleNamespace(given=given, node=node, **thread)


def member(stage: int, norm: float) -> Member:
    profile = replace(Profile.unpack(b""), gradient_norm=norm)
    return Member(str(stage), str(stage), 1, stage=stage, profile=profile.pack())


def fetcher(there: list[int]) -> Callable[..., Coroutine[None, None, dict[int, list[Tensor]]]]:
    """Stands for `fetch_stages`: all values of stage n are n + 1."""

    cut = {
        stage: part_of(PROBLEM.task, PROBLEM.config, stage).fragments(PROBLEM.config)
        for stage in there
    }

    async def fetch_stages(*_: object, **__: object) -> dict[int, list[Tensor]]:
        return {n: [torch.full((each.elements,), n + 1.0) for each in cut[n]] for n in cut}

    return fetch_stages


def lifecycle_of(
    io: Any, events: list[dict[str, Any]], out: Path, problem: StagedProblem = PROBLEM
) -> parts.StageLifecycle:
    of_run = (problem.task, problem.config, problem.manifest)
    return parts.StageLifecycle(*of_run, io, out, events.append)


def made_from(there: list[int], monkeypatch: pytest.MonkeyPatch, plan: str = "diloco") -> Any:
    """Stage 1 with neighbours 0 and 2, of which only some can be fetched; all values of stage n
    are n + 1, and their norms 1 and 3."""
    problem = replace(PROBLEM, plan=PRESETS[plan])
    monkeypatch.setattr(parts, "fetch_stages", fetcher(there))
    part = part_of(problem.task, problem.config, 1)
    replica = part.replica(problem.task, problem.config, problem.cursor("me"), Mailbox())
    before = {name: value.clone() for name, value in replica.parameters.items()}
    cut = problem.fragments(part)
    fragments = [FragmentReplica(each, problem.plan, replica.parameters) for each in cut]
    trainer: Any = SimpleNamespace(replica=replica, fragments=fragments)
    first, io = [each.state for each in fragments], one_thread((member(0, 1.0), member(2, 3.0)))
    events: list[dict[str, Any]] = []
    lifecycle_of(io, events, Path(), problem).rebuild(trainer, lambda: False)
    both = zip(fragments, first, strict=True)
    anchors = [each.state.anchor for each, state in both if each.state is not state]
    parameters = {name: value.clone() for name, value in replica.parameters.items()}
    step = problem.inner.warmup_steps
    replica.inner_step(step, {name: torch.ones_like(v) for name, v in before.items()})
    lr = replica.optimizers[0].param_groups[0]["lr"] / problem.inner.lr_at(step, problem.steps)
    given = {"events": events, "before": before, "parameters": parameters, "anchors": anchors}
    return SimpleNamespace(**given, lr=lr)


def test_neighbours_count_by_the_norms_of_their_gradients():
    """One of three replicas alone moves nothing, whatever it says."""
    members = [member(0, 9.0), member(1, 1.0), member(3, 3.0), member(2, 7.0), member(4, 5.0)]
    assert neighbour_weights(2, members) == pytest.approx({1: 0.25, 3: 0.75})
    for norm in (1.7e308, 1e-300, 0.0, -1.0, float("nan")):
        said = [*members, member(1, 1.0), member(1, norm)]
        assert neighbour_weights(2, said) == pytest.approx({1: 0.25, 3: 0.75})


def test_a_neighbour_with_fewer_layers_lends_its_last_one():
    problem = StagedProblem(count=3, cut=(1, 3, 2), layers=6)
    task, config = problem.task, problem.config
    values = {name: value.detach() for name, value in task.model().named_parameters()}
    cut = {stage: part_of(task, config, stage).fragments(config) for stage in (0, 2)}
    anchors = {stage: [each.flatten(values) for each in cut[stage]] for stage in cut}
    made = rebuilt_stage(task, config, 1, anchors, {0: 0.25, 2: 0.75})
    for layer, behind in ((1, 4), (2, 5), (3, 5)):
        name = "model.layers.{}.mlp.down_proj.weight"
        expected = 0.25 * values[name.format(0)] + 0.75 * values[name.format(behind)]
        torch.testing.assert_close(made[name.format(layer)], expected)


def test_made_from_the_neighbours_that_came_and_learns_faster(monkeypatch):
    """But for ddp: its replicas take equal steps, and some of them may not have rebuilt it."""
    for weights, value in (({0: 0.25, 2: 0.75}, 2.5), ({0: 1.0}, 1.0), ({2: 1.0}, 3.0)):
        made = made_from([*weights], monkeypatch)
        assert made.events == [{"event": "rebuilt", "stage": 1, "from": weights}]
        for values in (*made.parameters.values(), *made.anchors):
            assert torch.equal(values, torch.full_like(values, value))
        assert sum(map(torch.numel, made.anchors)) == sum(map(torch.numel, made.before.values()))
    for plan, lr in (("diloco", 1.1), ("noloco", 1.1), ("ddp", 1.0)):
        assert made_from([0, 2], monkeypatch, plan).lr == pytest.approx(lr)


def test_begins_afresh_where_no_neighbour_came(monkeypatch):
    made = made_from([], monkeypatch)
    assert made.lr == 1
    assert [event["event"] for event in made.events] == ["warning"]
    assert "begins afresh" in made.events[0]["text"]
    assert not made.anchors
    for name, values in made.parameters.items():
        assert torch.equal(values, made.before[name])


class Ending:
    """A peer of a stage, called "me", that has trained to the end of the schedule."""

    def __init__(self, stage: int, others: tuple[Member, ...], out: Path) -> None:
        mailbox = self._mailbox = Mailbox()
        self._posted: list[ToIO] = []
        mailbox.connect(self._posted.append)
        part = part_of(PROBLEM.task, PROBLEM.config, stage)
        replica = part.replica(PROBLEM.task, PROBLEM.config, PROBLEM.cursor("me"), mailbox)
        of_run = {"plan": PROBLEM.plan, "steps": PROBLEM.steps, "between_steps": lambda _: None}
        fragments = PROBLEM.fragments(part)
        self.trainer = Trainer(replica=replica, fragments=fragments, mailbox=mailbox, **of_run)
        self.trainer.step = PROBLEM.steps
        mailbox.answer(Started(("me",)))
        self.trainer.run()
        me = replace(peer("me", stage), phase=Phase.DONE)
        self.lifecycle = lifecycle_of(one_thread((me, *others), stage), [], out)

    def stop(self) -> None:
        self._mailbox.answer(Stop("SIGTERM"))

    @property
    def phase(self) -> Phase:
        """As the others see it."""
        return [message.phase for message in self._posted if isinstance(message, Published)][-1]


def peer(name: str, stage: int, **fields: Any) -> Member:
    return replace(Member(name, name, 1, phase=Phase.TRAINING, stage=stage), **fields)


@pytest.mark.parametrize(
    ("stage", "others", "phase"),
    [
        (0, (peer("next", 0),), Phase.TRAINING),
        (0, (peer("next", 0, health=Health.DEAD), peer("of 1", 1)), Phase.DONE),
        (1, (peer("next", 0),), Phase.DONE),
    ],
)
def test_who_is_stopped_while_it_settles_leaves_the_model_to_the_next(
    stage, others, phase, tmp_path
):
    """And to nobody, where there is none."""
    ending = Ending(stage, others, tmp_path)
    assert ending.phase is Phase.DONE
    ending.stop()
    ending.lifecycle.settle(ending.trainer, lambda: False, 10.0)
    assert ending.trainer.stopped is not None
    assert ending.phase is phase
    assert ending.lifecycle.end(ending.trainer) is None


@pytest.mark.parametrize(("phase", "assembles"), [(Phase.DONE, False), (Phase.TRAINING, True)])
def test_the_next_of_stage_0_assembles_where_the_first_has_left_it_undone(
    phase, assembles, tmp_path, monkeypatch
):
    monkeypatch.setattr(parts, "fetch_stages", fetcher([1, 2]))
    ending = Ending(0, (peer("first", 0, health=Health.LEFT, phase=phase),), tmp_path)
    assert (ending.lifecycle.end(ending.trainer) is not None) == assembles
    assert (tmp_path / "assembled").exists() == assembles


def test_who_has_put_the_model_together_is_waited_for_until_its_result_is_here(tmp_path):
    """It stays until the results of the others are there, so nobody may wait for it to leave."""
    io, done = one_thread((peer("me", 1), peer("first", 0))), list[bool]()

    def await_others(is_assembled: Callable[[], bool], _: float) -> None:
        done.append(is_assembled())
        io.given.add("first")
        done.append(is_assembled())

    trainer: Any = SimpleNamespace(stopped=None, await_others=await_others)
    assert lifecycle_of(io, [], tmp_path).end(trainer) is None
    assert done == [False, True]
