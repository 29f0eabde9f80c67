"""Memory and seconds that real workers take for a round of a model that fills a machine.

    python -m tests.lab memory [--workers 2] [--layers 18] [--preset NAME ...]

They train half a billion parameters in bf16 with SGD; with `--layers 9` it is a quarter of a
billion. The peak of a process is that of its whole life: it comes with the last checkpoint. Writes
a Markdown table.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from murmuration.worker.tasks.llama import Llama
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from tests.support.workers import running_swarm, settings_of

PRESETS = ("diloco", "streaming", "onebit")
_WANTED_BYTES = 20 << 30  # of two processes
_CONTEXT_BYTES, _BATCH_SIZE = 32, 2  # activations of no size
_LAYERS, _WIDTH = 18, 1536
_FRAGMENTS = 9  # what is in flight is a fragment's
_STEPS, _INNER_STEPS = 14, 12
# A process of its own: one that is forked has its parent's peak.
_SPAWNED = ("runpy", "murmuration.worker.cli")


class Large(LlamaBytes):
    """The built-in task in bf16."""

    def model(self) -> Llama:
        return super().model().to(torch.bfloat16)

    def generate(self, *_: Any) -> str:
        return ""  # the text of a large model takes longer than its training


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
        "| preset | peak of each | together | seconds | asked for |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for preset in options.preset:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            whole = train_workers(preset, Path(folder), options.layers, options.workers)
        seconds, together = time.monotonic() - began, options.workers * whole
        kept = "kept" if together <= _WANTED_BYTES else "MISSED"
        print(
            f"| {preset} | {whole / 1e9:.2f} GB "
            f"| {together / 1e9:.2f} GB = {together / (1 << 30):.1f} GiB | {seconds:.0f} "
            f"| at most {_WANTED_BYTES >> 30} GiB: {kept} |",
            flush=True,
        )


def options_of(layers: int) -> dict[str, Any]:
    """The options of the task."""
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 8)
    sizes = {"hidden_size": _WIDTH, "intermediate_size": _WIDTH * 8 // 3}
    architecture = {**sizes, "num_hidden_layers": layers, **heads}
    batch = {"context_bytes": _CONTEXT_BYTES, "batch_size": _BATCH_SIZE}
    return {**batch, "architecture": architecture}


def parameters(layers: int) -> int:
    """How many the model has."""
    task = LlamaBytes(seed=0, **options_of(layers))
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in task.model().parameters())


def train_workers(preset: str, out: Path, layers: int, workers: int) -> float:
    """The peak of a swarm's workers, bytes, their mean."""
    options = options_of(layers)
    architecture = options.pop("architecture")
    settings = settings_of(
        **{f"task__{key}": value for key, value in options.items()},
        task__name='"tests.lab.memory:Large"',
        task__architecture=f"{{{', '.join(f'{k}={v}' for k, v in architecture.items())}}}",
        inner__optimizer='"sgd"',
        run__steps=_STEPS,
        checkpoint__every_s=3600,
        diloco__inner_steps=_INNER_STEPS,
        diloco__fragments=_FRAGMENTS if preset == "streaming" else 1,
    )
    if preset in ("streaming", "onebit"):
        settings += settings_of(diloco__overlap_steps=1)
    with running_swarm(workers, out, "--preset", preset, *settings) as swarm:
        swarm.programs |= dict.fromkeys(swarm.names, _SPAWNED)
        swarm.start_all()
        peaks = []
        for name, worker in swarm.workers.items():
            _, status, usage = os.wait4(worker.process.pid, 0)
            assert status == 0, f"{name} ended with {status}: {worker.errors}"
            peaks.append(1024 * usage.ru_maxrss)
    return mean(peaks)


if __name__ == "__main__":
    main()
