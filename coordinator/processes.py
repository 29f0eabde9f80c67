"""Processes that this one starts, reads without blocking and ends; signals, and free ports."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import IO, Any

from murmuration.algorithms.link import Link
from murmuration.protos.addresses import LOOPBACK_HOST
from murmuration.protos.exit_codes import ending_signals
from murmuration.protos.files import LineLog

_WRAPPER = Path(__file__).with_name("die_with_parent.py")
_READ_BYTES = 64 * 1024
_MAX_LINE_BYTES = 16 * 1024 * 1024
_KEPT_ERRORS = 50
_END_S = 5.0  # of the proxy
_SAME_PRESS_S = 0.3  # `timeout` and some shells send one Ctrl-C twice


class WorkerProcess:
    """A child in a session of its own, so that the terminal's Ctrl-C does not reach it. It keeps to
    these cores, or any. Its stderr goes to a log file, which appears with the first line. Main
    thread only: on Linux a child's life is tied to the thread that starts it."""

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, cores: Sequence[int] = ()
    ) -> None:
        self.name, self.log_path = name, log_path
        self._log = LineLog(log_path)
        self._errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        kept_to = ",".join(map(str, cores)) or "all"
        wrapper = [sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid()), kept_to]
        self._process = subprocess.Popen(
            [*wrapper, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = self._process.stdout, self._process.stderr
        self._partial = {self._out: b"", self._err: b""}  # the last line, as far as it has come
        for pipe in self._partial:
            os.set_blocking(pipe.fileno(), False)

    def files(self) -> list[int]:
        """The descriptors that become readable when there is output."""
        return [pipe.fileno() for pipe in self._partial if not pipe.closed]

    def read(self) -> list[str]:
        """The complete lines of stdout that have come since; those of stderr are logged."""
        for line in self._drain(self._err):
            self._errors.append(line)
            self.log(line)
        return self._drain(self._out)

    def log(self, line: str) -> None:
        """Keeps a line, of stderr or one of stdout that is no event."""
        with suppress(OSError):  # a full disk must not end the supervisor
            self._log.write(line)

    def last_words(self) -> str:
        """The last line of our own on stderr, else the last of all."""
        lines = [line for line in self._errors if line.strip()]
        own = [line.removeprefix("murmur: ") for line in lines if line.startswith("murmur: ")]
        return (own or lines or [""])[-1]

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
        for pipe in self._partial:
            pipe.close()
        self._log.close()

    def _drain(self, pipe: IO[bytes]) -> list[str]:
        """The lines that have come; at the end of the stream, also one without an end."""
        lines: list[bytes] = []
        while not pipe.closed:
            try:
                chunk = os.read(pipe.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            *whole, rest = (self._partial[pipe] + chunk).split(b"\n")
            if not chunk:
                pipe.close()
                whole, rest = ([rest] if rest else []), b""
            lines += whole
            self._partial[pipe] = rest if len(rest) <= _MAX_LINE_BYTES else b""
        return [line.decode(errors="replace") for line in lines]


class ProxyProcess(AbstractContextManager["ProxyProcess"]):
    """A shaping proxy at work; ends with this process, however that one ends. Use from one thread.
    Raises RuntimeError: it did not start. Args: members: (HOST:PORT that it listens on, its link or
    None) of each worker; seed: of jitter and of broken connections; log_path: for its stderr."""

    proxies: dict[str, str]  # HOST:PORT for each worker's `--proxy`, by name

    def __init__(
        self,
        members: Mapping[str, tuple[str, Link | None]],
        *,
        host: str = LOOPBACK_HOST,
        seed: int = 0,
        log_path: Path | None = None,
    ) -> None:
        with log_path.open("w") if log_path else nullcontext() as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "murmuration.coordinator.shaping_proxy"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # the terminal's Ctrl-C is for the workers to save
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asks, self._answers = self._process.stdin, self._process.stdout
        told = {name: (at, link and asdict(link)) for name, (at, link) in members.items()}
        try:
            self.proxies = self._ask(json.dumps({"host": host, "seed": seed, "members": told}))
        except BaseException:
            self.close()
            raise

    def counters(self) -> dict[str, dict[str, int]]:
        """`sent_bytes` and `received_bytes` of each worker over the proxy: TCP payload."""
        return self._ask("")

    def close(self) -> None:
        """Ends it; connections over it break."""
        with suppress(OSError):
            self._asks.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, line: str) -> dict[str, Any]:
        with suppress(OSError):
            print(line, file=self._asks, flush=True)
        if not (answer := self._answers.readline()):
            raise RuntimeError(f"the shaping proxy has ended with exit code {self._process.wait()}")
        document: dict[str, Any] = json.loads(answer)
        return document


class Interrupts:
    """While entered, signals that ask this process to end are only counted: the `first`, and
    whether another has come since (`insistent`). Main thread only."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.insistent, self._first_s = False, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._press) for number in ending_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # After one, this process is about to end: another must not spoil its exit code.
            signal.signal(number, handler if self.first is None else signal.SIG_IGN)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._first_s = number, time.monotonic()
        self.insistent |= time.monotonic() - self._first_s > _SAME_PRESS_S


class ReservedPorts(ExitStack):
    """Distinct free loopback ports, kept from everyone else until closed.

    A port that is merely looked up can be lost to any outgoing connection before its worker
    listens. Linux lets a listener bind next to a socket that does not listen, if both set
    SO_REUSEADDR, as gRPC does; so there the sockets stay open. Elsewhere they are closed at once.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.addresses: list[str] = []
        try:
            for _ in range(count):
                reserved = self.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                reserved.bind((LOOPBACK_HOST, 0))
                self.addresses.append(f"{LOOPBACK_HOST}:{reserved.getsockname()[1]}")
        except OSError:
            self.close()
            raise
        if not sys.platform.startswith("linux"):
            self.close()
