"""Where a model is trained, and how batches get there. What is exchanged is on the CPU.

Never tried on an accelerator: this module is all that names one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from worker.errors import UsageError
from worker.tasks import Batch

KINDS = ("auto", "cpu", "cuda", "mps")


def chosen_device(name: str) -> torch.device:
    """The device that `--device` names: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.

    Args:
        name: `auto` takes CUDA where it is, else MPS, else the CPU.

    Raises:
        UsageError: torch knows no such device, or does not see it here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in KINDS or (index and not index.isdigit()) or (index and kind != "cuda"):
        raise UsageError(f"--device {name}: use auto, cpu, cuda, cuda:1 or mps")
    there = {
        "cpu": True,
        "cuda": int(index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there[kind]:
        raise UsageError(
            f"--device {name}: torch {torch.__version__} sees no such device on this machine; "
            "leave it out, or install torch for that device"
        )
    return torch.device(name)


def device_of(model: nn.Module) -> torch.device:
    """Of its first parameter."""
    return next(model.parameters()).device


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device, however they are nested."""
    if device.type == "cpu":
        return batch
    inputs, targets = (_moved(each, device) for each in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, device) for each in value)
    return value
