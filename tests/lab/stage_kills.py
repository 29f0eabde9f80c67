"""A replica of each stage is killed in turn, in the middle of a visit: iterations and microbatches.

    python -m tests.lab stage-kills [--stages 4] [--every 10] [--microbatches 4]

Two replicas of each stage train the default model; the second one of the last stage is killed
first, that of stage 0 last. Replicas exchange at the end only, so that an iteration waits for
visits and for nothing else. Fails if a microbatch or a visit is counted twice or is missing unsaid,
or if iterations take more than 1.5 times as long as before from the second after a kill on.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.stage_accounts import Accounts
from tests.support.stage_tasks import Held, held
from tests.support.workers import settings_of

SLOWER = 1.5
BEFORE, AFTER = 5, 3  # iterations whose median is taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--every", type=int, default=10, help="iterations from kill to kill")
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()
    stages, half = options.stages, options.microbatches  # of a replica's passes in an iteration
    calls = {
        f"w{2 * stages - 1 - n}": (2 * (n + 1) * options.every + 1) * half + n % half + 1
        for n in range(stages)
    }
    steps = (stages + 1) * options.every
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with held(Path(folder) / "held", calls) as those:
            run(out, those, steps, stages, options.microbatches)
        return told(Accounts(out, options.microbatches), list(calls), steps)


def run(out: Path, those: Held, steps: int, stages: int, microbatches: int) -> None:
    """Trains to the end, and kills workers as they come to their visits."""
    command = [sys.executable, "-m", "murmuration.worker.cli", "swarm", "--out", str(out)]
    command += ["--stages", str(stages), "--replicas", "2"]
    command += ["--steps", str(steps), "--inner-steps", str(steps)]
    command += settings_of(stages__rebuild="false", stages__microbatches=microbatches)
    command += settings_of(task__architecture=f"{{num_hidden_layers={stages}}}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *those.settings], stdout=sys.stderr, env=env) as process:
        for name in those.names():
            first = (out / name / "events.jsonl").read_text().splitlines()[0]
            os.kill(json.loads(first)["pid"], signal.SIGKILL)
    if process.returncode != 0:
        raise SystemExit(f"murmur swarm exited with {process.returncode}")


def told(accounts: Accounts, killed: list[str], steps: int) -> int:
    """Prints what has become of it; 1 where a claim fails."""
    print(
        "| killed | in iteration | before | with the kill | the next | two on | later "
        "| begun | counted | dropped | visits lost | twice | unexplained |\n"
        "| ---" + 12 * " | ---:" + " |"
    )
    took_s, good = accounts.durations_s("w0"), True
    for name in killed:
        amid = accounts.ended(name)[-1] + 1
        before_s = statistics.median(took_s[n] for n in range(amid - BEFORE, amid))
        later_s = statistics.median(took_s[amid + 2 + n] for n in range(AFTER))
        book = accounts.iteration(amid)
        good &= later_s <= SLOWER * before_s and accounts.affected(name)[:1] == [amid]
        print(
            f"| {name}, of stage {accounts.stages[name]} | {amid} | {before_s:.2f} s | "
            f"{took_s[amid]:.2f} s | {took_s[amid + 1]:.2f} s | {took_s[amid + 2]:.2f} s | "
            f"{later_s:.2f} s | {book.begun} | {book.counted} | {book.dropped} | {book.lost} | "
            f"{book.twice} | {book.unexplained} |"
        )
    books = [accounts.iteration(number) for number in range(1, steps + 1)]
    wrong = sum(book.twice + book.unexplained for book in books)
    print(
        f"\nin all {steps} iterations: {sum(b.begun for b in books)} microbatches begun, "
        f"{sum(b.counted for b in books)} counted, {sum(b.dropped for b in books)} dropped; "
        f"{sum(b.lost for b in books)} visits lost, {wrong} twice or unexplained"
    )
    return 0 if good and not wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
