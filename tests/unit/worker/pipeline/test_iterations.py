"""An iteration of a stage in the training loop: how long it lasts, and what ends it early."""

import pytest

from tests.protocol.stage_swarm import ACTIVATION_BYTES, BATCH, CONTEXT, HIDDEN, StagedProblem
from worker.pipeline.iterations import Iterations
from worker.pipeline.part import part_of
from worker.pipeline.replica import StageReplica
from worker.training.inbox import (
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

PROBLEM = StagedProblem(count=2, layers=2)


class Scripted(Mailbox):
    """Its messages come one by one, each when it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: list[ToTrain] = []

    def wait(self, timeout_s: float | None = None) -> ToTrain | None:
        assert self.coming, "nothing more would come"
        return self.coming.pop(0)


class Training:
    """A loop that is at a step, and hands visits on as a trainer does; a message takes a second."""

    def __init__(self, step: int = 1) -> None:
        self.step, self.moved, self.now = step, False, 0.0
        self.stopped: Stop | None = None
        self.posted: list[object] = []
        self._mailbox = Scripted()
        self._mailbox.connect(self.posted.append)
        config = PROBLEM.config
        part = part_of(PROBLEM.task, config, 1)
        stage = part.replica(PROBLEM.task, config, PROBLEM.cursor("1a"), self._mailbox)
        assert isinstance(stage, StageReplica)
        self.stage, self.iterations = stage, Iterations(stage, self._mailbox, lambda: self.now)

    def take(self, message: ToTrain | None) -> None:
        self.now += 1.0
        match message:
            case StageJob() | IterationOver():
                self.iterations.take(message)
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
        waited_s = self.iterations.serve(self)
        assert not self._mailbox.coming
        return waited_s

    @property
    def begun(self) -> list[int]:
        """The iterations that others were told of."""
        return [each.iteration for each in self.posted if isinstance(each, IterationStarted)]

    @property
    def answered(self) -> list[int]:
        """The visits that were computed."""
        return [each.number for each in self.posted if isinstance(each, StageJobDone)]


def forward(number: int, iteration: int) -> StageJob:
    """A visit on its way to the next stage."""
    values = memoryview(bytearray(ACTIVATION_BYTES))
    return StageJob(number, iteration, JobKind.FORWARD, 0, (BATCH, CONTEXT, HIDDEN), values)


def test_an_iteration_lasts_until_word_comes_that_it_is_over() -> None:
    training = Training()
    assert training.serve(forward(1, iteration=2), IterationOver(1)) == 2.0
    assert training.answered == []
    training.step = 2
    training.serve(IterationOver(1), forward(2, iteration=2), IterationOver(2))
    assert training.begun == [1, 2]
    assert training.answered == [1, 2]


def test_a_stop_ends_it() -> None:
    training = Training()
    training.serve(Stop("SIGTERM"))
    assert not training.stage.over


def test_another_peers_state_ends_it_and_the_next_step_begins_there() -> None:
    training = Training()
    training.serve(SkipAhead(5))
    assert training.begun == [1]
    training.serve(IterationOver(5))
    assert training.begun == [1, 5]


def test_back_in_the_schedule_nothing_is_waited_for() -> None:
    """The visits of these iterations are in the parameters that were taken over."""
    training = Training(step=5)
    training.serve(IterationOver(5))
    training.step = 3
    assert training.serve() == 0.0
    assert (training.stage.iteration, training.begun) == (3, [5])


def test_an_iteration_that_was_left_is_served_again() -> None:
    """Its visits are in no gradient yet."""
    training = Training(step=5)
    training.serve(SkipAhead(6))
    training.step = 5
    training.serve(IterationOver(5))
    assert training.stage.over
