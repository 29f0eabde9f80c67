"""A whole swarm on this machine: real processes, real sockets on loopback."""

import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.errors import Failure
from coordinator.launcher.launch import Launch
from coordinator.launcher.processes import Interrupts, WorkerProcess
from coordinator.launcher.progress import Progress, progress_for
from coordinator.launcher.supervisor import Outcome, Supervisor
from coordinator.links.namespaces import NoNamespaces
from coordinator.links.network import Network, Place
from coordinator.rendezvous.records import Record
from coordinator.report.report import Report
from coordinator.report.results import leave_results
from protos.addresses import LOOPBACK_HOST, ReservedPorts
from protos.exit_codes import ExitCode

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
    told: dict[str, object] = {}
    progress = progress_for(console, began_s)
    try:
        outcome = _train(launch, records, told, progress, interrupts)
    except Failure as failure:
        if created and failure.exit_code != ExitCode.FAILED:
            _remove_if_bare(launch.out)
        raise
    finally:
        progress.close(list(records.values()), time.monotonic())
    if outcome.failure is not None:
        if created and outcome.exit_code != ExitCode.FAILED:
            _remove_if_bare(launch.out)
        raise Failure(outcome.failure, outcome.exit_code)
    if not any(record.started or record.result for record in records.values()):
        raise Failure("stopped before training started", outcome.exit_code)
    report = leave_results(
        list(records.values()),
        launch.out,
        console,
        settings=launch.asked() | told,
        elapsed_s=time.monotonic() - began_s,
        json_path=json_path,
    )
    return outcome.exit_code, report


def _train(
    launch: Launch,
    records: dict[str, Record],
    told: dict[str, object],
    progress: Progress,
    interrupts: Interrupts,
) -> Outcome:
    """Starts all processes and follows them; when it returns or raises, none is left."""
    with ExitStack() as stack:
        network = _enter_network(launch, stack, progress) if launch.links else None
        helper, address = (
            _start_coordinator(launch, stack, network) if launch.coordinator else (None, None)
        )
        if network is None:
            places = None
            addresses = stack.enter_context(ReservedPorts(launch.workers)).addresses
        else:
            places = _start_network(network, address)
            addresses = [place.address for place in places.values()]
            told |= {"link": " ".join(launch.links), "link_means": network.means}
        workers: list[WorkerProcess] = []
        cores = Launch.fair_cores(launch.workers, launch.threads)
        for (name, command), own in zip(
            launch.commands(addresses, address, places).items(), cores, strict=True
        ):
            records[name] = Record(name, heard_s=time.monotonic())
            workers.append(WorkerProcess(name, command, launch.out / f"{name}.log", own))
            stack.callback(workers[-1].close)
        outcome = Supervisor(workers, records, progress, interrupts, helper).run()
        if network is not None:
            told["link_bytes"] = _traffic(network, progress)
        return outcome


def _enter_network(launch: Launch, stack: ExitStack, progress: Progress) -> Network:
    """Raises Failure."""
    log_path = launch.out / "relay.log"
    stack.callback(_remove_if_empty, log_path)
    links, seed = launch.link_of(), launch.seed or 0
    try:
        network = stack.enter_context(
            Network(links, launch.link_means, seed=seed, log_path=log_path)
        )
    except NoNamespaces as reason:
        raise Failure(
            f"--link-means namespaces: {reason}; use --link-means relay", ExitCode.CONFIGURATION
        ) from reason
    line = f"links: {' '.join(launch.links)} each way, by {network.means}"
    line += f" (no namespaces: {network.fallback})" if network.fallback else ""
    progress.note(line, time.monotonic())
    return network


def _start_network(network: Network, coordinator: str | None) -> dict[str, Place]:
    """Raises Failure."""
    try:
        return network.start([coordinator] if coordinator else [])
    except (RuntimeError, OSError) as error:
        raise Failure(f"--link: no relay: {error}", ExitCode.FAILED) from error


def _traffic(network: Network, progress: Progress) -> dict[str, dict[str, int]] | None:
    """What has passed each worker's link, for the report."""
    try:
        return {name: asdict(counters) for name, counters in network.traffic().items()}
    except RuntimeError as error:
        progress.note(f"what has passed the links is not known: {error}", time.monotonic())
        return None


def _start_coordinator(
    launch: Launch, stack: ExitStack, network: Network | None
) -> tuple[WorkerProcess, str]:
    if network is None:
        address = stack.enter_context(ReservedPorts(1)).addresses[0]
    else:
        address = network.reserve()
    command = [*_COORDINATOR_PROGRAM, "--listen", address, "--out", str(launch.out / "coordinator")]
    if network is not None and network.host != LOOPBACK_HOST:
        command.append("--insecure")
    process = WorkerProcess("coordinator", command, launch.out / "coordinator.log")
    stack.callback(process.close)
    stack.callback(process.interrupt_and_wait, _COORDINATOR_END_S)
    return process, address


def _remove_if_empty(log_path: Path) -> None:
    with suppress(OSError):
        if log_path.stat().st_size == 0:
            log_path.unlink()


def _make_folder(folder: Path) -> bool:
    """Whether it was not there before. Raises Failure."""
    created = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(
            f"--out {folder}: cannot be made: {error.strerror}; choose another folder",
            ExitCode.USAGE,
        ) from error
    return created


def _remove_if_bare(folder: Path) -> None:
    """Takes away a folder that a failed start has made, unless something of worth is in it."""
    for log in folder.glob("*.log"):
        log.unlink(missing_ok=True)
    for part in (*folder.glob("*/"), folder):
        with suppress(OSError):
            part.rmdir()
