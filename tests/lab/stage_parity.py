"""Real workers that train a model in stages, against one process that trains it whole.

    python -m tests.lab stage-parity [--steps 10]

Four stages of one replica and of two, the replicas in sync (ddp), `full` and `random` routes,
activations in fp32, nothing clipped: each stage clips by its own norm, one process by that of all.
Prints how far the parameters are apart in the end, the largest relative difference of a tensor, and
beside it how far they have come from where they began. Exits with 1 above 1e-5.
"""

import argparse
import tempfile
from pathlib import Path

from murmuration.worker.config import task_of
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import Cursor
from murmuration.worker.training.export import anchored_model, find_checkpoint
from tests.support.swarm_runs import run_swarm
from tests.support.whole_training import distance, trained_whole

STAGES, MICROBATCHES = 4, 4
CASES = (("full", 1), ("full", 2), ("random", 2))
APART = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    print("| routing | replicas | apart | trained |")
    print("| --- | ---: | ---: | ---: |")
    good = True
    for routing, replicas in CASES:
        unreachable, trained = differences(routing, replicas, steps)
        good &= unreachable <= APART < trained
        print(f"| {routing} | {replicas} | {unreachable:.1e} | {trained:.1e} |", flush=True)
    return 0 if good else 1


def differences(routing: str, replicas: int, steps: int) -> tuple[float, float]:
    """Of the swarm's parameters to one process's, and of these to what they began with."""
    flags = ["--stages", str(STAGES), "--replicas", str(replicas), "--routing", routing]
    flags += ["--preset", "ddp", "--steps", str(steps)]
    for setting in (f"microbatches={MICROBATCHES}", 'activations="fp32"'):
        flags += ["--set", f"stages.{setting}"]
    flags += ["--set", "inner.clip=0"]
    with tempfile.TemporaryDirectory() as folder:
        report = run_swarm(*flags, out=Path(folder) / "run")
        saved = find_checkpoint(Path(folder) / "run")
    config = Manifest(saved.values["manifest"]).config(str(saved.path))
    task = task_of(config)
    origins = [
        Cursor(seed=config.run.seed, stream=peer["peer"])
        for peer in report["peers"]
        if peer["stage"] == 0
    ]
    whole = trained_whole(task, config.inner, origins, MICROBATCHES, steps)
    found = dict(anchored_model(saved, config, task).named_parameters())
    return distance(found, whole.last), distance(dict(task.model().named_parameters()), whole.last)


if __name__ == "__main__":
    raise SystemExit(main())
