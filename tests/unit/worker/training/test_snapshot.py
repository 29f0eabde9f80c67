"""A trainer's state goes into a checkpoint and comes back, what it still owes included."""

from typing import Any

import torch
from torch import Tensor

from murmuration.algorithms.plan import Plan
from murmuration.worker.config import Config, RunConfig
from murmuration.worker.exchange.allreduce.mean import Residuals
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import Task
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.training import checkpoint, outer_state
from murmuration.worker.training.loop import Trainer
from tests.support.lone_trainer import LoneTrainer
from tests.support.statistics_task import Normalised

TINY = {**dict.fromkeys(("hidden_size", "intermediate_size"), 8), "num_hidden_layers": 2}
TINY |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 1)
PLAN = Plan(inner_steps=4, fragments=2, codec="e3m0")


def trainer_of(plan: Plan = PLAN, *, task: Task | None = None) -> LoneTrainer:
    tiny = LlamaBytes(seed=0, architecture=TINY, batch_size=1, context_bytes=8)
    return LoneTrainer(task or tiny, plan, steps=20)


def manifest() -> Manifest:
    return Manifest.of(Config(run=RunConfig(steps=20), plan=PLAN), [])


def snapshot_of(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    outer = outer_state.plain_state(trainer, manifest(), lambda question: question(), Residuals())
    return outer_state.snapshot(trainer, outer)


def test_integers_come_back_from_a_checkpoint_exactly(tmp_path):
    before, after = (trainer_of(task=Normalised(seed=0)) for _ in range(2))
    for step in (1, 2):
        before.replica.inner_step(step, before.replica.backward(step))
    for each in before.fragments:
        each.commit(anchor=each.local)
    before.replica.inner_step(3, before.replica.backward(3))
    checkpoint.save(tmp_path, before.step, *snapshot_of(before))
    checkpointed, _ = checkpoint.load(tmp_path)
    assert checkpointed.tensors["anchor/1.num_batches_tracked"] == 2
    assert checkpointed.tensors["local/1.num_batches_tracked"] == 3
    assert "1.running_mean" in checkpointed.values["buffers"]
    outer_state.restore_trainer(after, checkpointed, 20, Residuals())
    for name in ("num_batches_tracked", "positive", "seen"):
        was, comes = (getattr(t.replica.model[1], name) for t in (before, after))
        assert torch.equal(was, comes), name
    for one, other in zip(before.states, after.states, strict=True):
        assert one.hash == other.hash


def test_a_run_goes_on_from_states_of_its_format_only():
    """Whatever protocol its peers speak; an earlier state has the number of its protocol."""
    _, values = snapshot_of(trainer_of())
    assert values.pop("format") == outer_state.FORMAT
    for format_, protocol, held in [
        ({"format": outer_state.FORMAT}, 99, outer_state.FORMAT),
        ({"format": 99}, outer_state.FORMAT, 99),
        ({}, outer_state.FORMAT, outer_state.FORMAT),
        ({}, 9, 9),
    ]:
        values["manifest"]["protocol"] = protocol
        said = (
            f"has format {held}, and this version reads {outer_state.FORMAT}"
            if held != outer_state.FORMAT
            else None
        )
        assert outer_state.refusal({**values, **format_}, manifest()) == said


def test_a_snapshot_does_not_change_with_what_training_does_next():
    trainer = trainer_of()
    trainer.replica.inner_step(1, trainer.replica.backward(1))
    tensors, _ = snapshot_of(trainer)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    trainer.replica.inner_step(2, trainer.replica.backward(2))
    trainer.fragments[0].commit(anchor=torch.zeros_like(trainer.states[0].anchor))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_only_an_outer_update_has_a_momentum():
    gradients = {"payload": "gradient", "inner_steps": 1}
    for changes, momentum in (({}, True), (gradients, False), ({"exchange": "none"}, False)):
        (state,) = trainer_of(Plan(**changes)).states
        assert (state.version, state.contributors, state.group) == (0, 0, ())
        assert state.momentum.numel() == (state.anchor.numel() if momentum else 0), changes
