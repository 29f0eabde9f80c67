"""One of eight workers lies in what it contributes: the final loss beside that of an honest run.

    python -m tests.lab one-hostile [--workers 8] [--steps 240] [--aggregation mean ...]

Real workers, the built-in task, DiLoCo. The hostile one is a member like the others
(tests/support/liar.py). Prints a Markdown table: the loss of the honest workers' model, how far
that is from a run in which all are honest, and after how many rounds the liar's part was left out.
One row has an honest run without the eighth worker: that is what is lost with it.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from murmuration.algorithms.robust import AGGREGATIONS
from tests.support.liar import LIES
from tests.support.workers import WorkerProcess, running_swarm, settings_of

_INNER_STEPS = 20
_PATIENCE_S = 900.0


@dataclass(frozen=True)
class Found:
    """Of a run. Args: quarantined_after: rounds; None for never."""

    loss: float
    quarantined_after: int | None


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--aggregation", nargs="+", choices=AGGREGATIONS, default=AGGREGATIONS)
    options = parser.parse_args()
    print(f"{options.workers} workers, {options.steps} steps, a round every {_INNER_STEPS}\n")
    print("| the eighth worker | aggregation | loss | against honest | left out after |")
    print("| --- | --- | ---: | ---: | --- |")
    honest = train(options.workers, options.steps, "mean")
    for name, aggregation, found in [
        ("honest", "mean", honest),
        ("not there", "mean", train(options.workers - 1, options.steps, "mean")),
    ]:
        print(row(name, aggregation, found, honest.loss), flush=True)
    for aggregation in options.aggregation:
        for lie in LIES:
            found = train(options.workers, options.steps, aggregation, lie)
            print(row(lie, aggregation, found, honest.loss), flush=True)


def row(name: str, aggregation: str, found: Found, honest: float) -> str:
    """A line of the table."""
    after = found.quarantined_after
    told = "-" if after is None else f"{after} rounds"
    change = 100 * (found.loss / honest - 1)
    return f"| {name} | `{aggregation}` | {found.loss:.3f} | {change:+.1f} % | {told} |"


def train(workers: int, steps: int, aggregation: str, lie: str | None = None) -> Found:
    """A run to its end; the last worker tells this lie, if any."""
    settings = settings_of(
        run__steps=steps,
        run__seed=3,
        diloco__inner_steps=_INNER_STEPS,
        rounds__aggregation=aggregation,
        membership__probe_timeout_s=10,  # eight processes on few cores are late, not dead
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        running_swarm(workers, Path(folder), "--preset", "diloco", *settings) as swarm,
    ):
        *honest, last = swarm.names
        if lie is not None:
            swarm.programs[last] = ("tests.support.liar", lie)
        swarm.start_all("--threads", "1")
        results = swarm.wait(*honest, patience_s=_PATIENCE_S)
        after = [rounds_until_left_out(swarm.workers[name]) for name in honest]
    told = [rounds for rounds in after if rounds is not None]
    return Found(results[honest[0]]["val_loss"], min(told, default=None))


def rounds_until_left_out(worker: WorkerProcess) -> int | None:
    """How many rounds this one had completed when it put another in quarantine."""
    rounds = 0
    for event in worker.events:
        rounds += event["event"] == "round"
        if event["event"] == "warning" and "is in quarantine" in event["text"]:
            return rounds
    return None


if __name__ == "__main__":
    main()
