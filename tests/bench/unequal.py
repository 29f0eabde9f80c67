"""One worker five times slower than the other three: what the swarm makes of it.

    python tests/bench/unequal.py [--steps 400] [--times 5]

The workers' steps take a pause, the slow one's a longer (tests/support/slow_task.py). `local` says
what each makes alone, beside the others on the same machine; tokens per second of a swarm are all
inner steps over the time from its first step to its last. Exits with 1 below 0.9 of the sum for
`streaming` and `noloco` with inner steps by speed.
"""

import argparse
from collections.abc import Sequence

from tests.support.swarm_runs import Report, run_swarm

TASK = "tests.support.slow_task:SlowBytes"
BY_SPEED = ("diloco.dylu=true", "diloco.weighting=work")
TARGET = 0.9
Run = tuple[str, tuple[str, ...], bool]  # preset, settings, with a slow worker
RUNS: dict[str, Run] = {
    "local": ("local", (), True),
    "diloco": ("diloco", (), True),
    "streaming": ("streaming", (), True),
    "streaming, by speed": ("streaming", BY_SPEED, True),
    "noloco, by speed": ("noloco", BY_SPEED, True),
    "streaming, all alike": ("streaming", (), False),
    "noloco, all alike": ("noloco", (), False),
}
MUST = ("streaming, by speed", "noloco, by speed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pause-s", type=float, default=0.05)
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--only", action="append", choices=RUNS, help="one of the runs")
    options = parser.parse_args()
    alone = 0.0
    enough = True
    print("| run | inner steps each | steps/s of all | of the sum alone | validation loss |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name in options.only or RUNS:
        preset, settings, slow = RUNS[name]
        task = [
            f"task.name={TASK}",
            f"task.pause_s={options.pause_s}",
            f"task.times={options.times}",
            f"task.slow={'w3' if slow else ''}",
        ]
        flags = [part for each in (*task, *settings) for part in ("--set", each)]
        report = run_swarm("--preset", preset, "--steps", str(options.steps), *flags)
        peers = report["peers"]
        rate = rate_of(report)
        if name == "local":
            rate = alone = sum(peer["steps"] / peer["wall_s"] for peer in peers)
        share = rate / alone if alone and slow else None
        enough &= name not in MUST or share is None or share >= TARGET
        print(
            f"| {name} | {steps_of(peers)} | {rate:.1f} | "
            f"{'-' if share is None else format(share, '.3f')} | {report['val_loss']:.4f} |",
            flush=True,
        )
    return 0 if enough else 1


def rate_of(report: Report) -> float:
    """Inner steps of all workers per second of the longest."""
    peers = report["peers"]
    steps: int = sum(peer["steps"] for peer in peers)
    return steps / max(float(peer["wall_s"]) for peer in peers)


def steps_of(peers: Sequence[Report]) -> str:
    return ", ".join(str(peer["steps"]) for peer in peers)


if __name__ == "__main__":
    raise SystemExit(main())
