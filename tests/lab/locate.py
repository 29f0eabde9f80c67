"""Faults are made one after another, and it is told how long it takes until they are named.

    python -m tests.lab locate [--workers 4] [--mbps 20] [--undisturbed-minutes 10]
                                 [--patience 120] [--preset diloco] [--only KIND ...]

Real workers, each in a network namespace behind a link of its own (root, and `tc` of iproute2). The
last worker gets, in turn, a slow uplink, a slow downlink, a slow link to the first one, a slow
machine (it stands still three quarters of the time) and a slow disk (each fsync takes 3 s more).
Printed for each: the verdict of the second worker, whether it is the right one and the only one
that any worker has come to, the seconds until all have it, and until all have withdrawn it once the
fault is gone. Then nothing is done for
some minutes, and what is found all the same is counted. Exits with 1 if a verdict is wrong, does
not come within `--patience` seconds, or comes without a fault.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from murmuration.algorithms.link import Link
from murmuration.coordinator import Failure
from murmuration.coordinator.links.namespaces import NamespaceHost, Namespaces, NoNamespaces
from murmuration.coordinator.report.status import ask
from murmuration.protos.events import place_of, verdict_words
from tests.lab.polling import seconds_until
from tests.support.workers import settings_of

PORT = 7700
SLOW = 0.15  # of the usual rate
STOPPED, CYCLE_S = 0.75, 0.4
SIZES = "{hidden_size=96, intermediate_size=192, num_hidden_layers=2}"
FaultPlace = tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbps", type=float, default=20.0)
    parser.add_argument("--undisturbed-minutes", type=float, default=10.0)
    parser.add_argument("--patience", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--preset", default="diloco")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND")
    options = parser.parse_args()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Namespaces(options.workers, Link(rate_mbps=options.mbps)) as network,
            running(network.members, Path(folder), options) as swarm,
        ):
            return measured(swarm, options)
    except NoNamespaces as reason:
        raise SystemExit(f"locate: {reason}") from reason


class Faulty:
    """A swarm whose last worker is made slow. Args: folder: of all workers."""

    def __init__(
        self,
        members: Sequence[NamespaceHost],
        folder: Path,
        mbps: float,
        processes: "Sequence[subprocess.Popen[bytes]]",
    ) -> None:
        self._members, self._folder, self._mbps = members, folder, mbps
        self._processes = processes
        self.victim = f"w{len(members) - 1}"
        self._heal = threading.Event()

    def verdicts(self) -> list[dict[FaultPlace, dict[str, Any]]]:
        """What each worker finds now, but for the faulty one."""
        return [
            {place_of(verdict): verdict for verdict in self._status(member)["verdicts"]}
            for member in self._members[:-1]
        ]

    def found_by_all(self) -> list[dict[str, Any]]:
        """Everything that any worker has found, in the order of time."""
        lines = (
            line
            for log in sorted(self._folder.glob("w*/events.jsonl"))
            for line in log.read_text().splitlines()
            if '"located"' in line
        )
        events = [json.loads(line) for line in lines]
        found = [event for event in events if event["event"] == "located" and event["found"]]
        return sorted(found, key=lambda event: str(event["at"]))

    def rounds(self) -> int:
        """That the second worker has completed."""
        return int(self._status(self._members[1])["rounds"]["completed"])

    def _status(self, member: NamespaceHost) -> dict[str, Any]:
        try:
            return ask(f"{member.address}:{PORT}", 10.0)
        except Failure:  # it is not up yet, or busy
            return {"verdicts": [], "rounds": {"completed": 0}}

    @property
    def faults(self) -> dict[str, tuple[FaultPlace, Callable[[], Callable[[], None]]]]:
        """By kind: the right verdict, and what makes the fault; that returns what ends it."""
        return {
            "uplink": (("uplink", self.victim, ""), lambda: self._way(up=True)),
            "downlink": (("downlink", self.victim, ""), lambda: self._way(up=False)),
            "link": (("link", self.victim, "w0"), self._link),
            "machine": (("machine", self.victim, ""), self._machine),
            "disk": (("disk", self.victim, ""), self._disk),
        }

    def _way(self, *, up: bool) -> Callable[[], None]:
        """Args: up: at the worker's end of its link; else at the hub's."""
        member = self._members[-1]
        stem, _, port = member.name.rpartition("-")
        where = (member.name, "eth0") if up else (f"{stem}-hub", port)
        tbf(*where, self._mbps * SLOW)
        return lambda: tbf(*where, self._mbps)

    def _link(self) -> Callable[[], None]:
        """The victim's own link as before, and below it a slow class for what goes to the first."""
        name, whole, slow = self._members[-1].name, self._mbps, self._mbps * SLOW / 4
        tc(name, "qdisc replace dev eth0 root handle 1: htb default 10")
        tc(name, f"class add dev eth0 parent 1: classid 1:1 htb rate {whole}mbit quantum 3000")
        tc(name, f"class add dev eth0 parent 1:1 classid 1:10 htb rate {whole}mbit quantum 3000")
        tc(name, f"class add dev eth0 parent 1:1 classid 1:20 htb rate {slow}mbit quantum 3000")
        to = self._members[0].address
        tc(name, f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {to} flowid 1:20")
        return lambda: tbf(name, "eth0", whole)

    def _machine(self) -> Callable[[], None]:
        heal, process = threading.Event(), self._processes[-1]

        def stop_and_go() -> None:
            while not heal.is_set():
                process.send_signal(signal.SIGSTOP)
                time.sleep(STOPPED * CYCLE_S)  # the fault: a share of each cycle
                process.send_signal(signal.SIGCONT)
                time.sleep((1 - STOPPED) * CYCLE_S)

        thread = threading.Thread(target=stop_and_go)
        thread.start()

        def end() -> None:
            heal.set()
            thread.join()

        return end

    def _disk(self) -> Callable[[], None]:
        told = slow_fsync(self._folder, self.victim)
        told.write_text("3.0")
        return told.unlink


def measured(swarm: Faulty, options: argparse.Namespace) -> int:
    """Makes the faults, prints what is found; the exit code."""
    good = True
    seconds_until(lambda: swarm.rounds() >= 10, 300.0)
    print("| fault | verdict | right | found after | withdrawn after |")
    print("| --- | --- | --- | ---: | ---: |", flush=True)
    for kind, (place, make) in swarm.faults.items():
        if options.only and kind not in options.only:
            continue
        before = len(swarm.found_by_all())
        heal = make()
        try:
            found_s = seconds_until(
                lambda p=place: all(p in each for each in swarm.verdicts()), options.patience
            )
            words = [verdict_words(each) for each in swarm.verdicts()[1].values()]
        finally:
            heal()
        gone_s = seconds_until(lambda: not any(swarm.verdicts()), options.patience)
        named = {place_of(event["verdict"]) for event in swarm.found_by_all()[before:]}
        # Word of what has arrived goes by the slow link as well: then the way back is slow, too.
        wrong = named - {place, (place[0], place[2], place[1])}
        right = not wrong and found_s is not None and gone_s is not None
        good &= right
        others = ", ".join(" ".join(filter(None, each)) for each in sorted(wrong))
        told = "yes" if right else f"NO{f': also {others}' if others else ''}"
        times = [f"{s:.0f} s" if s is not None else "-" for s in (found_s, gone_s)]
        print(f"| {kind} | {'; '.join(words)} | {told} | {' | '.join(times)} |", flush=True)
    if options.undisturbed_minutes:
        before, rounds = len(swarm.found_by_all()), swarm.rounds()
        time.sleep(60 * options.undisturbed_minutes)  # nothing is to be found in this time
        false = swarm.found_by_all()[before:]
        print(
            f"\n{options.undisturbed_minutes:g} undisturbed minutes, "
            f"{swarm.rounds() - rounds} rounds: {len(false)} false verdicts of "
            f"{options.workers} workers"
        )
        for event in false:
            print(f"  {event['peer']}: {verdict_words(event['verdict'])}")
        good &= not false
    return 0 if good else 1


@contextmanager
def running(
    members: Sequence[NamespaceHost], folder: Path, options: argparse.Namespace
) -> Iterator[Faulty]:
    """The workers, until the end."""
    addresses = [f"{member.address}:{PORT}" for member in members]
    processes = []
    try:
        for index, member in enumerate(members):
            name = f"w{index}"
            joins = [
                word for each in addresses if each != addresses[index] for word in ("--join", each)
            ]
            command = [
                *member.prefix, sys.executable, "-m", "tests.support.slow_disk",
                str(slow_fsync(folder, name)), "up", "--name", name, "--listen", addresses[index],
                *joins, "--min-peers", str(len(members)), "--out", str(folder / name),
                "--insecure", "--json", "--preset", options.preset, "--threads", "1",
                *settings_of(
                    run__steps=1_000_000,
                    diloco__inner_steps=20,
                    checkpoint__every_s=2.0,
                    task__name="tests.support.slow_task:SlowBytes",
                    task__pause_s=0.05,
                ),
                "--set", f"task.architecture={SIZES}",
            ]  # fmt: skip
            quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
            processes.append(subprocess.Popen(command, **quiet))
        yield Faulty(members, folder, options.mbps, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def slow_fsync(folder: Path, name: str) -> Path:
    """The file that makes a worker's disk slow."""
    return folder / f"{name}-fsync"


def tbf(namespace: str, device: str, mbps: float) -> None:
    """Shapes what leaves there."""
    tc(namespace, f"qdisc replace dev {device} root tbf rate {mbps}mbit burst 16kb latency 100ms")


def tc(namespace: str, words: str) -> None:
    subprocess.run(["tc", "-n", namespace, *words.split()], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
