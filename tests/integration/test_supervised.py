"""A worker and the machine around it: it leaves when told that this will go away."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.workers import PATIENCE_S, SMALL, running_swarm, settings_of

ENDLESS = settings_of(run__steps=10_000_000, diloco__inner_steps=10)


def test_a_worker_leaves_on_a_notice_and_its_command_goes_on_afterwards(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    with running_swarm(2, tmp_path / "runs", *SMALL, *ENDLESS) as swarm:
        w0, w1 = swarm.start("w0"), swarm.start("w1", "--leave-on", str(notice))
        w1.wait_for_round(2)
        notice.touch()
        assert w1.wait() == 0
        assert (w1.result["reason"], w1.result["val_loss"]) == ("preempted", None)
        assert Path(w1.result["checkpoint"]).is_dir()
        w0.wait_for(
            lambda e: e["event"] == "member" and (e["peer_changed"], e["health"]) == ("w1", "left"),
            "word that w1 has left",
        )
        notice.unlink()
        again = swarm.start("w1", "--leave-on", str(notice))
        again.wait_for(lambda e: e["event"] == "resumed", "its own checkpoint")
        again.wait_for_round(3)


def test_systemd_hears_of_a_worker(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(tmp_path / "notify"))
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"}
        command = ("up", "--out", str(tmp_path / "out"), *SMALL, *ENDLESS)
        worker = subprocess.Popen(
            [sys.executable, "-m", "worker.cli", *command],
            env={**os.environ, **told},
            stdout=subprocess.DEVNULL,
        )
        try:
            heard = [listener.recv(100) for _ in range(3)]
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
        finally:
            worker.kill()
            worker.wait()
    assert heard == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
