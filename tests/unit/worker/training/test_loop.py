"""The trainer's way through a run, of a peer by itself."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
import torch

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.tasks import Batch
from murmuration.worker.training.loop import AWAIT_OTHERS_S
from murmuration.worker.training.mailbox import Started, Stop
from murmuration.worker.training.replica import RunIsOver
from tests.support.lone_trainer import LoneTrainer
from tests.support.statistics_task import Normalised

DILOCO = replace(PRESETS["diloco"], inner_steps=20)


def test_a_batch_of_nan_is_undone_and_training_goes_on():
    trainer = LoneTrainer(
        Normalised(seed=1),
        DILOCO,
        steps=20,
        between_steps=lambda t: t.step == 4 and t.box.answer(Stop("enough")),
    )
    replica, spoiled = trainer.replica, count(1)
    replica.batches = (
        replace(batch, inputs=batch.inputs * math.nan) if next(spoiled) == 2 else batch
        for batch in replica.batches
    )
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.run()
    (lost,) = trainer.told("put_back")
    assert (lost["step"], lost["steps"]) == (2, 2)
    assert trainer.metrics.plain()["steps_lost"] == 2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert not all(map(torch.equal, before, trainer.model.parameters()))


def test_a_step_whose_batch_does_not_come_before_the_end_is_not_taken():
    trainer = LoneTrainer(Normalised(seed=1), PRESETS["local"], steps=10)
    drawn, after = trainer.replica.batches, list[torch.Tensor]()

    def two() -> Iterator[Batch]:
        yield next(drawn)
        yield next(drawn)
        after.extend(p.clone() for p in trainer.model.parameters())
        trainer.box.answer(Stop("SIGTERM"))
        raise RunIsOver

    trainer.replica.batches = two()
    trainer.run()
    assert (trainer.step, trainer.stopped) == (2, Stop("SIGTERM"))
    assert after
    assert all(map(torch.equal, after, trainer.model.parameters()))


def test_how_far_steps_go_is_settled_until_a_round_is_due():
    loop = LoneTrainer(Normalised(seed=1), replace(DILOCO, inner_steps=10), steps=15)
    for stride, strides, then in ((3, (3, 3, 3, 3), 12), (1, (1, 1, 1), 15)):
        loop.pace.stride = lambda stride=stride: stride
        assert loop.agree_ahead() == strides
        loop.pace.stride = lambda: 2
        for _ in strides:
            loop.begin_step()
        assert loop.step == then


@pytest.mark.parametrize(
    ("step_s", "waited_s"), [(0.001, 5.0), (0.5, 10.0), (60.0, 30.0)], ids=["least", "two", "most"]
)
def test_a_loop_that_ends_waits_for_two_periods_within_limits(step_s, waited_s):
    now, plan = [0.0], replace(DILOCO, inner_steps=10)
    trainer = LoneTrainer(Normalised(seed=1), plan, steps=99, clock=lambda: now[0])
    for _ in range(20):  # the first ones count for nothing
        trainer.pace.stepped(step_s)

    def nobody_else_ends() -> bool:
        now[0] += 1.0
        trainer.box.answer(Started(("w0",)))  # so that nothing is waited for
        return False

    assert not trainer.leave(nobody_else_ends, AWAIT_OTHERS_S)
    assert now[0] == pytest.approx(waited_s, abs=1.0)
