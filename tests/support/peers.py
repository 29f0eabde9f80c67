"""Peers of a case: functions of a test's module, each in a process forked from a warm one.

    def loop(peer: Peer) -> float:
        with murmuration.Swarm(model, optimizer, **peer.arguments) as swarm: ...

    def test_two_peers_agree(tmp_path: Path) -> None:
        first, second = run(tmp_path, loop, loop)
        assert first.value == second.value

The first function's peer starts the run, and the others join it there. A peer logs to its standard
error, as a program with `logging.basicConfig(level=INFO)`; its events are in `peer.out`.

    python -m tests.support.peers '{"case": "tests.integration.test_x:loop", "index": 0, ...}'
"""

import importlib
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.support.workers import WorkerProcess, free_addresses

F = TypeVar("F", bound=Callable[..., Any])

_PATIENCE_S = 60.0
# A machine that is busy with other tests may not answer for seconds: that is no death.
PATIENT = {"membership.suspicion_factor": 40.0}
_PROGRAM = ("tests.support.peers",)


@dataclass(frozen=True)
class Peer:
    """The peer that a function of a case is given: which one it is, and where they meet."""

    index: int
    count: int
    address: str
    folder: str

    @property
    def name(self) -> str:
        return f"p{self.index}"

    @property
    def out(self) -> Path:
        """For its events, and whatever else."""
        return Path(self.folder) / self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `Swarm`: the first listens and waits for all, the others join. A test of
        deaths has `settings` of its own."""
        common = {"name": self.name, "out": self.out, "settings": PATIENT}
        if self.index:
            return {**common, "join": self.address}
        return {**common, "listen": self.address, "min_peers": self.count}

    def tell(self, event: str, **values: object) -> None:
        """Says that the peer has come so far: a test waits for it. From any thread: a line is
        written as a whole."""
        os.write(1, f"{json.dumps({'event': event, **values})}\n".encode())


@dataclass(frozen=True)
class Row:
    """A line of the table in docs/library.md: a kind of program, what becomes of it, and how."""

    program: str
    happens: str
    how: str


def row(program: str, happens: str, how: str) -> Callable[[F], F]:
    """Marks the test that holds a line of the table in docs/library.md. Args: happens: "shared",
    "refused" or "told"."""
    if happens not in ("shared", "refused", "told"):
        raise ValueError(f"{happens!r}: a program is shared, refused or told")

    def mark(test: F) -> F:
        rows = [Row(program, happens, how), *getattr(test, "rows", ())]
        test.rows = rows  # type: ignore[attr-defined]
        return test

    return mark


@dataclass(frozen=True)
class Outcome:
    """How a peer has ended. Args: value: what its function returned; None where it raised; error:
    "UsageError: what it says", of what it raised; empty without; log: its standard error, warnings
    and logged lines; code: of its process; None: it did not end in time, and was killed."""

    value: Any
    error: str
    log: str
    code: int | None


class Peers:
    """The processes of a case. Args: folder: each peer has a folder of its own there; functions: of
    modules that can be imported, one for each peer; a `partial` of one has named arguments that
    JSON can hold."""

    def __init__(self, folder: Path, functions: tuple[Callable[[Peer], Any], ...]) -> None:
        self._folder, self._functions = folder, functions
        (self.address,) = free_addresses(1)
        self.running: dict[int, WorkerProcess] = {}

    def start(self, index: int, function: Callable[[Peer], Any] | None = None) -> WorkerProcess:
        """Starts a peer; it may be started again, with another function too."""
        if before := self.running.get(index):
            before.end()
        chosen, given = function or self._functions[index], dict[str, Any]()
        if isinstance(chosen, partial):
            chosen, given = chosen.func, chosen.keywords
        values = {
            "case": f"{chosen.__module__}:{chosen.__name__}",
            "given": given,
            "index": index,
            "count": len(self._functions),
            "address": self.address,
            "folder": str(self._folder),
        }
        self.running[index] = WorkerProcess([json.dumps(values)], f"p{index}", _PROGRAM)
        return self.running[index]

    def outcome(self, index: int) -> Outcome:
        """How a peer has ended, for which this waits."""
        process = self.running[index]
        code: int | None = None
        try:
            code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.process.kill()
            process.wait()
        ends = [e for e in process.events if e["event"] == "end"]
        end = ends[-1] if ends else {}
        # pytest shows it of a test that fails
        print(f"--- p{index}, code {code}\n{process.errors}")
        return Outcome(end.get("value"), end.get("error", ""), process.errors, code)


@contextmanager
def peers(folder: Path, *functions: Callable[[Peer], Any]) -> Iterator[Peers]:
    """Peers that a test starts, one by one."""
    found = Peers(folder, functions)
    try:
        yield found
    finally:
        for each in found.running.values():
            each.end()


def run(folder: Path, *functions: Callable[[Peer], Any]) -> list[Outcome]:
    """Starts all at once, and waits for all."""
    with peers(folder, *functions) as found:
        for index in range(len(functions)):
            found.start(index)
        return [found.outcome(index) for index in range(len(functions))]


def values(folder: Path, *functions: Callable[[Peer], Any]) -> list[Any]:
    """Returns what the functions return, of which none may raise."""
    outcomes = run(folder, *functions)
    assert [each.error for each in outcomes] == [""] * len(outcomes), outcomes
    return [each.value for each in outcomes]


def main() -> None:
    """Calls the function, and prints what it returns or raises."""
    given = json.loads(sys.argv[1])
    (module, _, name), more = given.pop("case").partition(":"), given.pop("given")
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("default")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    peer = Peer(**given)
    end: dict[str, Any] = {}
    try:
        end["value"] = getattr(importlib.import_module(module), name)(peer, **more)
    except Exception as error:
        logging.exception("the case ends")
        end["error"] = f"{type(error).__name__}: {error}"
    peer.tell("end", **end)
    sys.stderr.flush()
    os._exit(1 if "error" in end else 0)


if __name__ == "__main__":
    main()
