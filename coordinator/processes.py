"""Processes that this one starts, reads without blocking and ends; and signals, counted."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from murmuration.protos.files import LineLog

_WRAPPER = Path(__file__).with_name("die_with_parent.py")
_READ_BYTES = 64 * 1024
_MAX_LINE_BYTES = 16 * 1024 * 1024
_KEPT_ERRORS = 50


class WorkerProcess:
    """A child in a session of its own, so that the terminal's Ctrl-C does not reach it.

    It keeps to these cores, all where none are given. Its stderr goes to a log file, which appears
    with the first line. Used from one thread, the main one: on Linux its life is tied to the
    thread that starts the child.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, cores: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        self.log_path = log_path
        self._log = LineLog(log_path)
        self._lines = {"out": _Lines(), "err": _Lines()}
        kept_to = ",".join(map(str, cores)) or "all"
        wrapper = [sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid()), kept_to]
        self._process = subprocess.Popen(
            [*wrapper, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def files(self) -> list[int]:
        """The descriptors that become readable when there is output."""
        pipes = (self._process.stdout, self._process.stderr)
        return [pipe.fileno() for pipe in pipes if pipe is not None and not pipe.closed]

    def read(self) -> list[str]:
        """The complete lines of stdout that have come since; stderr goes to log and `errors`."""
        for line in self._drain(self._process.stderr, "err"):
            self.errors.append(line)
            self._write_log(line)
        return self._drain(self._process.stdout, "out")

    def note(self, line: str) -> None:
        """Keeps a line of stdout that is no event."""
        self._write_log(line)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Asks it to save and end, as Ctrl-C does."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Ends it and every process it has started, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Waits for the end of a process that has ended or was killed, and frees what it held."""
        self.kill()  # what it may have left behind in its session
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._log.close()

    def _drain(self, pipe: IO[bytes] | None, key: str) -> list[str]:
        if pipe is None or pipe.closed:
            return []
        lines: list[str] = []
        while True:
            try:
                chunk = os.read(pipe.fileno(), _READ_BYTES)
            except BlockingIOError:
                return lines
            if not chunk:
                pipe.close()
                return lines + self._lines[key].rest()
            lines += self._lines[key].feed(chunk)

    def _write_log(self, line: str) -> None:
        with suppress(OSError):  # a full disk must not end the supervisor
            self._log.write(line)


class _Lines:
    """Cuts a stream of bytes into lines; what is too long to be one is dropped."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, chunk: bytes) -> list[str]:
        *lines, partial = (self._partial + chunk).split(b"\n")
        self._partial = partial if len(partial) <= _MAX_LINE_BYTES else b""
        return [line.decode(errors="replace") for line in lines]

    def rest(self) -> list[str]:
        """The last line, if it has no end."""
        partial, self._partial = self._partial, b""
        return [partial.decode(errors="replace")] if partial else []


_SIGNALS = tuple(  # Windows has no SIGHUP
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_SAME_PRESS_S = 0.3  # `timeout` and some shells send one Ctrl-C twice


class Interrupts:
    """While entered, signals that ask this process to end are only counted. Main thread only."""

    def __init__(self) -> None:
        self._pressed: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}

    @property
    def first(self) -> int | None:
        """The first signal; None before there is one."""
        return self._pressed[0][0] if self._pressed else None

    @property
    def insistent(self) -> bool:
        """Whether another one has come since."""
        return bool(self._pressed) and (self._pressed[-1][1] - self._pressed[0][1] > _SAME_PRESS_S)

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._press) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # After one, this process is about to end: another must not spoil its exit code.
            signal.signal(number, signal.SIG_IGN if self._pressed else handler)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._pressed = [*self._pressed[:1], (number, time.monotonic())]
