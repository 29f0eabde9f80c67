"""Child processes that speak JSON lines, and that never outlive the one who started them."""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_LAST_LINES = 20
_GRACE_S = 10.0


class PeersFailed(Exception):
    """A process ended early or fell silent; the message has its last words."""


class Children:
    """Processes by name; what they say arrives in one queue."""

    def __init__(self, folder: Path, cwd: Path, env: Mapping[str, str]) -> None:
        self._folder, self._cwd, self._env = folder, cwd, dict(env)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._told: dict[tuple[str, str], Event] = {}
        self._events: queue.Queue[tuple[str, Event | None]] = queue.Queue()

    def start(self, name: str, command: Sequence[str]) -> None:
        """In a session of its own, so that its children can be ended with it."""
        with (self._folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._cwd,
                env=self._env,
                start_new_session=True,
            )
        self._processes[name] = process
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def wait_for(self, kind: str, names: Sequence[str], timeout_s: float) -> dict[str, Event]:
        """The first event of a kind from each of some processes, said by now or later.

        Raises:
            PeersFailed: any process ended before, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while missing := [name for name in names if (name, kind) not in self._told]:
            try:
                name, event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                words = "\n".join(self._last_words(name) for name in missing)
                raise PeersFailed(f"no {kind!r} from {missing} in {timeout_s} s\n{words}") from None
            if event is None:
                raise PeersFailed(f"{name} has ended early\n{self._last_words(name)}")
            self._told.setdefault((name, str(event.get("event"))), event)
        return {name: self._told[name, kind] for name in names}

    def tell(self, names: Sequence[str], line: str) -> None:
        """Writes a line to their standard inputs."""
        for name in names:
            pipe = self._processes[name].stdin
            assert pipe is not None
            pipe.write(line + "\n")
            pipe.flush()

    def dismiss(self, names: Sequence[str]) -> None:
        """Closes their standard inputs and gives them a moment to end."""
        for name in names:
            pipe = self._processes[name].stdin
            assert pipe is not None
            pipe.close()
        deadline = time.monotonic() + _GRACE_S
        for name in names:
            with suppress(subprocess.TimeoutExpired):
                self._processes[name].wait(max(0.0, deadline - time.monotonic()))

    def kill_all(self) -> None:
        """Every process with its children, the ended ones' too."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    self._events.put((name, event))
        self._events.put((name, None))

    def _last_words(self, name: str) -> str:
        lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(f"  {name}: {line}" for line in lines[-_LAST_LINES:])


@contextmanager
def children(folder: Path, cwd: Path, env: Mapping[str, str]) -> Iterator[Children]:
    """Processes that are all killed at the end of the block, however it ends."""
    them = Children(folder, cwd, env)
    try:
        yield them
    finally:
        them.kill_all()
