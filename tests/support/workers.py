"""Real worker processes on real sockets, and what they say."""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from murmuration.coordinator.asking import ask
from murmuration.coordinator.processes import ReservedPorts
from tests.support.fork_server import MURMUR as FORKED, ForkedPopen, run

Event = dict[str, Any]
PATIENCE_S = 120.0

# One millisecond a step: protocol matters here, not the model.
SMALL = (
    "--set", "task.batch_size=2",
    "--set", "task.context_bytes=32",
    "--set",
    "task.architecture={hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
    "num_attention_heads=2, num_key_value_heads=2}",
)  # fmt: skip


@dataclass(frozen=True)
class Hashes:
    """The hashes of anchors and momenta that a worker ends with."""

    anchor: str
    momentum: str

    @classmethod
    def of(cls, result: Event) -> "Hashes":
        """The hashes in a worker's result, or its line in a swarm's report."""
        return cls(result["anchor_hash"], result["momentum_hash"])


MURMUR = ("murmuration.worker.cli",)


class WorkerProcess:
    """One `murmur` process; its JSON events are read as they come. `with` ends it. Args: program:
    what follows `python -m`, before the arguments; prefix: of a network namespace that it is to run
    in; python: an interpreter of other libraries, which is spawned and hears lines."""

    def __init__(
        self,
        args: Sequence[str],
        name: str,
        program: Sequence[str] = MURMUR,
        prefix: Sequence[str] = (),
        python: str = "",
    ) -> None:
        self.name = name
        self.events: list[Event] = []
        self._new: queue.Queue[Event | None] = queue.Queue()
        self.process = (subprocess.Popen if python else ForkedPopen)(
            [*prefix, python or sys.executable, "-m", *program, *args],
            stdin=subprocess.PIPE if python else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        readers = (self._read_events, self._read_errors)
        self._readers = [threading.Thread(target=each, daemon=True) for each in readers]
        self.errors = ""
        for reader in self._readers:
            reader.start()

    def wait_for(
        self, wanted: Callable[[Event], bool], what: str, patience_s: float = PATIENCE_S
    ) -> Event:
        """The next event that fits; fails when the process ends or falls silent."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                event = self._new.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.name}: no {what} in {patience_s:g} s") from None
            if event is None:
                raise AssertionError(f"{self.name} ended before {what}: {self.errors}")
            if wanted(event):
                return event

    def wait_for_all(self, what: str, *wanted: Callable[[Event], bool]) -> None:
        """Until there was an event of each kind, in whatever order."""
        left = set(wanted)

        def last(event: Event) -> bool:
            left.difference_update([each for each in left if each(event)])
            return not left

        self.wait_for(last, what)

    def wait_for_round(self, number: int) -> Event:
        """Waits until this worker has applied round `number` or a later one."""
        return self.wait_for(
            lambda e: e["event"] == "round" and e["round"] >= number, f"round {number}"
        )

    def tell(self, line: str) -> None:
        """Writes it to the standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code, after everything it said has been read."""
        code = self.process.wait(patience_s)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return code

    @property
    def result(self) -> Event:
        """The final result event."""
        return next(e for e in reversed(self.events) if e["event"] == "result")

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):  # killed while it was writing
                break
            if line.startswith("{"):  # libraries write what they like
                self.events.append(json.loads(line))
                self._new.put(self.events[-1])
        self._new.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()


class Swarm:
    """Some workers on loopback that know each other's addresses.

    `programs` are those of workers, by name, that are to run another than `murmur` itself."""

    def __init__(self, count: int, out: Path, settings: Sequence[str]) -> None:
        self.out, self.settings = out, settings
        self.programs: dict[str, Sequence[str]] = {}
        self.names = [f"w{index}" for index in range(count)]
        self.addresses = dict(zip(self.names, free_addresses(count), strict=True))
        self.workers: dict[str, WorkerProcess] = {}
        self.ended: list[WorkerProcess] = []

    def start(self, name: str, *extra: str) -> WorkerProcess:
        """Starts one worker, or starts it again."""
        if name in self.workers:
            self.ended.append(self.workers[name])
        others = [address for peer, address in self.addresses.items() if peer != name]
        joins = [part for address in others for part in ("--join", address)]
        words = ["up", "--name", name, "--listen", self.addresses[name], *joins, "--json"]
        words += ["--min-peers", str(len(self.names)), "--out", str(self.out / name)]
        program = self.programs.get(name, MURMUR)
        self.workers[name] = WorkerProcess([*words, *self.settings, *extra], name, program)
        return self.workers[name]

    def join(self, name: str, via: str, *extra: str) -> WorkerProcess:
        """Starts a newcomer, which is told one address: a worker's or a coordinator's."""
        where = ("--name", name, "--out", str(self.out / name), "--json")
        self.workers[name] = WorkerProcess(["join", via, *where, *extra], name)
        return self.workers[name]

    def start_all(self, *extra: str) -> None:
        for name in self.names:
            self.start(name, *extra)

    def wait(self, *names: str, patience_s: float = PATIENCE_S) -> dict[str, Event]:
        """Waits for these workers, all by default, to exit 0; their results."""
        results = {}
        for name in names or self.names:
            worker = self.workers[name]
            code = worker.wait(patience_s)
            assert code == 0, f"{name} exited with {code}: {worker.errors}"
            results[name] = worker.result
        return results

    def wait_until_all_train(self) -> None:
        """Until each worker knows that all train: any of them may lay out the next round."""
        for worker in self.workers.values():
            address = worker.of("listening")[0]["address"]
            looked(lambda at=address: self._not_training(at), lambda late: not late)

    def _not_training(self, address: str) -> Event:
        """The worker's knowledge of peers that do not train, as far as it goes."""
        members = {member["peer"]: member for member in ask(address)["members"]}
        seen = {
            name: (members[name]["health"], members[name]["phase"]) if name in members else None
            for name in self.workers
        }
        return {name: at for name, at in seen.items() if at != ("alive", "training")}

    def status(self, name: str) -> Event:
        """The answer to `murmur status --json` about one worker."""
        document: Event = json.loads(printed("status", self.addresses[name], "--json"))
        return document

    def end(self) -> None:
        for worker in (*self.workers.values(), *self.ended):
            worker.end()


def printed(*arguments: str, program: str = MURMUR[0]) -> str:
    """The output of a command that ends by itself."""
    done = run([sys.executable, "-m", program, *arguments], timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def swarm_ended(out: Path, *arguments: str, **given: Any) -> "subprocess.CompletedProcess[str]":
    """`murmur swarm`, whose workers are forked, to its end."""
    return run([*FORKED, "swarm", "--out", str(out), *arguments], timeout=PATIENCE_S, **given)


def report_of(out: Path) -> Event:
    """The report of a swarm, or of one of its peers, by its folder."""
    report: Event = json.loads((out / "report.json").read_text())
    return report


@contextmanager
def running_swarm(count: int, out: Path, *settings: str) -> Iterator[Swarm]:
    """A swarm whose processes are gone afterwards, whatever happens."""
    swarm = Swarm(count, out, settings)
    try:
        yield swarm
    finally:
        swarm.end()


def at_s(event: Event) -> float:
    """Seconds from 1970 to an event of a worker's."""
    return datetime.fromisoformat(event["at"]).timestamp()


T = TypeVar("T")


def looked(look: Callable[[], T], fits: Callable[[T], object]) -> T:
    """Looks until what is seen fits. Looks pause: what is looked at needs the cores too."""
    deadline = time.monotonic() + PATIENCE_S
    while not fits(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    return seen


_reserved: list[ReservedPorts] = []  # as long as this process lives


def free_addresses(count: int) -> list[str]:
    """Loopback addresses that nobody gets but those that are told to listen there."""
    _reserved.append(ReservedPorts(count))
    return _reserved[-1].addresses


def wait_until_listens(address: str) -> None:
    """Until a peer serves there: a joiner gives up after ten seconds, and this one may have to load
    its libraries first."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 100)]
    with grpc.insecure_channel(address, options=options) as channel:
        grpc.channel_ready_future(channel).result(PATIENCE_S)


def settings_of(**values: object) -> list[str]:
    """`run__steps=40` as `--set run.steps=40`."""
    pairs = (f"{key.replace('__', '.')}={value}" for key, value in values.items())
    return [part for pair in pairs for part in ("--set", pair)]


PACED = settings_of(task__name="tests.support.slow_task:SlowBytes", task__pause_s=0.05)
# For swarms that only have to be there: what else is tested needs the processors.
ENDLESS = [*SMALL, *PACED, *settings_of(run__steps=10_000_000)]
ENDLESS += settings_of(diloco__inner_steps=2, task__pause_s=0.1)

# A silent worker is suspected, and declared dead, within seconds.
QUICK = settings_of(membership__probe_timeout_s=0.5, membership__suspicion_factor=2)
