"""The supervisor against fake workers: real processes, however they end."""

import fcntl
import io
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from murmuration.coordinator import supervisor
from murmuration.coordinator.launch import Launch
from murmuration.coordinator.processes import ReservedPorts
from murmuration.coordinator.supervisor import run_swarm
from murmuration.protos.exit_codes import MurmurError
from murmuration.worker.views import lines
from tests.support import drive_swarm, fake_worker

Swarm = Callable[..., tuple[int, dict, str]]


@pytest.fixture
def console() -> Console:
    """A console that prints to its file."""
    return Console(file=io.StringIO(), width=120, highlight=False)


@pytest.fixture
def swarm(tmp_path: Path, console: Console) -> Swarm:
    """Runs a swarm of two fake workers here; returns exit code, report and what was printed."""
    program = (sys.executable, fake_worker.__file__)

    def run(settings: str, workers: int = 2) -> tuple[int, dict, str]:
        made = {"workers": workers, "settings": (settings,), "program": program}
        code, report = run_swarm(Launch(out=tmp_path / "out", **made), console)
        return code, report, console.file.getvalue()

    return run


def wait_until_gone(out: Path, *names: str) -> None:
    """Returns once these workers hold their locks no more, however early they ended."""
    for name in names:
        path = out / name / "lock"
        if path.exists():
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)


def read_until(process: subprocess.Popen[str], words: str, times: int = 1) -> None:
    """Reads on until as many lines have these words; fails once there are no more lines."""
    assert process.stdout is not None
    said = []
    for line in iter(process.stdout.readline, ""):
        said.append(line)
        times -= words in line
        if times == 0:
            return
    pytest.fail(f"it has ended without {words!r}: {''.join(said)}")


@contextmanager
def driven(out: Path, *settings: str) -> Iterator[subprocess.Popen[str]]:
    """A swarm in a process of its own, at a point where both workers train."""
    with subprocess.Popen(
        [sys.executable, drive_swarm.__file__, str(out), "run.steps=3", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            read_until(process, "warning: waits", times=2)
            yield process
        finally:
            process.kill()


def test_the_report_waits_where_lines_are_left_out(swarm, console, monkeypatch):
    monkeypatch.setattr(lines, "takes_lines", lambda _: False)  # as in a full pipe
    console.file = lines.lasting(console.file)
    _, report, printed = swarm("run.steps=3")
    assert (report["out"] in printed, "warning: waits" in printed) == (True, False)


def test_a_worker_killed_while_training_is_reported_and_survived(swarm):
    code, report, text = swarm("fake.dies=w1")
    assert code == 0
    alive, dead = report["peers"]
    assert (alive["exit_code"], dead["exit_code"]) == (0, -signal.SIGKILL)
    assert (dead["steps"], dead["bytes_sent"], dead["rounds_completed"]) == (20, 20_000, 20)
    assert "w1: killed (SIGKILL)" in text


def test_an_early_error_stops_all_and_is_the_only_line(swarm, tmp_path):
    with pytest.raises(MurmurError) as failure:
        swarm("fake.error=w1", workers=3)
    assert failure.value.exit_code == 4
    assert str(failure.value) == "no text at /nowhere; name a file with --text"
    assert not (tmp_path / "out").exists(), "it has been made for nothing"


def test_what_was_typed_is_looked_at_by_one_worker_first(swarm, monkeypatch):
    starts = Mock(wraps=supervisor.WorkerProcess)
    monkeypatch.setattr(supervisor, "WorkerProcess", starts)
    with pytest.raises(MurmurError, match="no text at /nowhere"):
        swarm("fake.error=w0", workers=3)
    assert starts.call_count == 1


def test_an_early_crash_says_where_to_look(swarm, tmp_path):
    with pytest.raises(MurmurError) as failure:
        swarm("fake.crash=w0")
    assert failure.value.exit_code == 1
    assert "w0 has ended before training started" in str(failure.value)
    assert "RuntimeError: a defect" in str(failure.value)
    assert "Traceback" in (tmp_path / "out/w0.log").read_text()


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    with driven(tmp_path / "out", "fake.wait=1", "fake.deaf=w1") as process:
        process.send_signal(signal.SIGINT)
        read_until(process, "w0: interrupted at step")
        wait_until_gone(tmp_path / "out", "w0")  # it has said so, and may be about to end
        while process.poll() is None:  # an impatient user; the report must survive that too
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    assert process.returncode == 130
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [peer["exit_code"] for peer in report["peers"]] == [130, -signal.SIGKILL]
    wait_until_gone(tmp_path / "out", "w0", "w1")


def test_no_worker_outlives_a_killed_supervisor(tmp_path):
    with driven(tmp_path / "out", "fake.wait=1") as process:
        process.kill()
        process.wait()
    wait_until_gone(tmp_path / "out", "w0", "w1")


def test_reserved_ports_are_distinct_and_a_listener_may_take_them():
    with ReservedPorts(64) as ports:
        assert len(set(ports.addresses)) == 64
        host, _, port = ports.addresses[0].rpartition(":")
        with socket.create_server((host, int(port))) as listener:
            assert listener.getsockname()[1] == int(port)
