"""A worker's folder: one worker at a time writes there, and each event it tells of."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from worker.errors import ConfigError, MurmurError
from worker.tasks import TaskError
from worker.transport import TransportError

_LOCK, _EVENTS = ".lock", "events.jsonl"

Announce = Callable[[dict[str, object]], None]


class EventLog:
    """`events.jsonl`, always; and on to the terminal or a supervisor. any thread.

    Args:
        announce: takes each event.
        enrich: completes each event first.
    """

    def __init__(self, out: Path, announce: Announce, enrich: Announce) -> None:
        self._announce, self._enrich = announce, enrich
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        out.mkdir(parents=True, exist_ok=True)
        self._file = (out / _EVENTS).open("a", buffering=1)

    def __call__(self, event: dict[str, object]) -> None:
        event.setdefault("time_s", round(time.monotonic() - self._started_at, 3))
        self._enrich(event)
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(event) + "\n")
            self._announce(event)

    def close(self) -> None:
        with self._lock:
            self._file.close()


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Two workers in one folder would have one name, and take each other's checkpoints away.
    Folders made for a worker that is refused before it has anything to keep do not stay.

    Raises ConfigError: another worker writes there."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / _LOCK).acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"--out {out}: another worker writes there; choose another folder with --out"
        ) from error
    with lock:
        try:
            yield
        except (MurmurError, TaskError, TransportError):
            if made and _never_began(out):
                (out / _EVENTS).unlink(missing_ok=True)
                (out / _LOCK).unlink()
                with suppress(OSError):  # another has put something beside it
                    for folder in made:
                        folder.rmdir()
            raise


def _never_began(out: Path) -> bool:
    """Whether nothing in a worker's folder tells of training."""
    if {path.name for path in out.iterdir()} - {_LOCK, _EVENTS}:
        return False
    log = out / _EVENTS
    lines = log.read_text().splitlines() if log.exists() else []
    return all(json.loads(line)["event"] != "started" for line in lines)


def print_line(event: Mapping[str, object]) -> None:
    """One JSON event a line on stdout; a reader that went away is no error."""
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open until the end)
