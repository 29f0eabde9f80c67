"""A stage is rebuilt from the neighbours that can be fetched; else it begins afresh. In the end one
replica of stage 0 puts the whole model together, also where another was stopped meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline import lifecycle
from murmuration.worker.pipeline.part import part_of, stage_fragments
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.mailbox import Mailbox, Published, Started, Stop, ToIO
from tests.protocol.stage_swarm import StagedProblem

PROBLEM = StagedProblem(count=3, layers=3)


class OneThread:
    """An I/O thread's answers, on this thread."""

    def __init__(self, members: tuple[Member, ...], stage: int = 1) -> None:
        context = SimpleNamespace(
            stage=stage, members=lambda: members, transport=None, run=0, me="me"
        )
        self.given: set[str] = set()  # whose results are here
        self.node = SimpleNamespace(
            stages=SimpleNamespace(context=context),
            results=SimpleNamespace(has=self.given.__contains__),
        )

    def ask(self, question: Callable[[], Any]) -> Any:
        return question()

    def do(self, work: Callable[[], Coroutine[None, None, Any]], _timeout_s: float) -> Any:
        return asyncio.run(work())


@dataclass
class Rebuilt:
    """What has become of stage 1."""

    events: list[dict[str, Any]]
    before: dict[str, Tensor]
    parameters: Mapping[str, Tensor]
    anchors: list[Tensor]
    lr: float


def member(stage: int, norm: float) -> Member:
    profile = replace(Profile.unpack(b""), gradient_norm=norm)
    return Member(str(stage), str(stage), 1, stage=stage, profile=profile.pack())


def fetcher(there: list[int]) -> Callable[..., Coroutine[None, None, dict[int, list[Tensor]]]]:
    """Stands for `fetch_stages`: all values of stage n are n + 1."""

    async def fetch_stages(*_: object) -> dict[int, list[Tensor]]:
        return {
            stage: [
                torch.full((fragment.elements,), stage + 1.0)
                for fragment in stage_fragments(PROBLEM.task, PROBLEM.config, stage)
            ]
            for stage in there
        }

    return fetch_stages


def lifecycle_of(
    io: OneThread, events: list[dict[str, Any]], out: Path, problem: StagedProblem = PROBLEM
) -> lifecycle.StageLifecycle:
    thread: Any = io
    return lifecycle.StageLifecycle(
        *(problem.task, problem.config, problem.manifest), thread, out, events.append
    )


def made_from(there: list[int], monkeypatch: pytest.MonkeyPatch, plan: str = "diloco") -> Rebuilt:
    """Stage 1 with neighbours 0 and 2, of which only some can be fetched; all values of stage n
    are n + 1, and their norms 1 and 3."""
    problem = replace(PROBLEM, plan=PRESETS[plan])
    monkeypatch.setattr(lifecycle, "fetch_stages", fetcher(there))
    part = part_of(problem.task, problem.config, 1)
    replica = part.replica(problem.task, problem.config, problem.cursor("me"), Mailbox())
    before = {name: value.clone() for name, value in replica.parameters.items()}
    anchors: list[Tensor] = []
    fragments = [
        FragmentReplica(f, problem.plan, replica.parameters) for f in problem.fragments(part)
    ]
    trainer: Any = SimpleNamespace(replica=replica, fragments=fragments)
    first = [each.state for each in fragments]
    io = OneThread((member(0, 1.0), member(2, 3.0)))
    events: list[dict[str, Any]] = []
    lifecycle_of(io, events, Path(), problem).rebuild(trainer, lambda: False)
    for each, state in zip(fragments, first, strict=True):
        if each.state is not state:
            anchors.append(each.state.anchor)
    parameters = {name: value.clone() for name, value in replica.parameters.items()}
    step = problem.inner.warmup_steps
    replica.inner_step(step, {name: torch.ones_like(v) for name, v in before.items()})
    lr = replica.optimizers[0].param_groups[0]["lr"] / problem.inner.lr_at(step, problem.steps)
    return Rebuilt(events, before, parameters, anchors, lr)


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


@pytest.mark.parametrize(("plan", "lr"), [("diloco", 1.1), ("noloco", 1.1), ("ddp", 1.0)])
def test_a_rebuilt_stage_learns_faster(
    plan: str, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for ddp: its replicas take equal steps, and some of them may not have rebuilt it."""
    assert made_from([0, 2], monkeypatch, plan).lr == pytest.approx(lr)


def test_begins_afresh_where_no_neighbour_came(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_from([], monkeypatch)
    assert made.lr == 1
    assert [event["event"] for event in made.events] == ["warning"]
    assert "begins afresh" in made.events[0]["text"]
    assert not made.anchors
    for name, values in made.parameters.items():
        assert torch.equal(values, made.before[name])


# ------------------------------------------------------------------------------------- the end


class Ending:
    """A peer of a stage, called "me", that has trained to the end of the schedule."""

    def __init__(self, stage: int, others: tuple[Member, ...], out: Path) -> None:
        mailbox = self._mailbox = Mailbox()
        self._posted: list[ToIO] = []
        mailbox.connect(self._posted.append)
        part = part_of(PROBLEM.task, PROBLEM.config, stage)
        replica = part.replica(PROBLEM.task, PROBLEM.config, PROBLEM.cursor("me"), mailbox)
        fragments = PROBLEM.fragments(part)
        self.trainer = Trainer(
            replica=replica,
            fragments=fragments,
            plan=PROBLEM.plan,
            steps=PROBLEM.steps,
            mailbox=mailbox,
            between_steps=lambda _: None,
        )
        self.trainer.step = PROBLEM.steps
        mailbox.answer(Started(("me",)))
        self.trainer.run()
        me = replace(peer("me", stage), phase=Phase.DONE)
        self.lifecycle = lifecycle_of(OneThread((me, *others), stage), [], out)

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
    stage: int, others: tuple[Member, ...], phase: Phase, tmp_path: Path
) -> None:
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
    phase: Phase, assembles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "fetch_stages", fetcher([1, 2]))
    ending = Ending(0, (peer("first", 0, health=Health.LEFT, phase=phase),), tmp_path)
    whole = ending.lifecycle.end(ending.trainer)
    assert (whole is not None) == assembles
    assert (tmp_path / "assembled").exists() == assembles


def test_who_has_put_the_model_together_is_waited_for_until_its_result_is_here(
    tmp_path: Path,
) -> None:
    """It stays until the results of the others are there, so nobody may wait for it to leave."""
    io, done = OneThread((peer("me", 1), peer("first", 0))), list[bool]()

    def await_others(is_assembled: Callable[[], bool], _: float) -> None:
        done.append(is_assembled())
        io.given.add("first")
        done.append(is_assembled())

    trainer: Any = SimpleNamespace(stopped=None, await_others=await_others)
    assert lifecycle_of(io, [], tmp_path).end(trainer) is None
    assert done == [False, True]
