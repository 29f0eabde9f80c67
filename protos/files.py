"""Writes what a full disk neither tears nor ends: whole files, logs, and stdout."""

import atexit
import errno
import json
import os
import select
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

RESULTS = "results.json"  # in a worker's folder: what all peers of the run have come to
LOG_BYTES = 64 << 20  # of a log, and as much of its earlier part


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """A reader sees the old file or the new one. Raises OSError; then nothing is left beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(temporary, "wb", opener=lambda name, _: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_ordinary(path: Path, most_bytes: int = -1) -> bytes:
    """Reads a file. Raises OSError: it is a pipe or a device, which would be waited for."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no ordinary file", str(path))
    with path.open("rb") as file:
        return file.read(most_bytes)


def read_json(path: Path, most_bytes: int = 1 << 28) -> Any:
    """A document, null where a number is none. Raises OSError, as `read_ordinary`; ValueError."""
    try:
        return json.loads(read_ordinary(path, most_bytes), parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class LineLog:
    """A log for one thread at a time. When full it becomes PATH.1, in place of the last one."""

    def __init__(self, path: Path, most_bytes: int = LOG_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file = -1
        self._bytes = 0

    def write(self, line: str) -> None:
        """Appends a line. Raises OSError: nothing of it is in the log."""
        content = line.encode() + b"\n"
        if self._file < 0:
            self._open()
        if self._bytes and self._bytes + len(content) > self._most_bytes:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self.close()
            self._open()
        if (written := os.write(self._file, content)) < len(content):  # what the disk had room for
            os.ftruncate(self._file, self._bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._bytes += written

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._bytes = os.fstat(self._file).st_size


_skipped, _LAST_S = [0], 1.0  # lines; at the end


def takes_lines(stream: IO[str], wait_s: float = 0.0) -> bool:
    """Tells whether a line can be printed so soon, not where a terminal is stopped or a pipe full:
    a peer must not wait there. How many were left out is printed before the next, or at the end."""
    with suppress(OSError, TypeError, ValueError):  # it is no file
        if not select.select([], [stream], [], wait_s)[1]:
            _ = _skipped[0] or atexit.register(takes_lines, stream, _LAST_S)
            _skipped[0] += 1
            return False
    if _skipped[0]:
        print(f"{_skipped[0]} lines are missing here, as nothing took them", file=stream)
        _skipped[0] = 0
    return True


def print_line(line: str, *, to: str = "stdout", waits: bool = False) -> None:
    """Prints on a stream of `sys`, with question marks for letters that it does not know. That its
    reader went away, it is closed, or a disk below is full, is no error. Args: waits: until the
    line is taken, else it may be left out."""
    stream = getattr(sys, to)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        if waits or takes_lines(stream):
            print(line.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except (OSError, ValueError, LookupError):  # it would try to write it again at the end
        with suppress(AttributeError, OSError, ValueError):  # it has no file
            setattr(sys, to, open(stream.fileno(), "w", closefd=False, errors="replace"))  # noqa: SIM115
