"""One worker five times slower than the other three: what the swarm makes of it.

    python -m tests.lab unequal [--steps 800] [--times 5] [--only NAME ...]

The workers' steps take a pause, the slow one's a longer (tests/support/slow_task.py). `local` says
what each makes alone, beside the others on the same machine; steps per second of a swarm are all
inner steps over the time from its first step to its last. The even swarms, in which nobody is
slow, take as many inner steps in all as the uneven one took that they are compared with: their
losses are at equal tokens. Where only the rate is wanted, a quarter of the steps is taken. Exits
with 1 below 0.9 of the sum for `streaming` and `noloco` with inner steps by speed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.swarm_runs import Report, run_swarm

TASK = "tests.support.slow_task:SlowBytes"
BY_SPEED = ("diloco.dylu=true", "diloco.weighting=work")
TARGET = 0.9
BATCH_TOKENS = 4 * 64  # of SlowBytes


@dataclass(frozen=True)
class Case:
    """Args:
    needs: the case whose figures it is held against, of an even swarm that of its uneven one.
    part: of --steps.
    must: whether it has to reach the target.
    """

    preset: str
    settings: tuple[str, ...] = ()
    slow: bool = True
    needs: str = ""
    part: float = 1.0
    must: bool = False


CASES = {
    "local": Case("local", part=0.25),
    "streaming": Case("streaming", needs="local", part=0.25),
    "streaming, by speed": Case("streaming", BY_SPEED, needs="local", must=True),
    "noloco, by speed": Case("noloco", BY_SPEED, needs="local", must=True),
    "streaming, even": Case("streaming", slow=False, needs="streaming, by speed"),
    "noloco, even": Case("noloco", slow=False, needs="noloco, by speed"),
}


@dataclass(frozen=True)
class Run:
    """What has come of a case: inner steps of each worker, of all per second, and the loss."""

    steps: Sequence[int]
    rate: float
    val_loss: float

    @property
    def tokens(self) -> int:
        return sum(self.steps) * BATCH_TOKENS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--pause-s", type=float, default=0.05)
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--only", action="append", choices=CASES, help="and what it needs")
    options = parser.parse_args()
    task = [f"task.name={TASK}", f"task.pause_s={options.pause_s}", f"task.times={options.times}"]
    runs: dict[str, Run] = {}
    print(
        "| run | inner steps each | in all | tokens | steps/s of all | of the sum alone "
        "| validation loss | the uneven swarm's above it |\n| --- | --- |" + 6 * " ---: |",
        flush=True,
    )
    for name in wanted(options.only or list(CASES)):
        case = CASES[name]
        steps = round(case.part * options.steps)
        if not case.slow:
            steps = round(sum(runs[case.needs].steps) / 4)
        settings = [*task, f"task.slow={'w3' if case.slow else ''}", *case.settings]
        flags = [part for each in settings for part in ("--set", each)]
        report = run_swarm("--preset", case.preset, "--steps", str(steps), *flags)
        runs[name] = run_of(report, alone=name == "local")
        print(row(name, runs), flush=True)
    missed = [n for n, r in runs.items() if CASES[n].must and share(r, runs) < TARGET]
    for name in missed:
        print(f"{name}: {share(runs[name], runs):.3f} of the sum alone; wanted: {TARGET}")
    return 1 if missed else 0


def wanted(names: Sequence[str]) -> list[str]:
    """These cases and those that they are held against, in their order."""
    closed = set(names)
    for name in reversed(CASES):
        if name in closed and CASES[name].needs:
            closed.add(CASES[name].needs)
    return [name for name in CASES if name in closed]


def run_of(report: Report, *, alone: bool) -> Run:
    """Its rate is that of the whole swarm until its last worker's end, or the sum of each alone."""
    peers = report["peers"]
    steps = [int(peer["steps"]) for peer in peers]
    if alone:
        rate = sum(float(peer["steps"] / peer["wall_s"]) for peer in peers)
    else:
        rate = sum(steps) / max(float(peer["wall_s"]) for peer in peers)
    return Run(steps, rate, float(report["val_loss"]))


def share(run: Run, runs: dict[str, Run]) -> float:
    return run.rate / runs["local"].rate


def row(name: str, runs: dict[str, Run]) -> str:
    """Losses only where others of as many tokens stand beside them."""
    case, run = CASES[name], runs[name]
    beside = [runs[case.needs]] if not case.slow else []
    compared = case.must or bool(beside)
    cells = [
        name,
        ", ".join(map(str, run.steps)),
        str(sum(run.steps)),
        str(run.tokens),
        f"{run.rate:.1f}",
        f"{share(run, runs):.3f}" if case.slow else "-",
        f"{run.val_loss:.3f}" if compared else "-",
        f"{100 * (beside[0].val_loss / run.val_loss - 1):+.1f} %" if beside else "-",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
