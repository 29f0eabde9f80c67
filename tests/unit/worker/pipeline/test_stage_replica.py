"""A stage on the train thread: its jobs, the mean of their gradients, and its iterations."""

import re

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.codecs import codec_by_name
from murmuration.worker import wire
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.pipeline.stage_replica import StageReplica
from murmuration.worker.training.mailbox import (
    NO_VALUES,
    IterationOver,
    IterationStarted,
    JobKind,
    Mailbox,
    SkipAhead,
    StageJob,
    StageJobDone,
    Stop,
    ToTrain,
)
from tests.protocol.stage_swarm import ACTIVATION_BYTES, BATCH, CONTEXT, HIDDEN, StagedProblem

PROBLEM = StagedProblem(count=2, layers=2, microbatches=2)
FP32 = codec_by_name("fp32")


class Stage:
    def __init__(self, stage: int) -> None:
        task, config = PROBLEM.task, PROBLEM.config
        module = part_of(task, config, stage).module
        self.module, self.answers = module, list[StageJobDone]()
        given = (task, module, config, PROBLEM.cursor("x"), self.answers.append)
        self.replica, self._number = StageReplica(*given, begins=stage == 0), 0
        self.replica.begin(1)

    def ask(
        self,
        job: JobKind,
        microbatch: int = 0,
        values: Tensor | None = None,
        gradient: Tensor | None = None,
        iteration: int = 1,
    ) -> int:
        self._number += 1
        sent = ((BATCH, CONTEXT, HIDDEN), encoded(values), encoded(gradient))
        self.replica.handle(StageJob(self._number, iteration, job, microbatch, *sent))
        return self._number

    def done(self) -> list[int]:
        self.answers.clear()
        while self.replica.work():
            pass
        return [answer.number for answer in self.answers]


def encoded(values: Tensor | None) -> memoryview:
    return NO_VALUES if values is None else wire.encode(FP32, values.reshape(-1))


def hidden(seed: int = 0) -> Tensor:
    return torch.randn((BATCH, CONTEXT, HIDDEN), generator=torch.Generator().manual_seed(seed))


def test_jobs_of_a_later_iteration_wait_and_of_an_earlier_one_are_refused():
    stage = Stage(1)
    later = stage.ask(JobKind.FORWARD, 0, hidden(), iteration=2)
    assert stage.done() == []
    old = stage.ask(JobKind.FORWARD, 0, hidden(), iteration=1)
    stage.replica.begin(2)
    assert sorted(stage.done()) == [later, old]
    problems = {answer.number: answer.problem for answer in stage.answers}
    assert (problems[later], problems[old]) == ("", "the iteration is over")


def test_an_iteration_without_visits_moves_no_parameter():
    """Adam would go on by its momentum."""
    stage = Stage(1)
    stage.ask(JobKind.BACKWARD, 0, hidden(), hidden(1))
    stage.done()
    stage.replica.inner_step(1, stage.replica.backward(1))
    before = {name: value.clone() for name, value in stage.replica.parameters.items()}
    stage.replica.begin(2)
    stage.replica.inner_step(2, stage.replica.backward(2))
    assert all(torch.equal(before[n], v) for n, v in stage.replica.parameters.items())


def test_what_comes_back_without_a_loss_is_refused():
    stage = Stage(0)
    stage.ask(JobKind.LEAVE, 0, None, hidden())
    stage.done()
    assert stage.answers[0].problem == "leave: no loss was asked for of microbatch 0"
    stage.replica.backward(1)
    assert stage.replica.visits == 0


def test_gradients_are_summed_in_place():
    """No second copy of them, however many visits there are."""
    stage = Stage(1)
    named = dict(stage.module.named_parameters())
    where = {name: parameter.grad for name, parameter in named.items()}
    for n in range(3):
        stage.ask(JobKind.BACKWARD, n, hidden(n), hidden(10 + n))
    stage.done()
    mean = stage.replica.backward(1)
    assert all(mean[name] is where[name] is named[name].grad for name in named)
    stage.replica.inner_step(1, mean)
    stage.replica.begin(2)
    assert all(named[name].grad is where[name] for name in named)
    assert not any(bool(parameter.grad.any()) for parameter in named.values())


@pytest.mark.parametrize("finite", [True, False])
def test_a_backward_that_fails_half_way_costs_the_iteration(finite):
    """Part of its gradient is in the sum, and nobody can take it out again."""
    stage = Stage(1)

    def fail(_module: object, given: tuple[Tensor], _gradient: object) -> tuple[Tensor]:
        if finite:
            raise RuntimeError("too much")
        return (given[0] * torch.inf,)

    stage.ask(JobKind.BACKWARD, 0, hidden(), hidden(1))
    stage.done()
    hook = stage.module.register_full_backward_hook(fail)  # type: ignore[arg-type]
    stage.ask(JobKind.BACKWARD, 1, hidden(), hidden(1))
    stage.done()
    (failed,) = [answer for answer in stage.answers if answer.failed]
    assert re.fullmatch(r"backward: .*; this iteration's gradient is left out", failed.problem)
    assert not any(bool(each.any()) for each in stage.replica.backward(1).values())
    assert stage.replica.visits == 0
    hook.remove()
    stage.replica.begin(2)
    stage.ask(JobKind.BACKWARD, 2, hidden(), hidden(1), iteration=2)
    stage.done()
    assert any(bool(each.any()) for each in stage.replica.backward(2).values())


class Scripted(Mailbox):
    """Its messages come one by one, each when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: list[ToTrain] = []

    def wait(self, timeout_s: float | None = None) -> ToTrain | None:
        assert self.coming, "nothing more would come"
        return self.coming.pop(0)


class Training:
    """A loop that is at a step, and hands jobs on as a trainer does; a message takes a second."""

    def __init__(self) -> None:
        self.step, self.moved, self.now = 1, False, 0.0
        self.stopped: Stop | None = None
        self.posted: list[object] = []
        self._mailbox = Scripted()
        self._mailbox.connect(self.posted.append)
        task, config, cursor = PROBLEM.task, PROBLEM.config, PROBLEM.cursor("1a")
        given = (task, part_of(task, config, 1).module, config, cursor, self._mailbox.post)
        self.stage = StageReplica(*given, begins=False, clock=lambda: self.now)

    def handle(self, message: ToTrain | None) -> None:
        self.now += 1.0
        match message:
            case StageJob() | IterationOver():
                self.stage.handle(message)
            case SkipAhead(step):
                self.step, self.moved = step, True
            case Stop():
                self.stopped = message
            case _:
                pytest.fail(f"nobody waits for {message}")

    def serve(self, *messages: ToTrain) -> float:
        """One step, in which exactly these messages are waited for."""
        self.moved = False
        self._mailbox.coming.extend(messages)
        waited_s = self.stage.serve(self, self._mailbox)
        assert not self._mailbox.coming
        return waited_s

    @property
    def begun(self) -> list[int]:
        return [each.iteration for each in self.posted if isinstance(each, IterationStarted)]

    @property
    def answered(self) -> list[int]:
        return [each.number for each in self.posted if isinstance(each, StageJobDone)]


def forward(number: int, iteration: int) -> StageJob:
    values = memoryview(bytearray(ACTIVATION_BYTES))
    return StageJob(number, iteration, JobKind.FORWARD, 0, (BATCH, CONTEXT, HIDDEN), values)


def test_an_iteration_lasts_until_word_comes_that_it_is_over():
    training = Training()
    assert training.serve(forward(1, iteration=2), IterationOver(1)) == 2.0
    assert training.answered == []
    training.step = 2
    training.serve(IterationOver(1), forward(2, iteration=2), IterationOver(2))
    assert training.begun == [1, 2]
    assert training.answered == [1, 2]


def test_another_peers_state_ends_it_and_back_in_the_schedule_nothing_is_waited_for():
    """The visits of these iterations are in the parameters that were taken over."""
    training = Training()
    training.serve(SkipAhead(5))
    assert training.begun == [1]
    training.serve(IterationOver(5))  # the next step begins there
    training.step = 3
    assert training.serve() == 0.0
    assert (training.stage.iteration, training.begun) == (3, [1, 5])
