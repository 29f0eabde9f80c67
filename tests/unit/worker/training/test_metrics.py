"""The measurements of a training, and what the train thread tells of it meanwhile."""

import pytest
import torch
from torch import nn

from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.algorithms.plan import Plan
from murmuration.worker.library.hooks import UserReplica
from murmuration.worker.tasks import Cursor
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.training import metrics as metrics_module
from murmuration.worker.training.fragment import FragmentReplica
from murmuration.worker.training.mailbox import Mailbox, ToIO, TrainingEvent
from murmuration.worker.training.metrics import Metrics, Reporter, Stall
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica, Pace


def test_utilization_is_compute_over_the_time_from_the_first_step_to_the_last():
    metrics = Metrics(first_step_at=100.0, last_step_at=110.0)
    metrics.stepped(4.0, in_flight=False)
    metrics.stepped(3.5, in_flight=True)
    assert metrics.wall_s == 10.0
    assert metrics.compute_utilization == pytest.approx(0.75)
    metrics.last_step_at = 100.0
    assert metrics.compute_utilization == 0.0


def test_waits_are_told_up_to_the_last_step():
    metrics = Metrics()
    metrics.visits_wait_s += 1.5
    metrics.stalled(Stall(0.25, 0, 0, "b"))
    metrics.stepped(1.0, in_flight=False)
    metrics.visits_wait_s += 9.0  # of an iteration that was not ended
    metrics.stalled(Stall(4.0, 0, 1, "b"))  # the last round, after the last step
    assert metrics.waits() == {"visits_wait_s": 1.5, "rounds_wait_s": 0.25}
    metrics.stepped(1.0, in_flight=False)
    assert metrics.waits() == {"visits_wait_s": 10.5, "rounds_wait_s": 4.25}


def test_iterations_go_from_one_inner_step_to_the_next_waits_included():
    metrics = Metrics(first_step_at=10.0)
    for ended in (11.0, 13.0, 14.0, *range(15, 31), 40.0):  # 18 of a second, one of 2, one of 10
        metrics.last_step_at = float(ended)
        metrics.stepped(0.25, in_flight=False)
    assert metrics.iterations() == {"iteration_s": 1.0, "iteration_p95_s": 2.0}
    assert Metrics().iterations() == {"iteration_s": None, "iteration_p95_s": None}


STEPS = 20


class Told:
    def __init__(self, replica: UserReplica | None = None) -> None:
        parameters, fragment = {"x": torch.zeros(4)}, Fragment(0, (TensorSpec("x", (4,)),))
        self.fragment, self.now = FragmentReplica(fragment, Plan(), parameters), 0.0
        self.task, mailbox = LlamaBytes(seed=0), Mailbox()
        self.posted: list[ToIO] = []
        mailbox.connect(self.posted.append)
        cursor = Cursor(seed=0, stream="w0")
        self.replica = InnerReplica(self.task, nn.Linear(2, 2), InnerConfig(), cursor, STEPS)
        pace = Pace(Plan(inner_steps=3))
        self.reporter = Reporter(
            mailbox, replica or self.replica, [self.fragment], pace, STEPS, lambda: self.now
        )

    def progress(self, now_s: float, step: int, samples: int) -> None:
        self.now = now_s
        self.replica.cursor = Cursor(seed=0, stream="w0", position=samples)
        self.reporter.progress(step)

    def events(self) -> list[dict[str, object]]:
        return [each.event for each in self.posted if isinstance(each, TrainingEvent)]


def test_progress_tells_what_a_second_brings_waits_included():
    told = Told()
    for second, samples in enumerate((0, 8, 24)):
        told.progress(second, 3 * second, samples)
    first, *_, last = told.events()
    assert (first["steps_per_s"], first["samples"]) == (None, 0)
    assert (last["steps_per_s"], last["samples"], last["samples_per_s"]) == (3.0, 24, 12.0)
    context = told.task.tokens_per_sample
    assert (last["tokens"], last["tokens_per_s"]) == (24 * context, 12.0 * context)


def test_what_a_card_holds_and_how_much_of_it_is_used_is_told(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(metrics_module, "device_of", lambda _: device)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: 3 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    told = Told()
    monkeypatch.setattr(told.reporter, "_parameters", 10**9)
    for second, samples in enumerate((0, 50)):
        told.progress(second, second, samples)
    last = told.events()[-1]
    used = 6e9 * 50 * told.task.tokens_per_sample / 312e12
    assert (last["device_memory_bytes"], last["mfu"]) == (3 << 30, round(used, 4))


def test_a_step_taken_over_from_another_peer_is_no_pace():
    told = Told()
    for second, step in enumerate((0, 1, 500, 502)):
        told.now = float(second)
        if step == 500:
            told.reporter.event("adopted")
        told.reporter.progress(step)
    paces = [each["steps_per_s"] for each in told.events() if each["event"] == "progress"]
    assert paces == [None, 1.0, None, 2.0]


def test_where_the_loop_is_the_users_there_are_no_samples_to_tell_of():
    model = nn.Linear(2, 2)
    told = Told(replica=UserReplica(model, torch.optim.SGD(model.parameters(), lr=0.25)))
    told.reporter.progress(1)
    (event,) = told.events()
    assert event["learning_rate"] == 0.25
    assert event.keys().isdisjoint({"samples", "samples_per_s", "tokens", "tokens_per_s"})
