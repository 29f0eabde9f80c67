"""Notices that the machine will go away, and what systemd is told."""

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from murmuration.worker import daemon
from murmuration.worker.node import supervision
from murmuration.worker.node.supervision import (
    Systemd,
    allow_open_files,
    end_on_sigterm,
    few_open_files,
    is_noticed,
    leaving_on,
)
from murmuration.worker.training.mailbox import Mailbox, Stop

PATIENCE_S = 60.0
TOKEN = "a token"


class Metadata(BaseHTTPRequestHandler):
    """A cloud's service: what it answers stands in the path."""

    def do_GET(self) -> None:
        status, _, body = self.path.removeprefix("/").partition("/")
        if status == "google":
            status = "200" if self.headers["Metadata-Flavor"] == "Google" else "403"
        if status == "amazon":
            status = "200" if self.headers["X-aws-ec2-metadata-token"] == TOKEN else "401"
        self.answer(int(status), body)

    def do_PUT(self) -> None:
        lasts_s = int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"])
        self.answer(200 if self.path == "/latest/api/token" and lasts_s else 400, TOKEN)

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_url_that_says_so_is_a_notice():
    asked = "200/terminate 200/TRUE google/TRUE amazon/terminate 200/FALSE 200/none 200/0 200/"
    asked += " 404/x 500/x google/FALSE amazon/"
    with HTTPServer(("127.0.0.1", 0), Metadata) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, poll_interval=0.01)
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            said = [path for path in asked.split() if is_noticed(f"{url}/{path}")]
        finally:
            server.shutdown()
    assert said == asked.split()[:4]


@pytest.mark.parametrize(
    "source", ["http://127.0.0.1:1/", "http://", "http://[", "http://a b/", f"/{300 * 'a'}"]
)
def test_what_does_not_answer_or_cannot_be_looked_at_is_none(source):
    assert not is_noticed(source)


def test_a_notice_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "_POLL_S", 0.001)
    notice, left, told = tmp_path / "notice", threading.Event(), list[str]()

    def leave() -> None:
        told.append(threading.current_thread().name)
        left.set()

    with leaving_on(str(notice), leave):
        assert told == []
        notice.touch()
        assert left.wait(PATIENCE_S)
    assert told == ["murmur-notice"]


def test_without_a_notice_nothing_is_told_and_no_thread_stays(tmp_path):
    told: list[None] = []
    before = threading.active_count()
    for source in (None, str(tmp_path / "never")):
        with leaving_on(source, lambda: told.append(None)):
            pass
    assert (told, threading.active_count()) == ([], before)


@contextmanager
def service_manager(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(path)
        yield listener


def test_a_peer_that_does_not_answer_does_not_feed_the_watchdog(tmp_path):
    path, asked = str(tmp_path / "notify"), threading.Event()
    answers = iter((RuntimeError("closed"), TimeoutError(), RuntimeError("closed")))

    def answer() -> None:
        if (error := next(answers, None)) is not None:
            raise error
        asked.set()

    systemd = Systemd({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "3000"})
    with service_manager(path) as listener, systemd.watched(answer):
        assert asked.wait(PATIENCE_S)
        assert listener.recv(100) == b"WATCHDOG=1"
    assert next(answers, None) is None


def test_an_abstract_socket_will_do_and_another_process_watchdog_is_none_of_ours():
    name = f"@murmuration-test-{os.getpid()}"
    with service_manager(f"\0{name[1:]}") as listener:
        systemd = Systemd({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"})
        assert systemd.watchdog_s == 0.0
        with systemd.watched(lambda: None):
            systemd.tell("READY=1")
            assert listener.recv(100) == b"READY=1"


def test_the_watchdog_is_fed_between_two_stages_too(tmp_path, monkeypatch):
    heard, path = list[bytes](), str(tmp_path / "notify")

    run = lambda: heard.extend(listener.recv(100) for _ in range(2)) or 0  # noqa: E731

    def worker(*_: object) -> Mock:  # that is not up yet, and goes on once
        return Mock(run=run, goes_on=None if heard else options, answers=lambda: None)

    monkeypatch.setattr(daemon, "Worker", worker)
    monkeypatch.setattr(daemon.RemoteCopies, "begun", lambda *_, **__: None)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    options: Any = SimpleNamespace(out=tmp_path / "out", resume=None)
    with service_manager(path) as listener:
        assert daemon.run_worker(Mock(), options) == 0
    assert heard == [b"WATCHDOG=1"] * 4


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/nowhere/at/all"}])
def test_where_nobody_listens_nothing_happens(environment):
    with Systemd(environment).watched(lambda: None):
        pass


def test_few_open_files_are_told_with_the_way_out():
    assert few_open_files(None) is few_open_files(256) is None
    assert re.search(r"at most 48 here.*`ulimit -n 1024`", few_open_files(48) or "")


@pytest.mark.parametrize("error", [OSError(errno.EPERM, "no"), ValueError("not allowed")])
def test_where_more_open_files_are_not_allowed_it_goes_on_with_those(monkeypatch, error):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", Mock(side_effect=error))
    assert allow_open_files() == 1024


def limited(limit: int, code: str) -> "subprocess.CompletedProcess[str]":
    """A process that may have so many bytes of addresses, and has no other limit."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_memory_is_what_the_tightest_limit_leaves():
    code = "from murmuration.worker.node.supervision import memory_bytes; print(memory_bytes())"
    assert 0 < int(limited(1 << 30, code).stdout) < 1 << 30


def test_what_cannot_even_load_torch_is_said_before_it_is_tried():
    code = (
        "import sys; sys.argv = ['murmur', 'up']; from murmuration.worker.cli import main; main()"
    )
    told = limited(600_000_000, code)
    assert told.returncode == 1
    assert told.stderr.startswith("murmur: there is not enough memory; ")
    assert told.stderr.count("\n") == 1


def test_sigterm_before_there_is_anything_to_save_ends_with_0():
    before = signal.getsignal(signal.SIGTERM)
    try:
        end_on_sigterm()
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_ends_a_worker_at_once(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(daemon.os, "_exit", ended.append)
    worker: Any = SimpleNamespace(_interrupted_by=None, _mailbox=Mailbox(), _done=False)
    with daemon.Worker._signals(worker):
        signal.raise_signal(signal.SIGINT)
        assert worker._mailbox.poll() == Stop("SIGINT")
        assert ended == []
        signal.raise_signal(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_a_worker_whose_terminal_closes_saves_and_under_nohup_goes_on():
    worker: Any = SimpleNamespace(_interrupted_by=None, _mailbox=Mailbox(), _done=False)
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, told in ((signal.SIG_IGN, None), (signal.SIG_DFL, Stop("SIGHUP"))):
            signal.signal(signal.SIGHUP, handler)
            with daemon.Worker._signals(worker):
                signal.raise_signal(signal.SIGHUP)
            assert worker._mailbox.poll() == told
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_does_not_wake_the_train_thread_is_heard():
    """Another thread gets it here, as one that comes just before this thread waits."""
    mailbox, number = Mailbox(), signal.SIGUSR1
    before = signal.signal(number, lambda *_: mailbox.answer(Stop("SIGUSR1")))
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        while mailbox.wait() != Stop("SIGUSR1"):
            pass
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.signal(number, before)
