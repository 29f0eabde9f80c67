"""A whole swarm on this machine: real processes, real sockets on loopback."""

import json
import selectors
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from murmuration.coordinator.asking import AskedSwarm, ask
from murmuration.coordinator.launch import Launch
from murmuration.coordinator.processes import Interrupts, ProxyProcess, ReservedPorts, WorkerProcess
from murmuration.coordinator.records import Record
from murmuration.coordinator.report import Report
from murmuration.coordinator.report_files import leave_results
from murmuration.coordinator.terminal import Screen, screen_for, summary_of_records
from murmuration.protos.addresses import served_at
from murmuration.protos.events import Event, new_event
from murmuration.protos.exit_codes import ExitCode, MurmurError, exit_words
from murmuration.worker.identity import certificates
from murmuration.worker.identity.authority import Authority
from murmuration.worker.views import PagePlace
from murmuration.worker.views.lines import SwarmLines, page_event, page_words
from murmuration.worker.views.summary import SwarmSummary

if TYPE_CHECKING:
    from rich.console import Console

SAVE_S = 15.0  # to save and end, after Ctrl-C
_POLL_S = 0.1


class Supervisor:
    """Runs the workers of a launch until every one has ended. One that fails before any has started
    to train ends the whole swarm, since the others wait for it; one that dies later does not. The
    first Ctrl-C asks every worker to save, the second, or 15 s, kills."""

    def __init__(self, launch: Launch, screen: Screen, interrupts: Interrupts) -> None:
        self._launch, self._screen, self._interrupts = launch, screen, interrupts
        self.records: dict[str, Record] = {}
        self.settings: dict[str, object] = {
            key: getattr(launch, key) for key in ("preset", "steps", "inner_steps", "seed")
        }
        self._running: list[WorkerProcess] = []
        self._lines = SwarmLines()
        self._stopping_s: float | None = None
        self._failure: MurmurError | None = None  # training never started

    def train(self) -> int:
        """Follows all processes until the end; returns the code. Raises MurmurError: none began."""
        launch, screen = self._launch, self._screen
        if not launch.insecure:
            _certify(launch)
        with ExitStack() as stack:
            addresses = stack.enter_context(ReservedPorts(launch.workers)).addresses
            proxy = None
            if launch.links:
                proxy = _start_proxy(launch, addresses, stack)
                self.settings["link"] = " ".join(launch.links)
                screen.note(f"links: {self.settings['link']} each way", time.monotonic())
            commands = launch.commands(addresses, proxy.proxies if proxy else {})
            cores = Launch.fair_cores(launch.workers, launch.threads)
            began_s, typed = time.monotonic(), launch.settings or launch.config or launch.text
            self.records |= {name: Record(name, heard_s=began_s) for name in commands}
            for (name, command), own in zip(commands.items(), cores, strict=True):
                worker = WorkerProcess(name, command, launch.out / f"{name}.log", own)
                self._running.append(worker)
                stack.callback(worker.close)
                if typed and len(self._running) == 1:  # what is wrong there, one finds for all
                    code = self._follow_all(lambda: self.records["w0"].heard_s > began_s)
                    if not self._running:
                        return code
            if (web := served_at("--web", launch.web)) is not None:  # this process trains nothing
                identity = None if launch.insecure else certificates.member_identity(launch.out)
                place = PagePlace(web, launch.out / launch.names[0])
                swarm = AskedSwarm(addresses[0], partial(ask, identity=identity))
                page = swarm.serve_page(place, encrypted=identity is not None)
                stack.callback(page.close)
                event = page_event(page.url, page.token_path)
                screen.note(page_words(event, terminal=sys.stdout.isatty()), time.monotonic())
            exit_code = self._follow_all()
            if proxy is not None:
                try:
                    self.settings["link_bytes"] = proxy.counters()
                except RuntimeError as error:
                    text = f"what has passed the links is not known: {error}"
                    screen.note(text, time.monotonic())
            return exit_code

    def summary(self) -> SwarmSummary:
        return summary_of_records(list(self.records.values()), time.monotonic())

    def _follow_all(self, until: Callable[[], bool] = lambda: False) -> int:
        while self._running and not until():
            with selectors.DefaultSelector() as selector:  # until there is output, or a moment
                for file in chain.from_iterable(process.files() for process in self._running):
                    selector.register(file, selectors.EVENT_READ)
                selector.select(_POLL_S)
            now = time.monotonic()
            for process in list(self._running):
                self._follow(process, now)
            if self._interrupts.first is not None:
                if self._stopping_s is None:
                    self._stopping_s = now
                    told = "stopping: workers save and end; once more ends them at once"
                    self._screen.note(told, now)
                    for process in self._running:
                        process.interrupt()
                if self._interrupts.insistent or now - self._stopping_s > SAVE_S:
                    for process in self._running:
                        process.kill()
            self._screen.update(self.summary, now)
        if self._failure is not None:
            raise self._failure
        if self._interrupts.first is not None:
            return 128 + self._interrupts.first
        reported = any(record.result is not None for record in self.records.values())
        return ExitCode.DONE if reported else ExitCode.FAILED

    def _follow(self, process: WorkerProcess, now: float) -> None:
        code = process.poll()  # before reading: what it wrote before the end is then all there
        for line in process.read():
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                self._handle({**event, "peer": process.name}, now)
            elif line.strip():
                process.log(line)
        if code is None:
            return
        self._running.remove(process)
        process.close()
        waiting = not any(record.started for record in self.records.values())
        said = process.last_words()
        if code != 0 and waiting and self._failure is None and self._stopping_s is None:
            if said and ExitCode.USAGE <= code <= ExitCode.CHECKPOINT:
                self._failure = MurmurError(said, code)
            else:
                told = f"{process.name} has ended before training started ({exit_words(code)})"
                where = f": {said}; see {process.log_path}" if said else ""
                self._failure = MurmurError(told + where, ExitCode.FAILED)
            for other in self._running:
                other.kill()
        text = said if code > 0 else ""
        self._handle(new_event("exit", peer=process.name, exit_code=code, text=text), now)

    def _handle(self, event: Event, now: float) -> None:
        self.records[str(event["peer"])].apply(event, now)
        if self._failure is None and (line := self._lines.line(event)):
            self._screen.note(line, now)


def run_swarm(
    launch: Launch, console: "Console", json_path: Path | None = None
) -> tuple[int, Report]:
    """Trains, shows progress, and leaves the report. Main thread only. Returns the exit code (0
    when a worker reported to the end, 130 after Ctrl-C, 1 when all died), and the report. Raises
    MurmurError: training never started; with the failed worker's line and exit code."""
    with Interrupts() as interrupts:  # to the end: more of them must not cost the report
        began_s = time.monotonic()
        made = [each for each in (launch.out, *launch.out.parents) if not each.exists()]
        try:  # another swarm may have made it a moment ago
            launch.out.mkdir(parents=True, exist_ok=not made)
        except OSError as error:
            told = f"--out {launch.out}: cannot be made: {error.strerror}; choose another folder"
            raise MurmurError(told, ExitCode.USAGE) from error
        screen = screen_for(console, began_s)
        supervisor = Supervisor(launch, screen, interrupts)
        records = supervisor.records
        try:
            exit_code = supervisor.train()
            if not any(record.started or record.result for record in records.values()):
                raise MurmurError("stopped before training started", exit_code)
        except MurmurError as failure:
            if made and failure.exit_code != ExitCode.FAILED:  # nothing in it is of worth
                shutil.rmtree(launch.out, ignore_errors=True)
                with suppress(OSError):  # another has put something beside it
                    for folder in made[1:]:
                        folder.rmdir()
            raise
        finally:
            screen.close(supervisor.summary())
        vars(console.file)["waits"] = True  # nobody is held up any more: the report comes whole
        report = leave_results(
            list(records.values()),
            launch.out,
            console,
            settings=supervisor.settings,
            elapsed_s=time.monotonic() - began_s,
            json_path=json_path,
        )
        return exit_code, report


def _certify(launch: Launch) -> None:
    """Leaves each worker a key and certificate, where it has none. Raises IdentityError."""
    try:
        authority = Authority.load(launch.out) or Authority.make(launch.out)
        for name in launch.names:
            held = None
            with suppress(certificates.IdentityError):
                held = certificates.Identity.load(launch.out / name)
            wanted = (authority.certificate, certificates.Role.PEER, name)
            if held is None or (held.authority, held.role, held.name) != wanted:
                authority.new_identity(certificates.Role.PEER, name).save(launch.out / name)
    except OSError as error:
        raise MurmurError(f"--out {launch.out}: {error}; choose another", ExitCode.USAGE) from error


def _start_proxy(launch: Launch, addresses: Sequence[str], stack: ExitStack) -> ProxyProcess:
    log_path = launch.out / "proxy.log"

    def remove_if_empty() -> None:
        with suppress(OSError):
            if log_path.stat().st_size == 0:
                log_path.unlink()

    stack.callback(remove_if_empty)
    links = launch.link_of().items()
    members = {name: (to, link) for to, (name, link) in zip(addresses, links, strict=True)}
    try:
        proxy = ProxyProcess(members, seed=launch.seed or 0, log_path=log_path)
        return stack.enter_context(proxy)
    except (RuntimeError, OSError) as error:
        raise MurmurError(f"--link: no shaping proxy: {error}", ExitCode.FAILED) from error
