"""A trainer's state goes into a checkpoint and comes back, what it still owes included."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from murmuration.algorithms.plan import Plan
from murmuration.worker.config import Config, RunConfig
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import Task
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.training import checkpoint
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.outer_state import (
    FORMAT,
    plain_state,
    refusal,
    restore_trainer,
    snapshot,
)
from tests.support.lone_trainer import LoneTrainer
from tests.support.statistics_task import Normalised

TINY = {**dict.fromkeys(("hidden_size", "intermediate_size"), 8), "num_hidden_layers": 2}
TINY |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
PLAN = Plan(inner_steps=4, fragments=2, codec="e3m0")


def trainer_of(plan: Plan = PLAN, *, task: Task | None = None) -> LoneTrainer:
    tiny = LlamaBytes(seed=0, architecture=TINY, batch_size=1, context_bytes=8)
    return LoneTrainer(task or tiny, plan, steps=20)


def manifest(plan: Plan = PLAN) -> Manifest:
    return Manifest.of(Config(run=RunConfig(steps=20), plan=plan), [])


def saved(trainer: Trainer, folder: Path) -> checkpoint.Checkpoint:
    checkpoint.save(folder, trainer.step, *snapshot_of(trainer))
    return checkpoint.load(folder)[0]


def snapshot_of(trainer: Trainer, plan: Plan = PLAN) -> tuple[dict[str, Tensor], dict[str, Any]]:
    outer = plain_state(trainer, manifest(plan), lambda question: question(), Residuals())
    return snapshot(trainer, outer)


def restore(trainer: Trainer, from_: checkpoint.Checkpoint) -> None:
    restore_trainer(trainer, from_, 20, Residuals())


def test_integers_come_back_from_a_checkpoint_exactly(tmp_path: Path) -> None:
    before, after = (trainer_of(task=Normalised(seed=0)) for _ in range(2))
    for step in (1, 2):
        before.replica.inner_step(step, before.replica.backward(step))
    for each in before.fragments:
        each.commit(anchor=each.local)
    before.replica.inner_step(3, before.replica.backward(3))
    checkpointed = saved(before, tmp_path)
    assert checkpointed.tensors["anchor/1.num_batches_tracked"] == 2
    assert checkpointed.tensors["local/1.num_batches_tracked"] == 3
    restore(after, checkpointed)
    for name in ("num_batches_tracked", "positive", "seen"):
        was, comes = (getattr(t.replica.model[1], name) for t in (before, after))
        assert torch.equal(was, comes), name
    for one, other in zip(before.states, after.states, strict=True):
        assert one.hash == other.hash


@pytest.mark.parametrize(
    ("format_", "protocol", "refused"),
    [(FORMAT, 99, False), (99, FORMAT, True), (None, FORMAT, False), (None, 9, True)],
)
def test_a_run_goes_on_from_states_of_its_format_only(
    format_: int | None, protocol: int, refused: bool
) -> None:
    """Whatever protocol its peers speak; an earlier state has the number of its protocol."""
    _, values = snapshot_of(trainer_of())
    assert values.pop("format") == FORMAT
    values["manifest"]["protocol"] = protocol
    problem = refusal(values if format_ is None else {**values, "format": format_}, manifest())
    held = protocol if format_ is None else format_
    assert problem == (f"has format {held}, and this version reads {FORMAT}" if refused else None)


def test_a_snapshot_does_not_change_with_what_training_does_next() -> None:
    trainer = trainer_of()
    trainer.replica.inner_step(1, trainer.replica.backward(1))
    tensors, _ = snapshot_of(trainer)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    trainer.replica.inner_step(2, trainer.replica.backward(2))
    trainer.fragments[0].commit(anchor=torch.zeros_like(trainer.states[0].anchor))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("changes", "momentum"),
    [({}, True), ({"payload": "gradient", "inner_steps": 1}, False), ({"exchange": "none"}, False)],
    ids=["pseudo-gradients", "gradients", "none"],
)
def test_only_an_outer_update_has_a_momentum(changes: dict[str, object], momentum: bool) -> None:
    plan = replace(Plan(), **changes)
    trainer = trainer_of(plan)
    (state,) = trainer.states
    assert (state.version, state.contributors, state.group) == (0, 0, ())
    assert state.momentum.numel() == (state.anchor.numel() if momentum else 0)
