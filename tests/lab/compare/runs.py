"""One run to its end: `murmur swarm`, or a baseline in a process of its own."""

import json
import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from murmuration.algorithms.link import Link
from murmuration.coordinator import Failure
from murmuration.coordinator.launch import Launch
from murmuration.coordinator.processes import Interrupts, WorkerProcess
from murmuration.protos.exit_codes import ExitCode
from tests.lab.compare.options import TORCH_DDP, Bench
from tests.lab.compare.placed import PLACES
from tests.support.namespaces import Namespaces, why_not


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Args:
    report: None where there is none to be trusted.
    problem: why, in one line.
    exit_code: 128 + the signal that stopped it; else one of `murmuration.protos.exit_codes`.
    """

    report: Mapping[str, Any] | None = None
    problem: str | None = None
    exit_code: int = 0

    @property
    def interrupted(self) -> bool:
        return self.exit_code > 128


_LOG = "swarm.log"
_PORT = 7700  # the same for each, since each has an address of its own
_WIDTH = 160
_INTERRUPTED = "interrupted"


def train_ours(launch: Launch, means: str = "relay") -> Ended:
    """Trains to the end, or to a signal. Main thread only; never raises Failure.

    Args: means: namespaces, the relay, or (`auto`) namespaces where they do.
    """
    from rich.console import Console

    from murmuration.coordinator.supervisor import run_swarm

    links = list(launch.link_of().values())
    rates_only = not any(link and (link.delay_s or link.loss) for link in links)
    if means == "namespaces" or (means == "auto" and rates_only and _no_namespaces() is None):
        with Namespaces(len(links), links) as network:
            placed = {
                name: [f"{member.address}:{_PORT}", *member.prefix]
                for name, member in zip(launch.names, network.members, strict=True)
            }
            os.environ[PLACES] = json.dumps(placed)
            program = (sys.executable, "-m", "tests.lab.compare.placed", *launch.program)
            ended = train_ours(replace(launch, links=(), program=program))
            if ended.report is None:
                return ended
            counted = zip(launch.names, network.counters(), strict=True)
            told = {
                "link": " ".join(launch.links),
                "link_means": "namespaces",
                "link_bytes": {name: asdict(counters) for name, counters in counted},
            }
            return replace(ended, report={**ended.report, **told})
    try:
        launch.out.mkdir(parents=True)
        with (launch.out / _LOG).open("w", encoding="utf-8") as log:
            code, report = run_swarm(launch, Console(file=log, width=_WIDTH, highlight=False))
    except Failure as failure:
        words = _INTERRUPTED if failure.exit_code > 128 else failure.message
        return Ended(problem=words, exit_code=failure.exit_code)
    except OSError as error:
        return Ended(problem=f"{launch.out}: {error.strerror}", exit_code=ExitCode.FAILED)
    if code == ExitCode.DONE:
        return Ended(report={**report, "link_means": "relay" if launch.links else None})
    problem = _INTERRUPTED if code > 128 else f"no worker came to the end; see {launch.out}"
    return Ended(problem=problem, exit_code=code)


_SCRIPT = Path("tests/lab/bench_peers.py")
_PYTHON = Path(".venv-peers/bin/python")
_MODULE = "tests.lab.peers.run"
_POLL_S = 0.1
_END_S = 15.0
_START_S = 240.0
_MOST_WORDS = 160


def in_checkout(root: Path) -> bool:
    """Whether there is anything that could run other systems."""
    return (root / _SCRIPT).is_file()


def why_skipped(name: str, bench: Bench, link: Link, steps: int) -> str | None:
    """Why a system cannot be compared with on this link; None when it can.

    Args:
        steps: whole rounds of them.
    """
    installed = name == TORCH_DDP or (bench.root / _PYTHON).exists()
    if not in_checkout(bench.root) or not installed:
        return "not installed (make .venv-peers/.ready)"
    if setting := bench.unshared_setting():
        return f"skipped: it trains the built-in defaults, not {setting}"
    if link.delay_s or link.jitter_s or link.loss:
        return "skipped: its links have a rate and nothing else"
    if steps == 0:
        return f"skipped: {bench.steps} steps are less than a round"
    if bench.link_means == "relay":
        return "skipped: it needs network namespaces, not the relay"
    problem = _no_namespaces()
    return f"skipped: no network namespaces: {problem}" if problem else None


def train_baseline(
    kind: str, bench: Bench, link: Link, folder: Path, steps: int, inner: int
) -> Ended:
    """Runs one system to the end, to a signal, or until it takes much longer than it should.

    Main thread only; never raises OSError.
    """
    path = folder / "report.json"
    numbers = {
        "--workers": bench.workers,
        "--steps": steps,
        "--inner-steps": inner,
        "--seed": bench.seed,
        "--mbps": link.rate_mbps,
    }
    command = [sys.executable, "-m", _MODULE, kind]
    command += [word for flag, number in numbers.items() for word in (flag, f"{number:g}")]
    command += ["--logs", str(folder / "logs"), "--json", str(path)]
    try:
        folder.mkdir(parents=True)
        process = WorkerProcess(kind, command, folder / "run.log")
    except OSError as error:
        return Ended(problem=f"{folder}: {error.strerror}", exit_code=ExitCode.FAILED)
    most_s = _START_S + 3 * bench.limit_s
    try:
        code, signal_number = _follow(process, most_s)
    finally:
        process.close()
    if signal_number is not None:
        return Ended(problem="interrupted", exit_code=128 + signal_number)
    if code is None:
        return Ended(problem=f"failed: took more than {most_s:.0f} s", exit_code=ExitCode.FAILED)
    if code != 0:
        words = reason(list(process.errors)) or f"exit code {code}"
        return Ended(problem=f"failed: {words}", exit_code=ExitCode.FAILED)
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return Ended(problem=f"failed: no report: {error}", exit_code=ExitCode.FAILED)
    return Ended(report=report)


def reason(lines: Sequence[str]) -> str:
    """One line of what a process wrote to stderr: what it says itself, and a child's last words.

    The script's own lines begin at the margin, those of its children's logs are indented.
    """
    said = [line for line in lines if line.strip()]
    if not said:
        return ""
    own = next((line.strip() for line in reversed(said) if not line[0].isspace()), "")
    last = said[-1].strip()
    words = own if last == own or not own else f"{own}: {last}"
    return words if len(words) <= _MOST_WORDS else words[: _MOST_WORDS - 1] + "…"


def _follow(process: WorkerProcess, most_s: float) -> tuple[int | None, int | None]:
    """(exit code, signal that stopped it); no exit code when the time was over.

    Ctrl-C is passed on once: the script then ends its processes and links before itself.
    """
    deadline_s = time.monotonic() + most_s
    with Interrupts() as interrupts:
        while True:
            code = process.poll()  # before reading: what was said before the end is then all there
            for line in process.read():
                process.note(line)
            if code is not None:
                return code, interrupts.first
            if interrupts.first is not None or time.monotonic() > deadline_s:
                process.interrupt()
                _wait_for_end(process)
                return None, interrupts.first
            select.select(process.files(), (), (), _POLL_S)  # until there is output


def _wait_for_end(process: WorkerProcess) -> None:
    """Gives it some time to end by itself; what it says meanwhile goes to the log."""
    deadline_s = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < deadline_s:
        for line in process.read():
            process.note(line)
        select.select(process.files(), (), (), _POLL_S)


@cache
def _no_namespaces() -> str | None:
    return why_not()
