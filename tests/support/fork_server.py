"""Worker processes without the three seconds of imports that each of them begins with.

A server process imports torch and the worker once; each start forks it, as Python's own fork server
does. What is forked has no threads yet, and runs its program as `python -m` would: a process, a
session, pipes and signals of its own. Tests only: a real worker is spawned.
"""

import atexit
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_PRELOADED = ("torch._dynamo", "torch.optim", "worker.cli.commands", "worker.daemon")
_MAX_REQUEST_BYTES = 1 << 20


class ForkedProcess:
    """What tests use of `subprocess.Popen`: stdout and stderr are text pipes."""

    def __init__(self, program: Sequence[str], args: Sequence[str]) -> None:
        """`program` is what follows `python -m`: a module, and what it takes before `args`."""
        out, err = os.pipe(), os.pipe()
        self._connection = _server()
        request = json.dumps({"argv": [*program, *args], "cwd": os.getcwd()}).encode()
        socket.send_fds(self._connection, [request], [out[1], err[1]])
        os.close(out[1])
        os.close(err[1])
        self.stdout: IO[str] = os.fdopen(out[0], encoding="utf-8")
        self.stderr: IO[str] = os.fdopen(err[0], encoding="utf-8")
        self.pid = int(self._connection.recv(32))
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs, the negated signal where one has ended it."""
        with self._lock:
            if self._code is None:
                self._connection.setblocking(False)
                try:
                    self._code = int(self._connection.recv(32))
                except BlockingIOError:
                    return None
                self._connection.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_address: Path | None = None


def _server() -> socket.socket:
    """A connection to the server of this process, which starts with the first."""
    global _address
    if _address is None:
        folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        path = Path(folder.name) / "socket"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(str(path))
        listening.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(listening.fileno())],
            pass_fds=[listening.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        listening.close()

        def end() -> None:
            process.kill()
            process.wait()
            folder.cleanup()

        atexit.register(end)
        _address = path
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(_address))
    return connection


def serve(listening: socket.socket) -> None:
    """Forks a worker for each connection, and sends its pid and in the end its exit code."""
    for module in _PRELOADED:
        __import__(module)
    running: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _reap(running)
                    continue
                connection, _ = listening.accept()
                request, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 2)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (listening, woken, wake, connection, *running.values()):
                        each.close()
                    selector.close()
                    _become(json.loads(request), fds)
                connection.send(str(pid).encode())
                running[pid] = connection
                for fd in fds:
                    os.close(fd)


def _reap(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            connection = running.pop(pid)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _become(request: dict[str, object], fds: Sequence[int]) -> None:
    """Runs the program in the forked process; does not return."""
    os.setsid()
    for fd, standard in zip((os.open(os.devnull, os.O_RDONLY), *fds), (0, 1, 2), strict=True):
        os.dup2(fd, standard)
    os.chdir(str(request["cwd"]))
    argv = request["argv"]
    assert isinstance(argv, list)
    sys.argv = argv[:]
    code = 1
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
