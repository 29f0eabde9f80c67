"""Memory that the presets take beyond a plain training loop, as multiples of the model.

    python -m tests.lab memory [--workers 2] [--sizes 12 24] [--preset NAME ...]
    python -m tests.lab memory --large [--layers 18] [--preset NAME ...]

Real workers train a decoder of two sizes. The peak of a process (VmHWM) is read before the last
batch, so without the checkpoint that follows, and once more when it has ended. What libraries and
allocators take does not grow with the model: the difference between the two sizes, over that
between their parameters in fp32, is what counts. A plain loop holds the model, its gradients and
AdamW's moments: 4, and what autograd and the allocator add. Writes a Markdown table.

Both sizes have fragments of three layers, so that what is in flight is the same. What was asked for
is at most 3 copies for `streaming` and 3.5 for `diloco`.

`--large` trains a model of half a billion parameters in bf16 with SGD instead, and says what the
processes took together, and how long. With `--layers 9` it is a quarter of a billion.
"""

import argparse
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from murmuration.worker.tasks import Cursor
from murmuration.worker.tasks.llama import Llama
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.task import Batch
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica
from tests.support.workers import running_swarm, settings_of

PRESETS = ("local", "diloco", "streaming")
LAYERS = (12, 24)
_WANTED = {"streaming": 3.0, "diloco": 3.5}  # copies of the model beyond a plain loop
_WANTED_BYTES = 20 << 30  # of two large processes
_CONTEXT_BYTES, _BATCH_SIZE = 32, 2  # activations of no size
_PERIODS = 2
_LARGE_LAYERS, _LARGE_WIDTH = 18, 1536
_LARGE_FRAGMENTS = 9  # what is in flight is a fragment's
_SPAWNED = (
    "runpy",
    "murmuration.worker.cli",
)  # a process of its own: one that is forked has its parent's peak


class Measured(LlamaBytes):
    """The built-in task; notes the peak in a file named after the process before a batch."""

    def __init__(
        self, *, seed: int, notes: str, last_step: int, dtype: str = "float32", **options: Any
    ) -> None:
        # Whatever the built-in task takes: it checks its options by itself.
        super().__init__(seed=seed, **options)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._notes, self._last_step, self._losses = Path(notes), last_step, 0

    def model(self) -> Llama:
        return super().model().to(self._dtype)

    def generate(self, *_: Any) -> str:
        return ""  # the text of a large model takes longer than its training

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._losses += 1
        if self._losses == self._last_step:
            (self._notes / str(os.getpid())).write_text(str(peak_bytes()))
        return super().loss(model, batch)


def peak_bytes() -> int:
    """The largest resident size that this process has had."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, status
    return 1024 * int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--preset", nargs="*", choices=(*PRESETS, "onebit"), default=PRESETS)
    parser.add_argument(
        "--sizes", nargs=2, type=int, default=LAYERS, metavar="LAYERS", help="of the two models"
    )
    parser.add_argument("--large", action="store_true", help="0.5 billion parameters instead")
    parser.add_argument("--layers", type=int, default=_LARGE_LAYERS, help="of the large model")
    options = parser.parse_args()
    if options.large:
        print_large(options.layers, options.workers, [p for p in options.preset if p != "local"])
        return
    steps = _PERIODS * options.inner_steps + options.inner_steps // 2
    sizes = [parameter_bytes(layers) for layers in options.sizes]
    print(
        f"{options.workers} workers, models of {' and '.join(f'{s / 1e6:.0f}' for s in sizes)} MB\n"
        "\n| process | peak of each | times the model | beyond plain | with the last checkpoint "
        "| asked for |\n| --- | --- | --- | --- | --- | --- |"
    )
    plain: float | None = None
    for preset in ("plain", *options.preset):
        peaks = [
            peaks_of(preset, layers, steps, options.workers, options.inner_steps)
            for layers in options.sizes
        ]
        training, whole = (
            (getattr(peaks[1], kind) - getattr(peaks[0], kind)) / (sizes[1] - sizes[0])
            for kind in ("training_bytes", "whole_bytes")
        )
        plain = training if plain is None else plain
        each = " and ".join(f"{peak.training_bytes / 1e6:.0f}" for peak in peaks)
        last = "-" if preset == "plain" else f"{whole:.2f}"
        print(
            f"| {preset} | {each} MB | {training:.2f} | {training - plain:.2f} | {last} "
            f"| {verdict(training - plain, _WANTED.get(preset))} |",
            flush=True,
        )


def verdict(found: float, wanted: float | None, unit: str = "") -> str:
    """Whether what was asked for is kept."""
    if wanted is None:
        return "-"
    return f"at most {wanted:g}{unit}: {'kept' if found <= wanted else 'MISSED'}"


def print_large(layers: int, workers: int, presets: Sequence[str]) -> None:
    """A round of a model that fills a machine: peaks and seconds."""
    count = parameter_bytes(layers, _LARGE_WIDTH) // 4
    print(f"{workers} workers, {count / 1e6:.0f} million parameters in bf16, SGD\n")
    print(
        "| preset | peak of each in training | in its whole life | together | seconds "
        "| asked for |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for preset in presets:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "notes"
            notes.mkdir()
            extra = settings_of(
                task__dtype='"bfloat16"',
                inner__optimizer='"sgd"',
                diloco__fragments=_LARGE_FRAGMENTS if preset == "streaming" else 1,
            )
            found = train_workers(
                preset, notes, options_of(layers, _LARGE_WIDTH), 14, workers, 12, extra
            )
        seconds, each = time.monotonic() - began, found.whole_bytes
        together = workers * each
        print(
            f"| {preset} | {found.training_bytes / 1e9:.2f} GB | {each / 1e9:.2f} GB "
            f"| {together / 1e9:.2f} GB = {together / (1 << 30):.1f} GiB | {seconds:.0f} "
            f"| {verdict(together / (1 << 30), _WANTED_BYTES >> 30, ' GiB')} |",
            flush=True,
        )


def options_of(layers: int, width: int = 384) -> dict[str, Any]:
    """Of the task."""
    architecture = {
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return {
        "context_bytes": _CONTEXT_BYTES,
        "batch_size": _BATCH_SIZE,
        "architecture": architecture,
    }


def parameter_bytes(layers: int, width: int = 384) -> int:
    """Of the model in fp32."""
    task = LlamaBytes(seed=0, **options_of(layers, width))
    with torch.device("meta"):
        return 4 * sum(parameter.numel() for parameter in task.model().parameters())


@dataclass(frozen=True)
class Found:
    """Of a swarm: peaks before the last batch and of the whole life, means over the workers."""

    training_bytes: float
    whole_bytes: float = 0.0


def peaks_of(preset: str, layers: int, steps: int, workers: int, inner_steps: int) -> Found:
    """Of one size."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.mkdir()
        if preset == "plain":
            process = multiprocessing.get_context("spawn").Process(
                target=train_plainly, args=(str(notes), layers, steps)
            )
            process.start()
            process.join()
            return Found(noted(notes))
        return train_workers(preset, notes, options_of(layers), steps, workers, inner_steps)


def noted(notes: Path) -> float:
    return mean(int(note.read_text()) for note in notes.iterdir())


def train_plainly(notes: str, layers: int, steps: int) -> None:
    """A process of its own: the same steps with nothing around them."""
    torch.set_num_threads(1)
    task = Measured(seed=0, notes=notes, last_step=steps, **options_of(layers))
    replica = InnerReplica(task, task.model(), InnerConfig(), Cursor(seed=0, stream="plain"), steps)
    for step in range(1, steps + 1):
        replica.inner_step(step, replica.backward(step))


def train_workers(
    preset: str,
    notes: Path,
    options: dict[str, Any],
    steps: int,
    workers: int,
    inner_steps: int,
    extra: Sequence[str] = (),
) -> Found:
    """Trains a swarm to its end."""
    architecture = options.pop("architecture")
    assert isinstance(architecture, dict)
    settings = settings_of(
        **{f"task__{key}": value for key, value in options.items()},
        task__name='"tests.lab.memory:Measured"',
        task__notes=f'"{notes}"',
        task__last_step=steps,
        task__architecture=f"{{{', '.join(f'{k}={v}' for k, v in architecture.items())}}}",
        run__steps=steps,
        checkpoint__every_s=3600,
    )
    if preset != "local":
        settings += settings_of(diloco__inner_steps=inner_steps)
    if preset in ("streaming", "onebit"):
        settings += settings_of(diloco__overlap_steps=1)
    out = notes.parent / "out"
    with running_swarm(workers, out, "--preset", preset, *settings, *extra) as swarm:
        swarm.programs |= dict.fromkeys(swarm.names, _SPAWNED)
        swarm.start_all()
        wholes = []
        for name, worker in swarm.workers.items():
            _, status, usage = os.wait4(worker.process.pid, 0)
            assert status == 0, f"{name} ended with {status}: {worker.errors}"
            wholes.append(1024 * usage.ru_maxrss)
    return Found(noted(notes), mean(wholes))


if __name__ == "__main__":
    main()
