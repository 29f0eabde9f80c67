"""Where a model is trained, how batches get there, and how parameters get to the host and back.

What is exchanged is on the host. With CUDA a parameter is copied through pinned memory, on a stream
beside the model's:

    model's stream   step t | ........................ waits | step t + 1
    side stream             | out 1, out 2 | in 1, out 3 | in 2 ..
    host                           | merge 1     | merge 2

The host waits for what it reads, the model's stream for what is written, and nothing else does.

Never tried on an accelerator: this module is all that names one.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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


class Copies:
    """Copies of parameters to the host and back, a tensor at a time. train thread only. Args: side:
    the stream for them; None where each copy is waited for, or none is needed."""

    def __init__(self, side: "_CudaStreams | None" = None) -> None:
        self._side = side

    def read(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """The values of each on the host, in its own type (on the CPU the parameters themselves);
        the next are on their way meanwhile."""
        side = self._side
        if side is None:
            yield from (each.cpu() for each in parameters)
            return
        side.follow()
        ordered: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        for each in parameters:
            host = side.pinned(each)
            ordered.append((host, side.copy(host, each)))
            if len(ordered) > 1:
                yield _arrived(*ordered.popleft())
        while ordered:
            yield _arrived(*ordered.popleft())

    def write(self, parameter: Tensor, values: Tensor) -> None:
        """Makes `values`, on the host and of the same shape, those of the parameter."""
        side = self._side
        if side is None:
            parameter.copy_(values)
            return
        host = side.pinned(parameter)
        host.copy_(values)
        side.follow()
        side.copy(parameter, host)
        side.lead()


def copies_for(parameters: Iterable[Tensor]) -> Copies:
    devices = {each.device for each in parameters if each.is_cuda}
    return Copies(_CudaStreams(devices)) if devices else Copies()


def _arrived(host: Tensor, done: torch.cuda.Event) -> Tensor:
    done.synchronize()
    return host


class _CudaStreams:
    """A stream of copies beside the model's own, on each device: a copy is on the stream of its own
    device alone, in order. torch keeps a pinned tensor's memory until its copies are done."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        streams = {each: torch.cuda.Stream(each) for each in devices}  # type: ignore[no-untyped-call]  # torch leaves it so
        self._streams: dict[torch.device, torch.cuda.Stream] = streams

    def pinned(self, like: Tensor) -> Tensor:
        """A fresh tensor on the host of the same shape and type, which copies need not wait for."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def follow(self) -> None:
        """Copies that are ordered from now on come after all that the model's stream has now."""
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, into: Tensor, source: Tensor) -> torch.cuda.Event:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream = self._streams.get(source.device if into.device.type == "cpu" else into.device)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        if stream is not None:  # else both are on the host, and it has been done
            done.record(stream)
        return done

    def lead(self) -> None:
        """What the model's stream is given from now on comes after all copies ordered so far."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
