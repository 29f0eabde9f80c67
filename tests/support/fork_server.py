"""Worker processes without the three seconds of imports that each of them begins with.

A server process imports torch and the worker once, and each start forks it. What is forked has no
threads yet, and is a process with a group, pipes and signals of its own. Tests only.

    python -m tests.support.fork_server murmur's arguments...

is `murmur` whose own children are forked likewise: those of `murmur swarm`. After `torchrun` come
torchrun's arguments.
"""

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = (sys.executable, "-m", "murmuration.worker.cli")  # for `ForkedPopen`
MURMUR = (sys.executable, "-m", "tests.support.fork_server")  # its children are forked
_ADDRESS = "TEST_FORK_SERVER"  # in the environment: the processes of a test share one server
_PRELOADED = (  # beside all of the product
    *("torch._dynamo", "torch.optim", "lightning.pytorch", "peft", "pytest", "hypothesis.stateful"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer"),
)
_SERVED = ("murmuration.worker.cli", "murmuration.coordinator.", "tests.")
EXAMPLES = Path(__file__).parents[2] / "docs/examples"
_LEASH = ("-I", "-S")  # how the launcher starts what dies with it
_OF_XDIST = ("-u", "-c")  # how it starts a worker
_NAMESPACE = "--net="  # of nsenter
_CLONE_NEWNET = 0x40000000
_MAX_REQUEST_BYTES = 1 << 20
_OF_SERVER = {
    "OMP_NUM_THREADS": "1",
    "GRPC_VERBOSITY": "NONE",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # what forks has one thread
}


class ForkedPopen(subprocess.Popen[Any]):
    """A `Popen` that forks `python -m MODULE` and scripts from the server, and spawns what else
    there is.

    The launcher's prefixes are taken off: the leash, and the namespace, which the child enters.
    (Types are ignored below where `Popen`'s stubs leave its private parts out.)"""

    _connection: socket.socket | None = None

    def _execute_child(self, args: Any, *rest: Any, **named: Any) -> None:
        request = _request(list(args))
        if request is None:
            super()._execute_child(args, *rest, **named)  # type: ignore[misc]
            return
        (cwd, environment), pipes = rest[4:6], rest[9:15]
        read_in, _, _, write_out, _, write_err = pipes
        ends = (read_in, write_out, write_err)
        fds = [os.dup(own if end == -1 else end) for own, end in enumerate(ends)]
        self._connection = _connected()  # first, as it tells the environment where the server is
        request |= {"cwd": cwd or os.getcwd(), "environment": dict(environment or os.environ)}
        socket.send_fds(self._connection, [json.dumps(request).encode()], fds)
        for fd in fds:
            os.close(fd)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = int(self._connection.recv(32))
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        self._connection.setblocking(not wait_flags & os.WNOHANG)
        try:
            status = int(self._connection.recv(32))
        except BlockingIOError:
            return 0, 0
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, *args: Any, **named: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*args, **named)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(command: Sequence[str], **given: Any) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    timeout_s = given.pop("timeout", None)
    with ForkedPopen(command, text=True, **pipes, **given) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _request(command: list[str]) -> dict[str, Any] | None:
    """The request to fork a command; None for one that is to be spawned."""
    if command[:3] == [sys.executable, *_OF_XDIST]:
        return {"argv": command[2:], "namespace": None}
    if command[:3] == [sys.executable, *_LEASH]:
        command = command[6:]  # the script, the parent's pid and the cores
    namespace = None
    if command[1].startswith(_NAMESPACE):
        namespace, command = command[1].removeprefix(_NAMESPACE), command[2:]
    if command[1] in ("-P", "-u"):
        command = [command[0], *command[2:]]
    if command[0] == sys.executable and command[1].endswith(".py"):
        return {"argv": command[1:], "namespace": namespace}
    ours = command[:2] == [sys.executable, "-m"] and command[2].startswith(_SERVED)
    return {"argv": command[2:], "namespace": namespace} if ours else None


def start() -> None:
    """Starts the server, if there is none; it ends with this process."""
    if _ADDRESS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fork-server-")
        path = Path(folder.name) / "socket"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(str(path))
        listening.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as m; m.serve({listening.fileno()})"],
            pass_fds=[listening.fileno()],
            env=os.environ | _OF_SERVER,
        )
        listening.close()

        def end() -> None:
            del os.environ[_ADDRESS]
            process.kill()
            process.wait()
            folder.cleanup()

        atexit.register(end)
        os.environ[_ADDRESS] = str(path)


def _connected() -> socket.socket:
    start()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ[_ADDRESS])
    return connection


def serve(fd: int) -> None:
    """Forks a child for each connection. It sends its pid, and the server its wait status."""
    import murmuration

    product = (each.name for each in pkgutil.walk_packages(murmuration.__path__, "murmuration."))
    for module in (*_PRELOADED, *product):
        if not module.endswith("__main__"):
            __import__(module)
    spare = _sparing()
    gc.freeze()  # no child looks through what was imported
    listening = socket.socket(fileno=fd)
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
                request, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
                if not request:  # whoever asked was killed before it said for what
                    connection.close()
                    continue
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _tell_pid(connection)
                    for each in (listening, woken, wake, connection, *running.values()):
                        each.close()
                    selector.close()
                    _become(json.loads(request), fds, spare)
                running[pid] = connection
                for each_fd in fds:
                    os.close(each_fd)


def _tell_pid(connection: socket.socket) -> None:
    """In the forked process, once it leads its group: `os.killpg` then finds it, as it finds what
    `Popen` has started. A supervisor that came too early had left one running for two minutes.

    A group, and no session: Linux shares its processors between sessions first. Beside twenty of
    them, all that pytest itself runs, in one, got a twentieth: an import of torch took minutes."""
    os.setpgid(0, 0)
    with suppress(ConnectionError):
        connection.send(str(os.getpid()).encode())


def _sparing() -> Callable[[], None]:
    """Makes workers of tests share the text of the library, and end their runs with a short sample:
    these two took more than half of the time of a run of 40 steps."""
    from murmuration.worker.tasks import text
    from murmuration.worker.training import evaluation

    load, corpus = text.load_text, text.load_text(text.STDLIB)

    def load_text(source: str, *, min_bytes: int = 1) -> text.Corpus:
        return corpus if source == text.STDLIB else load(source, min_bytes=min_bytes)

    def spare() -> None:
        evaluation._SAMPLE_BYTES, text.load_text = 16, load_text

    return spare


def _reap(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            connection = running.pop(pid)
            with connection, suppress(ConnectionError):  # whoever started it is gone
                connection.send(str(status).encode())


def _become(request: dict[str, Any], fds: Sequence[int], spare: Callable[[], None]) -> None:
    """Runs the module in the forked process; does not return."""
    code: object = 1
    try:
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
            os.close(fd)
        if request["namespace"] is not None:
            namespace = os.open(request["namespace"], os.O_RDONLY)
            assert ctypes.CDLL(None).setns(namespace, _CLONE_NEWNET) == 0
            os.close(namespace)
        os.chdir(request["cwd"])
        os.environ.update(request["environment"])
        sys.argv = list(request["argv"])
        if sys.argv[0] == _OF_XDIST[1]:
            exec(sys.argv[1], {"__name__": "__main__"})
            atexit._run_exitfuncs()
        else:
            spare()
            _run(sys.argv[0])
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _run(program: str) -> None:
    if program == __name__:
        main()
    elif program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def main() -> None:
    """`murmur`, or torchrun where that is the first word, whose children are forked."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    if sys.argv[1] == "torchrun":
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
        from torch.distributed.run import main as torchrun

        subprocess_handler.Popen = ForkedPopen
        torchrun(sys.argv[2:])
    else:
        from murmuration.worker.cli import main as murmur

        murmur()


if __name__ == "__main__":
    main()
