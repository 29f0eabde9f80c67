"""`murmur swarm --resume` of a model in stages: each worker goes on with the stage it has."""

import json
import shutil
import subprocess
from pathlib import Path

from tests.support.fork_server import MURMUR
from tests.support.workers import PATIENCE_S, SMALL


def swarm(out: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    command = [
        *MURMUR, "swarm", "--stages", "2", "--replicas", "1", "--steps", "4", "--inner-steps", "2",
        "--out", str(out), *SMALL, *args,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def stages(out: Path) -> list[int]:
    return [json.loads((out / name / "result.json").read_text())["stage"] for name in ("w0", "w1")]


def test_workers_keep_the_stages_that_they_have_moved_to(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = swarm(out)
    assert first.returncode == 0, first.stderr
    assert stages(out) == [0, 1]
    (out / "w0").rename(out / "moved")
    (out / "w1").rename(out / "w0")
    (out / "moved").rename(out / "w1")
    resumed = swarm(out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert stages(out) == [1, 0]

    shutil.rmtree(out / "w0" / "checkpoints")
    refused = swarm(out, "--resume")
    assert refused.returncode == 8
    (line,) = refused.stderr.splitlines()
    assert "not of stages 0 to 1, one of each worker's: w0 of none, w1 of 0" in line
