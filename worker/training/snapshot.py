"""A trainer's state to and from a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from algorithms.fragment_state import FragmentState
from algorithms.fragments import Fragment
from algorithms.plan import Plan
from worker.manifest import Manifest
from worker.training.checkpoint import Checkpoint
from worker.training.loop import Trainer
from worker.wire import state_hash


def initial_state(
    plan: Plan, fragment: Fragment, parameters: Mapping[str, Tensor]
) -> FragmentState:
    """Version 0: the initial parameters, and a momentum of zeros where the plan has one."""
    anchor = fragment.flatten(parameters)
    outer = plan.exchange != "none" and plan.payload == "pseudo_gradient"
    momentum = torch.zeros_like(anchor) if outer else torch.empty(0)
    return FragmentState(0, 0, (), anchor, momentum, state_hash(anchor, momentum, ()))


def snapshot(
    trainer: Trainer, manifest: Manifest, stage: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint's tensors, independent of what training does next, and its values; `stage` is
    the one it holds, None for a whole model."""
    tensors: dict[str, Tensor] = {}
    for index, slot in enumerate(trainer.slots):
        tensors[f"anchor/{index}"] = slot.state.anchor
        tensors[f"momentum/{index}"] = slot.state.momentum
        if slot.residual is not None:
            tensors[f"residual/{index}"] = slot.residual
    for slot in trainer.slots:
        # Without the guess of eager updates: it ends with the round in flight.
        own = slot.own(slot.fragment.flatten(trainer.replica.parameters))
        for name, local in slot.fragment.views(own).items():
            tensors[f"local/{name}"] = local
    inner_steps = {}
    names = trainer.replica.optimizer_names
    for index, moments in trainer.replica.optimizer.state_dict()["state"].items():
        name = names[index]
        tensors[f"exp_avg/{name}"] = moments["exp_avg"].clone()
        tensors[f"exp_avg_sq/{name}"] = moments["exp_avg_sq"].clone()
        inner_steps[name] = int(moments["step"])
    values = {
        "manifest": manifest.plain(),
        "step": trainer.step,
        "position": trainer.replica.cursor.position,
        "stream": trainer.replica.cursor.stream,
        "stage": stage,
        "optimizer_steps": inner_steps,
        "states": [
            {"version": s.version, "contributors": s.contributors, "group": list(s.group)}
            for s in trainer.states
        ],
    }
    return tensors, values


def restore_trainer(trainer: Trainer, saved: Checkpoint) -> None:
    """Puts a snapshot back."""
    trainer.step = saved.values["step"]
    for index, (slot, values) in enumerate(zip(trainer.slots, saved.values["states"], strict=True)):
        anchor, momentum = saved.tensors[f"anchor/{index}"], saved.tensors[f"momentum/{index}"]
        group = tuple(values["group"])
        hashed = state_hash(anchor, momentum, group)
        version, contributors = values["version"], values["contributors"]
        slot.state = FragmentState(version, contributors, group, anchor, momentum, hashed)
        slot.residual = saved.tensors.get(f"residual/{index}")
    replica = trainer.replica
    for name, local in replica.parameters.items():
        local.copy_(saved.tensors[f"local/{name}"])
    state = {}
    for index, name in enumerate(replica.optimizer_names):
        if name in saved.values["optimizer_steps"]:
            state[index] = {
                "step": torch.tensor(float(saved.values["optimizer_steps"][name])),
                "exp_avg": saved.tensors[f"exp_avg/{name}"],
                "exp_avg_sq": saved.tensors[f"exp_avg_sq/{name}"],
            }
    replica.optimizer.load_state_dict({**replica.optimizer.state_dict(), "state": state})
