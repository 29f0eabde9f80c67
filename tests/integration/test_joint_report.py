"""Peers without a coordinator end with one report of all, the killed one among them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.workers import QUICK, running_swarm, settings_of

RUN = settings_of(run__steps=200, diloco__inner_steps=10)
PACED = settings_of(task__name="tests.support.slow_task:SlowBytes", task__pause_s=0.05)


def murmur(*words: str) -> str:
    command = [sys.executable, "-m", "murmuration.worker.cli", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_every_peer_ends_with_the_report_of_all_and_names_the_dead(tmp_path: Path) -> None:
    with running_swarm(3, tmp_path, *PACED, *QUICK, *RUN) as swarm:
        swarm.start_all()
        swarm.workers["w2"].wait_for_round(1)
        swarm.workers["w2"].send(signal.SIGKILL)
        results = swarm.wait("w0", "w1")
    reports = {name: report_of(tmp_path / name) for name in ("w0", "w1")}
    for report in reports.values():
        peers = {peer["peer"]: peer for peer in report["peers"]}
        assert sorted(peers) == swarm.names
        assert (peers["w2"]["state"], peers["w2"]["anchor_hash"]) == ("dead", None)
        assert 10 <= peers["w2"]["step"] < 200
        for name, result in results.items():
            assert peers[name]["anchor_hash"] == result["anchor_hash"]
            assert peers[name]["state"] == "done"
        assert report["hashes_agree"] is True
    lines = (tmp_path / "w0" / "report.txt").read_text()
    assert "w2" in lines
    assert "all 2 that reported hold identical anchors" in lines
    printed = murmur("report", str(tmp_path / "w1"), "--no-picture")
    assert printed == (tmp_path / "w1" / "report.txt").read_text()
    assert not (tmp_path / "w2" / "report.json").exists()
