"""Follows worker processes from their start to their end, whatever ends them."""

import json
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.launcher.processes import Interrupts, WorkerProcess
from coordinator.launcher.progress import Progress
from coordinator.rendezvous.records import Event, Record, exit_words
from coordinator.report.notes import Notes
from protos.exit_codes import ExitCode

SAVE_S = 15.0  # to save and end, after Ctrl-C
_POLL_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """How a swarm ended. `failure`: why training never started, in one line."""

    exit_code: int
    failure: str | None = None


class Supervisor:
    """Runs until every worker has ended.

    A worker that fails before any has started to train ends the whole swarm, since the others wait
    for it; one that dies later does not. The first Ctrl-C asks every worker to save, the second, or
    15 s, kills.

    Args:
        workers: running.
        records: one per worker, by name.
        helper: the coordinator, when there is one; its end is only noted.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        records: Mapping[str, Record],
        progress: Progress,
        interrupts: Interrupts,
        helper: WorkerProcess | None = None,
    ) -> None:
        self._running = list(workers)
        self._records, self._progress = records, progress
        self._interrupts, self._helper = interrupts, helper
        self._notes = Notes()
        self._stopping_s: float | None = None
        self._failure: Outcome | None = None

    def run(self) -> Outcome:
        while self._running:
            self._wait()
            now = time.monotonic()
            for process in list(self._running):
                self._follow(process, now)
            self._follow_helper(now)
            self._obey(now)
            self._progress.update(list(self._records.values()), now)
        return self._outcome()

    # --------------------------------------------------------------------------------- inside

    def _wait(self) -> None:
        """Until there is output, or a tenth of a second."""
        with selectors.DefaultSelector() as selector:
            for process in self._running:
                for file in process.files():
                    selector.register(file, selectors.EVENT_READ)
            selector.select(_POLL_S)

    def _follow(self, process: WorkerProcess, now: float) -> None:
        code = process.poll()  # before reading: what was said before the end is then all there
        for line in process.read():
            self._hear(process, line, now)
        if code is not None:
            self._running.remove(process)
            process.close()
            self._ended(process, code, now)

    def _hear(self, process: WorkerProcess, line: str, now: float) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            self._take({**event, "peer": process.name}, now)
        elif line.strip():
            process.note(line)

    def _take(self, event: Event, now: float) -> None:
        self._records[str(event["peer"])].apply(event, now)
        if self._failure is None and (line := self._notes.line(event)):
            self._progress.note(line, now)

    def _ended(self, process: WorkerProcess, code: int, now: float) -> None:
        waiting = not any(record.started for record in self._records.values())
        if code != 0 and waiting and self._failure is None and self._stopping_s is None:
            self._failure = _early_failure(process, code)
            for other in self._running:
                other.kill()
        text = _said(process) if code > 0 else ""
        self._take({"event": "exit", "peer": process.name, "exit_code": code, "text": text}, now)

    def _follow_helper(self, now: float) -> None:
        if self._helper is None:
            return
        code = self._helper.poll()
        for line in self._helper.read():
            self._helper.note(line)
        if code is not None:
            text = f"the coordinator has ended ({exit_words(code)}); training goes on without it"
            self._progress.note(text, now)
            self._helper = None

    def _obey(self, now: float) -> None:
        if self._interrupts.first is None:
            return
        if self._stopping_s is None:
            self._stopping_s = now
            self._progress.note("stopping: workers save and end; once more ends them at once", now)
            for process in self._running:
                process.interrupt()
        if self._interrupts.insistent or now - self._stopping_s > SAVE_S:
            for process in self._running:
                process.kill()

    def _outcome(self) -> Outcome:
        if self._failure is not None:
            return self._failure
        if self._interrupts.first is not None:
            return Outcome(128 + self._interrupts.first)
        reported = any(record.result is not None for record in self._records.values())
        return Outcome(ExitCode.DONE if reported else ExitCode.FAILED)


def _early_failure(process: WorkerProcess, code: int) -> Outcome:
    said = _said(process)
    if said and ExitCode.USAGE <= code <= ExitCode.CHECKPOINT:
        return Outcome(code, said)
    where = f": {said}; see {process.log_path}" if said else ""
    return Outcome(
        ExitCode.FAILED,
        f"{process.name} has ended before training started ({exit_words(code)}){where}",
    )


def _said(process: WorkerProcess) -> str:
    """What a failed worker said of it: its own line, else its last."""
    lines = [line for line in process.errors if line.strip()]
    own = [line.removeprefix("murmur: ") for line in lines if line.startswith("murmur: ")]
    return (own or lines or [""])[-1]
