"""`murmur swarm`, as a newcomer runs it: trains, reports, leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from murmuration.protos.figures import measured
from tests.support.fork_server import MURMUR as FORKED, ForkedPopen, run
from tests.support.workers import ENDLESS, PATIENCE_S, SMALL, report_of, swarm_ended

AS_INSTALLED = (sys.executable, "-m", "murmuration.worker.cli")


def murmur(*args: str, program: Sequence[str] = AS_INSTALLED) -> "subprocess.CompletedProcess[str]":
    if program == AS_INSTALLED:
        words = [*program, *args]
        return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    return run([*program, *args], timeout=PATIENCE_S)


def processes_of(folder: Path) -> set[str]:
    """Those that have files of this folder open."""
    found = set()
    for held in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended
            if os.readlink(held).startswith(str(folder)):
                found.add(held.parts[2])
    return found - {str(os.getpid())}


@pytest.mark.parametrize("preset", ["diloco", "local"])
def test_a_swarm_trains_and_reports(tmp_path, preset):
    out, report_path = tmp_path / "out", tmp_path / "report.json"
    done = murmur(
        "swarm", "--workers", "2", "--preset", preset, "--steps", "24", "--inner-steps", "10",
        "--set", "exchange.compression=never",  # bytes are counted below
        "--seed", "5", "--out", str(out), "--json", str(report_path), *SMALL,
        program=AS_INSTALLED if preset == "diloco" else FORKED,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(report_path.read_text())
    assert (report["preset"], report["workers"], report["seed"]) == (preset, 2, 5)
    rounds = {"diloco": 3, "local": 0}[preset]
    assert (report["rounds_completed"], report["rounds_failed"]) == (rounds, 0)
    assert [peer["exit_code"] for peer in report["peers"]] == [0, 0]
    assert 0 < report["compute_utilization"] <= 1
    hashes = {peer["anchor_hash"] for peer in report["peers"]}
    assert len(hashes) == (2 if preset == "local" else 1)
    payload_bytes = 4 * report["params"]  # 2 (n-1)/n is 1 for two workers
    for peer in report["peers"]:
        assert peer["payload_bytes_sent"] == rounds * payload_bytes
        assert peer["bytes_sent"] >= peer["payload_bytes_sent"]
    assert measured(report["val_loss"], report["val_loss_error"]) in done.stdout
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert processes_of(tmp_path) == set()
    if preset == "diloco":
        written = murmur("generate", str(out), "def ", "--bytes", "20", program=FORKED)
        assert written.returncode == 0
        assert written.stdout.startswith("def ")


def test_ctrl_c_saves_and_still_reports(tmp_path):
    command = [*FORKED, "swarm", "--workers", "2", "--out", str(tmp_path / "out"), *ENDLESS]
    swarm = ForkedPopen(command, stdout=subprocess.PIPE, text=True)
    assert swarm.stdout is not None
    with swarm.stdout:
        for line in swarm.stdout:
            if " rounds " in line and "rounds 0 " not in line:
                break
        assert len(processes_of(tmp_path)) >= 2
        os.killpg(swarm.pid, signal.SIGINT)
        rest = swarm.stdout.read()
    assert swarm.wait(PATIENCE_S) == 130
    report = report_of(tmp_path / "out")
    assert report["rounds_completed"] > 0
    assert all(Path(peer["checkpoint"]).is_dir() for peer in report["peers"])
    assert "checkpoint" in rest
    assert processes_of(tmp_path) == set()


def test_a_swarm_behind_the_relay(tmp_path):
    """`murmur swarm` with three small workers and twenty rounds, as a user runs it."""
    given = ("--workers", "3", "--steps", "40", "--inner-steps", "2", "--link", "20mbit")
    # Whoever has a proxy for the web has exceptions from it; they must not count here.
    env = {**os.environ, "no_proxy": "*", "NO_PROXY": "*"}
    done = swarm_ended(tmp_path, *given, *SMALL, env=env)
    assert done.returncode == 0, done.stderr
    assert "links: 20mbit each way" in done.stdout
    report = report_of(tmp_path)
    assert report["hashes_agree"]
    assert (report["step"], report["rounds_completed"], report["rounds_failed"]) == (40, 20, 0)
    assert report["link"] == "20mbit"
    for peer in report["peers"]:  # nothing went past it, or faster
        for moved in (peer["bytes_sent"], peer["bytes_received"]):
            assert moved / peer["wall_s"] <= 1.1 * 20e6 / 8
        over_link = report["link_bytes"][peer["peer"]]
        assert over_link["sent_bytes"] == pytest.approx(peer["bytes_sent"], rel=0.05)
        assert over_link["received_bytes"] == pytest.approx(peer["bytes_received"], rel=0.05)
