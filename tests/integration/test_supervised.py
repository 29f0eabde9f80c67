"""A worker and the machine around it: it leaves when told that this will go away."""

import os
import signal
import socket
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from murmuration.worker.training.checkpoint import load_one
from tests.support.fork_server import WORKER, ForkedPopen
from tests.support.gates import gates
from tests.support.workers import (
    ENDLESS,
    PATIENCE_S,
    QUICK,
    SMALL,
    WorkerProcess,
    running_swarm,
    settings_of,
)


@pytest.mark.parametrize("why", ["preempted", "SIGTERM"])
def test_a_worker_that_is_told_saves_and_leaves_and_its_command_goes_on_afterwards(tmp_path, why):
    """By a notice, or by a signal."""
    notice = tmp_path / "notice"
    with running_swarm(2, tmp_path / "runs", *ENDLESS, *QUICK) as swarm:
        w0, w1 = swarm.start("w0"), swarm.start("w1", "--leave-on", str(notice))
        w1.wait_for_round(2)
        notice.touch() if why == "preempted" else w1.send(signal.SIGTERM)
        assert w1.wait() == 0
        # Somebody waits for it to end: it evaluates nothing.
        assert (w1.result["reason"], w1.result["val_loss"]) == (why, None)
        assert "evaluating" not in {event["state"] for event in w1.of("progress")}
        assert Path(w1.result["checkpoint"]).is_dir()
        w0.wait_for(
            lambda e: e["event"] == "member" and (e["peer_changed"], e["health"]) == ("w1", "left"),
            "word that w1 has left",
        )
        alone = w0.of("round")[-1]["round"] + 3
        w0.wait_for_round(alone)  # without waiting for anybody
        notice.unlink(missing_ok=True)
        again = swarm.start("w1", "--leave-on", str(notice))
        again.wait_for(lambda e: e["event"] == "resumed", "its own checkpoint")
        again.wait_for_round(alone)
        w0.send(signal.SIGINT)
        assert w0.wait() == 130
        assert w0.result["val_loss"] is not None


def test_systemd_hears_of_a_worker(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(tmp_path / "notify"))
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"}
        command = ("up", "--out", str(tmp_path / "out"), *ENDLESS)
        worker = ForkedPopen(
            [*WORKER, *command], env={**os.environ, **told}, stdout=subprocess.DEVNULL
        )
        try:
            heard = [*iter(lambda: listener.recv(100), b"READY=1"), listener.recv(100)]
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
        finally:
            worker.kill()
            worker.wait()
    assert {*heard} == {b"WATCHDOG=1"}


def test_sigterm_ends_a_worker_that_waits_for_others_with_0(tmp_path):
    waits = ("--min-peers", "2", "--wait-s", "600", *ENDLESS)
    with running_swarm(1, tmp_path, *waits) as swarm:
        worker = swarm.start("w0", *waits)
        worker.wait_for(lambda e: e["event"] == "listening", "an address")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0


@pytest.mark.parametrize("every_steps", [10, 0], ids=["on the way", "at the end"])
def test_sigterm_in_an_evaluation_ends_it_without_loss(tmp_path, every_steps):
    """It is in the second of sixteen batches, and never comes to the fourth."""
    held, _never = gates(tmp_path, 12, 14)
    ends = settings_of(run__steps=20 if every_steps else 10, run__evaluate_every=every_steps)
    with running_swarm(1, tmp_path, *SMALL, *held.settings, *ends) as swarm:
        worker = swarm.start("w0")
        worker.wait_for(lambda e: e.get("state") == "evaluating", "an evaluation")
        worker.send(signal.SIGTERM)
        with held.opened():
            assert worker.wait() == 0
        result = worker.result
    assert (result["step"] >= 10, result["val_loss"]) == (True, None)
    assert result["reason"] == ("SIGTERM" if every_steps else "finished")
    assert load_one(Path(result["checkpoint"])).values["step"] == result["step"]
    for event in worker.events:  # wall-clock time with its zone, and seconds since the start
        assert datetime.fromisoformat(event["at"]).utcoffset() is not None
        assert event["time_s"] >= 0


def test_sigterm_while_a_checkpoint_is_written_ends_it_and_loses_nothing(tmp_path):
    slow, settings = tmp_path / "fsync", settings_of(checkpoint__every_s=0.01)
    with running_swarm(1, tmp_path, *ENDLESS, *settings) as swarm:
        swarm.programs["w0"] = ("tests.support.slow_disk", str(slow))
        worker = swarm.start("w0")
        worker.wait_for(lambda e: e["event"] == "checkpoint", "a checkpoint")
        os.mkfifo(slow)
        with slow.open("w") as writing:  # which waits until somebody reads it: an fsync
            worker.send(signal.SIGTERM)
            slow.unlink()
            writing.write("0")
        assert worker.wait() == 0
        result = worker.result
    assert result["reason"] == "SIGTERM"
    assert load_one(Path(result["checkpoint"])).values["step"] == result["step"]
    assert not list((tmp_path / "w0/checkpoints").glob(".partial-*"))


def test_sigterm_ends_a_join_that_has_no_answer_yet_with_0(tmp_path):
    """Nothing is begun, and no folder stays."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE_S)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with WorkerProcess(["join", address, "--out", str(tmp_path / "out")], "joiner") as joiner:
            connection, _ = silent.accept()
            with connection:
                joiner.send(signal.SIGTERM)
                assert joiner.wait() == 0
    assert joiner.errors == ""
    assert not (tmp_path / "out").exists()
