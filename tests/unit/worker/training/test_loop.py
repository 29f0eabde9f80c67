"""The trainer's way through a run, of a peer by itself."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
import torch

from murmuration.algorithms.fragments import partition
from murmuration.algorithms.plan import PRESETS
from murmuration.worker.node.session import AWAIT_OTHERS_S
from murmuration.worker.tasks import Batch, Cursor
from murmuration.worker.training.loop import Trainer, TrainingLoop
from murmuration.worker.training.mailbox import Mailbox, Started, Stop, TrainingEvent
from murmuration.worker.training.model import schema_of
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica, Replica, RunIsOver
from tests.support.statistics_task import Normalised


def test_a_batch_of_nan_is_undone_and_training_goes_on() -> None:
    task, mailbox, told = Normalised(seed=1), Mailbox(), list[object]()
    mailbox.connect(told.append)
    mailbox.answer(Started(("w0",)))
    model, cursor = task.model(), Cursor(seed=0, stream="w0")
    replica = InnerReplica(task, model, InnerConfig(), cursor, 20)
    drawn, spoiled = task.batches("train", cursor), count(1)
    replica.batches = (
        replace(batch, inputs=batch.inputs * math.nan) if next(spoiled) == 2 else batch
        for batch in drawn
    )
    trainer = Trainer(
        replica=replica,
        fragments=partition(schema_of(model), 1),
        plan=replace(PRESETS["diloco"], inner_steps=20),
        steps=20,
        mailbox=mailbox,
        between_steps=lambda trainer: trainer.step == 4 and mailbox.answer(Stop("enough")),
    )
    before = [parameter.clone() for parameter in model.parameters()]
    trainer.run()
    events = [message.event for message in told if isinstance(message, TrainingEvent)]
    (lost,) = [event for event in events if event["event"] == "put_back"]
    assert (lost["step"], lost["steps"]) == (2, 2)
    assert trainer.metrics.plain()["steps_lost"] == 2
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not all(map(torch.equal, before, model.parameters()))


def test_a_step_whose_batch_does_not_come_before_the_end_is_not_taken() -> None:
    task, mailbox = Normalised(seed=1), Mailbox()
    mailbox.connect(lambda message: None)
    mailbox.answer(Started(("w0",)))
    model, cursor = task.model(), Cursor(seed=0, stream="w0")
    replica = InnerReplica(task, model, InnerConfig(), cursor, 10)
    after: list[torch.Tensor] = []

    def two() -> Iterator[Batch]:
        drawn = task.batches("train", cursor)
        yield next(drawn)
        yield next(drawn)
        after.extend(p.clone() for p in model.parameters())
        mailbox.answer(Stop("SIGTERM"))
        raise RunIsOver

    replica.batches = two()
    trainer = Trainer(
        replica=replica,
        fragments=partition(schema_of(model), 1),
        plan=PRESETS["local"],
        steps=10,
        mailbox=mailbox,
        between_steps=lambda _: None,
    )
    trainer.run()
    assert (trainer.step, trainer.stopped) == (2, Stop("SIGTERM"))
    assert after
    assert all(map(torch.equal, after, model.parameters()))


def test_how_far_steps_go_is_settled_until_a_round_is_due() -> None:
    model = Normalised(seed=1).model()
    loop = TrainingLoop(
        replica=Replica(model, []),
        fragments=partition(schema_of(model), 1),
        plan=replace(PRESETS["diloco"], inner_steps=10),
        steps=15,
        mailbox=Mailbox(),
    )
    for stride, strides, then in ((3, (3, 3, 3, 3), 12), (1, (1, 1, 1), 15)):
        loop.pace.stride = lambda stride=stride: stride
        assert loop.agree_ahead() == strides
        loop.pace.stride = lambda: 2
        for _ in strides:
            loop.begin_inner_step()
        assert loop.step == then


@pytest.mark.parametrize(
    ("step_s", "waited_s"), [(0.001, 5.0), (0.5, 10.0), (60.0, 30.0)], ids=["least", "two", "most"]
)
def test_a_loop_that_ends_waits_for_two_periods_within_limits(
    step_s: float, waited_s: float
) -> None:
    task, mailbox, now = Normalised(seed=1), Mailbox(), [0.0]
    mailbox.connect(lambda message: None)
    model = task.model()
    trainer = Trainer(
        replica=InnerReplica(task, model, InnerConfig(), Cursor(seed=0, stream="w0"), 99),
        fragments=partition(schema_of(model), 1),
        plan=replace(PRESETS["diloco"], inner_steps=10),
        steps=99,
        mailbox=mailbox,
        between_steps=lambda _: None,
        clock=lambda: now[0],
    )
    for _ in range(20):  # the first ones count for nothing
        trainer.pace.stepped(step_s)

    def nobody_else_ends() -> bool:
        now[0] += 1.0
        mailbox.answer(Started(("w0",)))  # so that nothing is waited for
        return False

    assert not trainer.leave(nobody_else_ends, AWAIT_OTHERS_S)
    assert now[0] == pytest.approx(waited_s, abs=1.0)
