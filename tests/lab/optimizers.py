"""Muon beside AdamW inside: alone, in DDP and in DiLoCo, each with the best of its learning rates.

    python -m tests.lab optimizers [--steps 600] [--workers 4] [--seeds 3] [--lr 0.003 ...]

Trains the built-in task by `algorithms/reference.py`, several runs at once, a core each. Learning
rates are chosen on a seed of their own, which is not among those of the table. Prints Markdown:
the mean validation loss over the seeds, and the least and the greatest.
"""

import argparse
import itertools
import multiprocessing
import statistics
from dataclasses import dataclass

from tests.lab.one_process import Training, train

OPTIMIZERS = ("adamw", "muon")
PRESETS = ("local", "ddp", "diloco")
TUNING_SEED = 100


@dataclass(frozen=True)
class Run:
    """One run to train."""

    preset: str
    optimizer: str
    lr: float
    seed: int
    steps: int
    workers: int


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.001, 0.003, 0.01, 0.03])
    options = parser.parse_args()
    size = (options.steps, options.workers)
    pairs = list(itertools.product(PRESETS, OPTIMIZERS))
    with multiprocessing.get_context("spawn").Pool() as pool:
        tuning = [Run(*pair, lr, TUNING_SEED, *size) for pair in pairs for lr in options.lr]
        tuned = dict(zip(tuning, pool.map(final_loss, tuning, chunksize=1), strict=True))
        best = {
            pair: min(
                (r for r in tuning if (r.preset, r.optimizer) == pair), key=lambda r: tuned[r]
            )
            for pair in pairs
        }
        runs = [Run(*pair, best[pair].lr, s, *size) for pair in pairs for s in range(options.seeds)]
        losses = dict(zip(runs, pool.map(final_loss, runs, chunksize=1), strict=True))
    print(f"{options.workers} workers, {options.steps} steps, {options.seeds} seeds\n")
    for (preset, optimizer), run in best.items():
        tried = ", ".join(
            f"{r.lr:g}: {loss:.3f}"
            for r, loss in tuned.items()
            if (r.preset, r.optimizer) == (preset, optimizer)
        )
        print(f"{preset}, {optimizer}: lr {run.lr:g} (seed {TUNING_SEED}: {tried})")
    print("\n| preset | optimizer | lr | validation loss | least | greatest |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for (preset, optimizer), run in best.items():
        found = [
            loss for r, loss in losses.items() if (r.preset, r.optimizer) == (preset, optimizer)
        ]
        print(
            f"| `{preset}` | {optimizer} | {run.lr:g} | {statistics.fmean(found):.3f} | "
            f"{min(found):.3f} | {max(found):.3f} |"
        )


def final_loss(run: Run) -> float:
    """The validation loss of one run's anchor, nats per byte."""
    training = Training(
        preset=run.preset,
        settings=(f'inner.optimizer="{run.optimizer}"', f"inner.lr={run.lr}"),
        steps=run.steps,
        workers=run.workers,
        seed=run.seed,
    )
    trained = train(training)
    return trained.loss_of(trained.anchors())


if __name__ == "__main__":
    main()
