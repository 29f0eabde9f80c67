"""Who waits while rounds are on their way: speed beside `local`, five runs each, median and worst.

    python -m tests.lab overlap [--runs 5] [--steps 200] [--link 20mbit --link 2mbit]
        [--preset streaming --preset onebit] [--overlap measured] [--only even] [--set KEY=VALUE]

Four workers of `murmur swarm` train the built-in model. A batch is one short sample and takes a
pause besides, so that steps take about 60 ms and workers that share cores hardly slow each other
down. In the slow swarms w3's pause is longer, so that its steps take twice as long, and inner steps
go by speed. The speed is all inner steps over the time from the first to the last, over that of the
same four workers alone. Even workers have equally many steps, so the time is that of the slowest,
alone too. With a slow one, alone is the sum of what each makes by itself. Computing is the share of
that time in inner steps, which noise changes least. It and the loss are medians.
Exits with 1 where a median is below 0.99. The default takes about 40 minutes of two idle cores.
Prints Markdown.
"""

import argparse
import statistics
from collections.abc import Sequence

from tests.support.swarm_runs import Report, run_swarm

TASK = "tests.support.slow_task:SlowBytes"
BY_SPEED = ("diloco.dylu=true", "diloco.weighting=work")
LITTLE = ("task.batch_size=1", "task.context_bytes=32")
TARGET = 0.99


def main() -> int:
    """Prints a row for each link, preset and swarm; 1 where one misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--link", dest="links", action="append")
    parser.add_argument("--preset", dest="presets", action="append")
    parser.add_argument("--overlap", dest="overlaps", action="append")
    parser.add_argument("--only", choices=("even", "slow"))
    parser.add_argument("--inner-steps", type=int, default=25)
    parser.add_argument("--pause-s", type=float, default=0.045)
    parser.add_argument("--times", type=float, default=2.4, help="as long is the slow one's pause")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    task = [f"task.name={TASK}", "task.architecture={}", *LITTLE]
    pauses = [f"task.pause_s={options.pause_s}", f"task.times={options.times}"]
    shared = [*task, *pauses, *options.settings]
    good = True
    print(
        f"{options.runs} runs of {options.steps} steps, H {options.inner_steps}\n\n"
        "| link | preset | overlap | swarm | median | worst | computing | longest tau | loss |\n"
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        flush=True,
    )
    for swarm in [options.only] if options.only else ["even", "slow"]:
        slow = swarm == "slow"
        uneven = [*shared, f"task.slow={'w3' if slow else ''}"]
        of_local = speed_of_each if slow else speed
        alone = [run("local", options.steps, uneven) for _ in range(options.runs)]
        local = statistics.median(of_local(report) for report in alone)
        print(f"| - | `local` | - | {swarm} | 1 | - | {computing(alone)} | - | - |", flush=True)
        for link in options.links or ["20mbit", "2mbit"]:
            for preset in options.presets or ["streaming", "onebit"]:
                for overlap in options.overlaps or ["measured"]:
                    settings = [
                        *uneven,
                        *(BY_SPEED if slow else ()),
                        f"diloco.inner_steps={options.inner_steps}",
                        f"diloco.overlap={overlap}",
                    ]
                    reports = [
                        run(preset, options.steps, settings, "--link", link)
                        for _ in range(options.runs)
                    ]
                    shares = [speed(report) / local for report in reports]
                    median = statistics.median(shares)
                    good &= median >= TARGET
                    tau = max(int(report["most_overlap_steps"]) for report in reports)
                    loss = statistics.median(float(report["val_loss"]) for report in reports)
                    print(
                        f"| {link} | `{preset}` | {overlap} | {swarm} | {median:.3f} "
                        f"| {min(shares):.3f} | {computing(reports)} | {tau or '-'} | {loss:.3f} |",
                        flush=True,
                    )
    print(f"\neach median at least {TARGET}: {'kept' if good else 'MISSED'}")
    return 0 if good else 1


def run(preset: str, steps: int, settings: Sequence[str], *words: str) -> Report:
    flags = [part for each in settings for part in ("--set", each)]
    return run_swarm("--preset", preset, "--steps", str(steps), *words, *flags)


def computing(reports: Sequence[Report]) -> str:
    """The share of the time from the first inner step to the last, the median."""
    share = statistics.median(float(report["compute_utilization"]) for report in reports)
    return f"{100 * share:.1f} %"


def speed(report: Report) -> float:
    """Inner steps of all a second, until the last worker's end."""
    peers = report["peers"]
    return sum(int(p["steps"]) for p in peers) / max(float(p["wall_s"]) for p in peers)


def speed_of_each(report: Report) -> float:
    """The sum of what each makes by itself."""
    return sum(float(p["steps"] / p["wall_s"]) for p in report["peers"])


if __name__ == "__main__":
    raise SystemExit(main())
