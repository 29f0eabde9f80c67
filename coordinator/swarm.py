"""A whole swarm on this machine: real processes, real sockets on loopback."""

import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.addresses import ReservedPorts
from coordinator.errors import Exit, Failure
from coordinator.interrupts import Interrupts
from coordinator.launch import Launch
from coordinator.processes import WorkerProcess
from coordinator.progress import Progress, progress_for
from coordinator.records import Record
from coordinator.report import Report
from coordinator.results import leave_results
from coordinator.supervisor import Outcome, Supervisor

if TYPE_CHECKING:
    from rich.console import Console

_COORDINATOR_PROGRAM = (sys.executable, "-m", "coordinator")
_COORDINATOR_END_S = 5.0


def run_swarm(
    launch: Launch, console: "Console", json_path: Path | None = None
) -> tuple[int, Report]:
    """Trains, shows progress, and leaves the report. Main thread only.

    Returns:
        The exit code (0 when a worker reported to the end, 130 after Ctrl-C, 1 when all died), and
        the report.

    Raises:
        Failure: training never started; with the failed worker's line and exit code.
    """
    with Interrupts() as interrupts:  # to the end: more of them must not cost the report
        return _run(launch, console, json_path, interrupts)


def _run(
    launch: Launch, console: "Console", json_path: Path | None, interrupts: Interrupts
) -> tuple[int, Report]:
    began_s = time.monotonic()
    created = _make_folder(launch.out)
    records: dict[str, Record] = {}
    progress = progress_for(console, began_s)
    try:
        outcome = _train(launch, records, progress, interrupts)
    finally:
        progress.close(list(records.values()), time.monotonic())
    if outcome.failure is not None:
        if created and outcome.exit_code != Exit.FAILED:
            _remove_if_bare(launch.out)
        raise Failure(outcome.failure, outcome.exit_code)
    if not any(record.started or record.result for record in records.values()):
        raise Failure("stopped before training started", outcome.exit_code)
    report = leave_results(
        list(records.values()),
        launch.out,
        console,
        settings=launch.asked(),
        elapsed_s=time.monotonic() - began_s,
        json_path=json_path,
    )
    return outcome.exit_code, report


def _train(
    launch: Launch, records: dict[str, Record], progress: Progress, interrupts: Interrupts
) -> Outcome:
    """Starts all processes and follows them; when it returns or raises, none is left."""
    with ExitStack() as stack:
        helper, address = _start_coordinator(launch, stack) if launch.coordinator else (None, None)
        ports = stack.enter_context(ReservedPorts(launch.workers))
        workers: list[WorkerProcess] = []
        for name, command in launch.commands(ports.addresses, address).items():
            records[name] = Record(name, heard_s=time.monotonic())
            workers.append(WorkerProcess(name, command, launch.out / f"{name}.log"))
            stack.callback(workers[-1].close)
        return Supervisor(workers, records, progress, interrupts, helper).run()


def _start_coordinator(launch: Launch, stack: ExitStack) -> tuple[WorkerProcess, str]:
    address = stack.enter_context(ReservedPorts(1)).addresses[0]
    command = [*_COORDINATOR_PROGRAM, "--listen", address, "--out", str(launch.out / "coordinator")]
    process = WorkerProcess("coordinator", command, launch.out / "coordinator.log")
    stack.callback(process.close)
    stack.callback(process.interrupt_and_wait, _COORDINATOR_END_S)
    return process, address


def _make_folder(folder: Path) -> bool:
    """Whether it was not there before. Raises Failure."""
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(
            f"--out {folder}: cannot be made: {error.strerror}; choose another folder", Exit.USAGE
        ) from error
    return created


def _remove_if_bare(folder: Path) -> None:
    """Takes away a folder that a failed start has made, unless something of worth is in it."""
    for log in folder.glob("*.log"):
        log.unlink(missing_ok=True)
    for part in (*folder.glob("*/"), folder):
        with suppress(OSError):
            part.rmdir()
