"""What the train thread tells of itself: where a joiner enters, what it cannot mend, how often."""

import math

import pytest
import torch
from torch import nn

from algorithms.fragments import Fragment, TensorSpec
from algorithms.plan import Plan
from worker.membership import Phase
from worker.tasks import Cursor
from worker.tasks.llama_bytes import LlamaBytes
from worker.training.config import InnerConfig
from worker.training.fragment import FragmentReplica
from worker.training.inbox import Mailbox, Published, ToIO, TrainingEvent
from worker.training.metrics import Reporter
from worker.training.replica import InnerReplica, Pace

STEPS = 20


class Told:
    """A reporter of one fragment, and what it has told."""

    def __init__(self) -> None:
        parameters = {"x": torch.zeros(4)}
        fragment = Fragment(0, (TensorSpec("x", (4,)),))
        self.fragment, self.now = FragmentReplica(fragment, Plan(), parameters), 0.0
        task, mailbox = LlamaBytes(seed=0), Mailbox()
        self.posted: list[ToIO] = []
        mailbox.connect(self.posted.append)
        cursor = Cursor(seed=0, stream="w0")
        self.replica = InnerReplica(task, nn.Linear(2, 2), InnerConfig(), cursor, STEPS)
        pace = Pace(3, unequal=False)
        self.reporter = Reporter(
            mailbox, self.replica, [self.fragment], pace, STEPS, lambda: self.now
        )

    def published(self) -> Published:
        last = self.posted[-1]
        assert isinstance(last, Published)
        return last

    def events(self) -> list[dict[str, object]]:
        return [each.event for each in self.posted if isinstance(each, TrainingEvent)]


def test_a_joiner_enters_before_what_is_in_flight() -> None:
    told = Told()
    told.reporter.publish(7)
    assert (told.published().step, told.published().entry_step) == (7, 7)
    told.fragment.contribute(torch.ones(4), 5)
    told.reporter.publish(7)
    assert (told.published().step, told.published().entry_step) == (7, 4)


def test_the_pass_over_all_at_the_end_keeps_no_joiner_back() -> None:
    told = Told()
    told.fragment.contribute_anchor(3, STEPS)
    told.reporter.publish(STEPS)
    assert told.published().entry_step == STEPS


def test_a_fragment_whose_round_failed_waits_for_others_and_so_do_all_in_the_end() -> None:
    told = Told()
    told.reporter.publish(1)
    assert told.published().failed == frozenset()
    told.fragment.contribute(torch.ones(4), 1)
    told.fragment.abandon((), None, told.fragment.local)
    told.reporter.publish(1)
    assert told.published().failed == {0}
    told.fragment.failed, told.reporter.phase = False, Phase.DONE
    told.reporter.publish(STEPS)
    assert (told.published().phase, told.published().failed) == (Phase.DONE, {0})


def test_progress_is_told_now_and_then_and_at_the_last_step() -> None:
    told = Told()
    for tenth in range(11):
        told.now = tenth / 10
        told.reporter.progress(tenth)
    told.reporter.progress(STEPS)
    assert [event["step"] for event in told.events()] == [0, 5, 10, STEPS]
    assert sum(isinstance(each, Published) for each in told.posted) == 4


def test_waiting_is_told_at_once_and_publishes_nothing() -> None:
    told = Told()
    told.reporter.progress(1)
    told.posted.clear()
    told.reporter.progress(1, state="waiting")
    assert [event["state"] for event in told.events()] == ["waiting"]
    assert len(told.posted) == 1


@pytest.mark.parametrize(("loss", "said"), [(1.5, 1.5), (math.nan, None)])
def test_a_stage_without_a_loss_says_none(loss: float, said: float | None) -> None:
    told = Told()
    told.replica.loss = loss
    told.reporter.iteration(2, visits=8)
    assert told.events() == [{"event": "iteration", "iteration": 2, "visits": 8, "loss": said}]
