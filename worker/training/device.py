"""Where a model is trained, how batches get there, and how parameters get to the host and back.

What is exchanged is on the host. With CUDA a fragment is copied through pinned memory. The
host waits for what it reads, and for nothing that it writes:

    model    step t | out ........ | step t + 1  ..  step t + tau | in, merge | step t + tau + 1
    train           |  waits | g   |                              | orders    |
    beside                                 outer step, hash |

This module is all that names an accelerator. Tried on CUDA alone: docs/evidence/gpu.md.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.worker.errors import UsageError
from murmuration.worker.tasks import Batch

# The first that fits: PCIe's before the faster one of the same name.
_BF16_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIE": 756, "H100": 989, "A100": 312, "MI300X": 1307,
    "L40S": 362, "L4": 121, "A10G": 70, "A10": 125, "T4": 65, "V100": 125,
    "RTX 5090": 209, "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def chosen_device(name: str) -> torch.device:
    """Finds the device that `--device` names: `cpu`, `cuda`, `cuda:1`, `mps`, `xpu`; or for `auto`
    the accelerator that torch sees here, else the CPU. Raises UsageError."""
    seen = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if seen else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        asked = torch.device(name)
    except RuntimeError:
        asked = torch.device("meta")
    if asked.type == "meta" or (asked.type == "cpu" and asked.index is not None):
        raise UsageError(f"--device {name}: use auto, cpu, cuda, cuda:1, mps or xpu")
    count = torch.accelerator.device_count()
    alike = accelerator is not None and accelerator.type == asked.type
    if asked.type != "cpu" and not (alike and (asked.index or 0) < count):
        raise UsageError(
            f"--device {name}: torch {torch.__version__} sees no such device on this machine; "
            "leave it out, or install torch for that device"
        )
    return asked


def device_of(model: nn.Module) -> torch.device:
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def memory_peak(device: torch.device) -> int | None:
    """Bytes that this process's tensors have held there at most; None where torch counts none."""
    try:
        return torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else None
    except (RuntimeError, NotImplementedError):
        return None


def flops_peak(device: torch.device) -> float | None:
    """Dense operations a second in bf16 (or fp16), as its maker says; None: not in the list."""
    words = torch.cuda.get_device_name(device).upper().split() if device.type == "cuda" else []
    name = " ".join(words).replace("-", " ")
    found = (tflops for card, tflops in _BF16_TFLOPS.items() if f" {card} " in f" {name} ")
    return next((1e12 * tflops for tflops in found), None)


def moved(batch: Batch, device: torch.device) -> Batch:
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
        there = [_moved(each, device) for each in value]
        return type(value)(*there) if hasattr(value, "_fields") else type(value)(there)
    return value


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Has the generators of Python, numpy and torch go on as if nothing had been drawn."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


# Copies are on the model's own streams, in order with what it computes. With CUDA they go through
# pinned memory, of which torch keeps what is freed until its copies are done.


def empty_on_host(elements: int, like: Iterable[Tensor]) -> Tensor:
    """Fresh 1-D fp32 memory on the host, pinned where one of `like` is on CUDA."""
    pinned = any(each.is_cuda for each in like)
    return torch.empty(elements, dtype=torch.float32, device="cpu", pin_memory=pinned)


def copy_to_host(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies each second tensor into the first, which is on the host; waits once for all."""
    devices = set()
    for into, source in copies:
        into.copy_(source, non_blocking=source.is_cuda and into.is_pinned())
        devices |= {source.device} if source.is_cuda else set()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def pinned(values: Tensor, like: Sequence[Tensor]) -> Tensor:
    """Values on the host (1-D fp32), where copies to the devices of `like` need not be waited for:
    a copy, if need be. Any thread."""
    if not any(each.is_cuda for each in like) or values.is_pinned():
        return values
    return empty_on_host(values.numel(), like).copy_(values)


def on_device_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Brings `pinned` values to where the parameter is; what is computed there waits for them."""
    return values.to(parameter.device, non_blocking=values.is_pinned())
