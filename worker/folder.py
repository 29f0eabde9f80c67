"""A worker's folder: one worker at a time writes there, its events, and the members it has known.

These are addresses to try where those that the user names are away: a peer that answers there has
to show that it is of the run.
"""

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from murmuration.protos.addresses import public_address, split_address
from murmuration.protos.events import EVENTS, Log, new_event
from murmuration.protos.files import LineLog, read_json, write_atomically
from murmuration.worker.errors import ConfigError, MurmurError

_LOCK, _ROOM = ".lock", ".room"
_ROOM_BYTES = 64 * 1024
_MEMBERS = "members.json"
_MOST, _LONGEST, _MOST_BYTES = 32, 300, 32 * 1024


class EventLog:
    """`events.jsonl`, as long as the disk has room; and on to the terminal or a supervisor. Never
    raises OSError. any thread. Args: announce: takes each event, and a warning of the first that
    the file does not; enrich: completes each event first."""

    def __init__(self, out: Path | None, announce: Log, enrich: Log) -> None:
        self._announce, self._enrich = announce, enrich
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        self._path = out / EVENTS if out is not None else None
        self._lines = LineLog(self._path) if self._path is not None else None
        self._missing = 0
        if out is not None:
            with suppress(OSError):  # the first event will tell
                out.mkdir(parents=True, exist_ok=True)

    def __call__(self, event: dict[str, object]) -> None:
        self._complete(event)
        with self._lock:
            try:
                if self._lines is not None and self._missing:
                    text = f"{self._missing} events are missing here: they could not be written"
                    self._lines.write(json.dumps(self._complete(new_event("warning", text=text))))
                    self._missing = 0
                if self._lines is not None:
                    self._lines.write(json.dumps(event))
            except OSError as error:
                self._missing += 1
                if self._missing == 1:
                    text = f"events are missing in {self._path}: {error.strerror}; training goes on"
                    self._announce(self._complete(new_event("warning", text=text)))
            self._announce(event)

    def close(self) -> None:
        with self._lock:
            if self._lines is not None:
                self._lines.close()
                self._lines = None

    def _complete(self, event: dict[str, object]) -> dict[str, object]:
        event.setdefault("time_s", round(time.monotonic() - self._started_at, 3))
        event.setdefault("at", datetime.now().astimezone().isoformat(timespec="milliseconds"))
        self._enrich(event)
        return event


def leave_json(path: Path, document: object, log: Log) -> None:
    """Writes a document for others to read; logs a warning where that cannot be."""
    try:
        write_atomically(path, json.dumps(document, indent=1, default=str).encode())
    except OSError as error:
        log(new_event("warning", text=f"{path} could not be written: {error}"))


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keeps others out: two workers in one folder would have one name, and take each other's
    checkpoints away. Folders made for a worker that is refused before it has anything to keep do
    not stay. Raises ConfigError: another worker writes there, or there is no room."""
    made, log = [each for each in (out, *out.parents) if not each.exists()], out / EVENTS
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / _LOCK).acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"--out {out}: another worker writes there; choose another folder with --out"
        ) from error
    except OSError as error:
        raise _cannot_write(out, error) from error
    with lock:
        try:
            try:  # on a full disk nothing would be kept of what is trained
                write_atomically(out / _ROOM, bytes(_ROOM_BYTES))
                (out / _ROOM).unlink()
            except OSError as error:
                raise _cannot_write(out, error) from error
            if log.is_symlink() or (log.exists() and not log.is_file()):
                # What a link or a pipe leads to is not this worker's to write.
                raise ConfigError(f"{log} is no ordinary file: remove it, or choose another --out")
            yield
        except MurmurError:
            if made and _never_began(out):
                log.unlink(missing_ok=True)
                (out / _LOCK).unlink()
                with suppress(OSError):  # another has put something beside it
                    for folder in made:
                        folder.rmdir()
            raise


def hold(out: Path, until: ExitStack) -> bool:
    """Tells whether nobody else writes there, and lets nobody until the stack closes."""
    with suppress(OSError, NotImplementedError):  # there are no locks, or there is no room
        out.mkdir(parents=True, exist_ok=True)
        try:
            until.enter_context(FileLock(out / _LOCK, timeout=0, thread_local=False))
        except Timeout:
            return False
    return True


def is_taken(out: Path) -> bool:
    try:
        if (out / _LOCK).exists():
            FileLock(out / _LOCK).acquire(timeout=0).lock.release()
    except OSError as error:
        return isinstance(error, Timeout)
    return False


def _cannot_write(out: Path, error: OSError) -> ConfigError:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            do = "make room there, or "
        case errno.ENOLCK | errno.ENOTSUP:
            do = "its file system gives no locks, as NFS without a lock daemon; "
        case _:
            do = ""
    why = "it is a file" if out.is_file() else error.strerror or str(error)
    return ConfigError(f"--out {out}: {why}; {do}choose another folder with --out")


def _never_began(out: Path) -> bool:
    if {path.name for path in out.iterdir()} - {_LOCK, EVENTS}:
        return False
    log = out / EVENTS
    lines = log.read_text().splitlines() if log.exists() else []
    return all(json.loads(line)["event"] != "started" for line in lines)


@dataclass(frozen=True)
class Remembered:
    """The members that a peer knew, and where it had met them."""

    run: int = 0  # of which they were members
    contacts: tuple[str, ...] = ()  # what the user had named then
    # `HOST:PORT` of each that could be dialled, those first that were alive.
    members: tuple[str, ...] = ()
    over: bool = False  # whether that run has ended

    def keep(self, folder: Path) -> None:
        """Raises OSError."""
        dialled = [*filter(_is_dialled, map(public_address, self.members))]
        document = {
            "run": f"{self.run:016x}",
            "contacts": self.contacts[:_MOST],
            "members": dialled[:_MOST],
            **({"over": True} if self.over else {}),
        }
        write_atomically(folder / _MEMBERS, json.dumps(document, indent=1).encode())


NOTHING = Remembered()


def remembered(
    folder: Path | None, contacts: Sequence[str], tell: Callable[[str], None]
) -> Remembered:
    """Recalls what a peer of this folder knew; nothing where the user names others by now."""
    if folder is None or not (path := folder / _MEMBERS).exists():
        return NOTHING
    try:
        document = read_json(path, _MOST_BYTES)
        met, members = (tuple(_addresses(document[key])) for key in ("contacts", "members"))
        found = Remembered(int(str(document["run"]), 16), met, members, "over" in document)
    except (OSError, ValueError, LookupError, TypeError):
        tell(f"{path} is damaged or cannot be read: its members of the run are not tried")
        return NOTHING
    same = set(contacts) & {*found.contacts, *found.members} or not {*contacts, *found.contacts}
    return found if same else NOTHING


def _addresses(given: object) -> list[str]:
    if not isinstance(given, list) or len(given) > _MOST or not all(map(_is_dialled, given)):
        raise ValueError("no list of addresses")
    return given


def _is_dialled(address: object) -> bool:
    """Tells HOST:PORT from what else a peer may say of itself, and from a relayed address."""
    with suppress(ValueError):
        fits = isinstance(address, str) and "@" not in address and len(address) <= _LONGEST
        return fits and bool(split_address(str(address)))
    return False
