"""A worker is killed again and again, and started each time by the command line that it began with.

    python -m tests.lab kill-loop [--minutes 5] [--every 20] [--workers 3]

Real processes on loopback. The last worker gets SIGKILL every so many seconds, as on a machine that
is taken away again and again. Prints a row for each kill: the step that it had come to, the one of
its checkpoint, the one that it trains on from once it has the others' state, and the seconds until
then. In the end all get SIGTERM. Fails if a worker ends otherwise than by these signals, or later
than five seconds after SIGTERM.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from murmuration.protos.addresses import ReservedPorts
from murmuration.protos.figures import optional

LEAVES_S = 5.0
SETTINGS = ("--preset", "diloco", "--model", "tiny", "--inner-steps", "20")


@dataclass
class Life:
    """The events of one process, from its start to a kill."""

    events: list[dict[str, Any]]

    def step(self, kind: str) -> int | None:
        """Of the first event of a kind."""
        return next((event["step"] for event in self.events if event["event"] == kind), None)

    @property
    def reached(self) -> int:
        return max((e.get("step", 0) for e in self.events if e["event"] == "progress"), default=0)

    @property
    def rounds_s(self) -> list[float]:
        """When rounds ended, from the start of the process."""
        return [event["time_s"] for event in self.events if event["event"] == "round"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds from kill to kill")
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ReservedPorts(options.workers) as ports:
        commands = [
            line(Path(folder) / f"w{index}", own, [each for each in ports.addresses if each != own])
            for index, own in enumerate(ports.addresses)
        ]
        processes = [start(command) for command in commands]
        try:
            codes = loop(commands[-1], processes, options.minutes * 60, options.every)
            left = [leave(process) for process in processes]
        finally:
            for process in processes:
                process.kill()
        killed, steady = (read(Path(folder) / f"w{n}") for n in (options.workers - 1, 0))
        return told(killed, codes, left, steady[0])


def line(out: Path, address: str, others: Sequence[str]) -> list[str]:
    joins = [word for other in others for word in ("--join", other)]
    where = ["--name", out.name, "--listen", address, "--min-peers", "2", "--threads", "1"]
    words = ["up", *SETTINGS, "--steps", "1000000", *where, *joins, "--out", str(out), "--json"]
    return [sys.executable, "-m", "murmuration.worker.cli", *words]


def start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def loop(
    command: Sequence[str],
    processes: "list[subprocess.Popen[bytes]]",
    for_s: float,
    every_s: float,
) -> list[int]:
    """Kills the last process, and starts it again. Returns the codes that it ended with."""
    codes, until_s = [], time.monotonic() + for_s
    while time.monotonic() < until_s:
        time.sleep(every_s)  # it lives so long
        processes[-1].kill()
        codes.append(processes[-1].wait())
        processes[-1] = start(command)
    time.sleep(every_s)  # the last one, too
    return codes


def leave(process: "subprocess.Popen[bytes]") -> tuple[int, float]:
    """The exit code, and the seconds from SIGTERM until then."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    return process.wait(60), time.monotonic() - began


def read(out: Path) -> list[Life]:
    """A worker's lives; a kill may have cut the last line of each."""
    lives = []
    for file in sorted(out.glob("events.jsonl*"), key=lambda file: file.stat().st_mtime):
        for text in file.read_text().splitlines():
            with suppress(ValueError):
                event = json.loads(text)
                if event["event"] == "listening":
                    lives.append(Life([]))
                lives[-1].events.append(event)
    return lives


def told(
    lives: Sequence[Life], codes: Sequence[int], left: Sequence[tuple[int, float]], steady: Life
) -> int:
    """Prints what has become of it; 1 where a claim fails."""
    print(
        "| kill | at step | of its checkpoint | of the others' state | first round after |\n"
        "| ---: | ---: | ---: | ---: | ---: |"
    )
    for number, (before, after) in enumerate(pairwise(lives), 1):
        shown = [before.reached, after.step("resumed"), after.step("adopted")]
        took = f"{after.rounds_s[0]:.1f} s" if after.rounds_s else None
        print(f"| {number} | {' | '.join(optional(each, str) for each in [*shown, took])} |")
    gaps_s = [after - before for before, after in pairwise(steady.rounds_s)]
    print(
        f"\n{len(codes)} kills, exit codes {sorted(set(codes))}. The first worker came to step "
        f"{steady.reached} in {len(steady.rounds_s)} rounds, the longest {max(gaps_s):.1f} s after "
        f"the one before, the median {statistics.median(gaps_s):.2f} s.\nAfter SIGTERM: "
        + ", ".join(f"exit {code} after {seconds:.1f} s" for code, seconds in left)
    )
    good = set(codes) == {-signal.SIGKILL}
    good &= all(code == 0 and seconds <= LEAVES_S for code, seconds in left)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
