"""Memory and seconds that real workers take for a round of a model that fills a machine.

    python -m tests.lab memory [--workers 2] [--layers 18] [--preset NAME ...]

They train half a billion parameters in bf16 with SGD; with `--layers 9` it is a quarter of a
billion. The peak of a process (VmHWM) is read before the last batch, so without the checkpoint that
follows, and once more when it has ended. Writes a Markdown table.
"""

import argparse
import os
import re
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from murmuration.worker.tasks.llama import Llama
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.task import Batch
from tests.support.workers import running_swarm, settings_of

PRESETS = ("diloco", "streaming", "onebit")
_WANTED_BYTES = 20 << 30  # of two processes
_CONTEXT_BYTES, _BATCH_SIZE = 32, 2  # activations of no size
_LAYERS, _WIDTH = 18, 1536
_FRAGMENTS = 9  # what is in flight is a fragment's
_STEPS, _INNER_STEPS = 14, 12
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
    """Prints a row for each preset."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--preset", nargs="*", choices=PRESETS, default=PRESETS)
    parser.add_argument("--layers", type=int, default=_LAYERS, help="of the model")
    options = parser.parse_args()
    count = parameters(options.layers)
    print(
        f"{options.workers} workers, {count / 1e6:.0f} million parameters in bf16, SGD\n\n"
        "| preset | peak of each in training | in its whole life | together | seconds "
        "| asked for |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for preset in options.preset:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "notes"
            notes.mkdir()
            training, whole = train_workers(preset, notes, options.layers, options.workers)
        seconds, together = time.monotonic() - began, options.workers * whole
        kept = "kept" if together <= _WANTED_BYTES else "MISSED"
        print(
            f"| {preset} | {training / 1e9:.2f} GB | {whole / 1e9:.2f} GB "
            f"| {together / 1e9:.2f} GB = {together / (1 << 30):.1f} GiB | {seconds:.0f} "
            f"| at most {_WANTED_BYTES >> 30} GiB: {kept} |",
            flush=True,
        )


def options_of(layers: int) -> dict[str, Any]:
    """Of the task."""
    architecture = {
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return {
        "context_bytes": _CONTEXT_BYTES,
        "batch_size": _BATCH_SIZE,
        "architecture": architecture,
    }


def parameters(layers: int) -> int:
    """How many the model has."""
    task = LlamaBytes(seed=0, **options_of(layers))
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in task.model().parameters())


def train_workers(preset: str, notes: Path, layers: int, workers: int) -> tuple[float, float]:
    """Peaks of a swarm before the last batch and of the whole life, bytes, means over workers."""
    options = options_of(layers)
    architecture = options.pop("architecture")
    settings = settings_of(
        **{f"task__{key}": value for key, value in options.items()},
        task__name='"tests.lab.memory:Measured"',
        task__notes=f'"{notes}"',
        task__last_step=_STEPS,
        task__architecture=f"{{{', '.join(f'{k}={v}' for k, v in architecture.items())}}}",
        task__dtype='"bfloat16"',
        inner__optimizer='"sgd"',
        run__steps=_STEPS,
        checkpoint__every_s=3600,
        diloco__inner_steps=_INNER_STEPS,
        diloco__fragments=_FRAGMENTS if preset == "streaming" else 1,
    )
    if preset in ("streaming", "onebit"):
        settings += settings_of(diloco__overlap_steps=1)
    out = notes.parent / "out"
    with running_swarm(workers, out, "--preset", preset, *settings) as swarm:
        swarm.programs |= dict.fromkeys(swarm.names, _SPAWNED)
        swarm.start_all()
        wholes = []
        for name, worker in swarm.workers.items():
            _, status, usage = os.wait4(worker.process.pid, 0)
            assert status == 0, f"{name} ended with {status}: {worker.errors}"
            wholes.append(1024 * usage.ru_maxrss)
    return mean(int(note.read_text()) for note in notes.iterdir()), mean(wholes)


if __name__ == "__main__":
    main()
