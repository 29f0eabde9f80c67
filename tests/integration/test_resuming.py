"""A worker, a trainer or a swarm that was stopped goes on as if it had not been."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support.gates import gate
from tests.support.workers import SMALL, Hashes, running_swarm, settings_of, swarm_ended

ONEBIT = settings_of(
    run__steps=40,
    diloco__preset="onebit",
    diloco__inner_steps=8,
    diloco__overlap_steps=6,
    inner__warmup_steps=0,
)


def test_a_worker_that_was_stopped_ends_with_the_bits_of_one_that_was_not(tmp_path):
    held = gate(tmp_path, 20)
    settings = (*SMALL, *ONEBIT, *held.settings)
    with (
        running_swarm(1, tmp_path / "cut", *settings) as swarm,
        running_swarm(1, tmp_path / "whole", *settings) as undisturbed,
    ):
        swarm.start("w0").wait_for_round(0)
        swarm.workers["w0"].send(signal.SIGTERM)
        with held.opened():
            assert swarm.wait()["w0"]["step"] <= 20
            undisturbed.start("w0")
            whole = undisturbed.wait()["w0"]
            swarm.start("w0")
            assert Hashes.of(swarm.wait()["w0"]) == Hashes.of(whole)
            swarm.start("w0", "--set", "run.steps=48")
            assert swarm.wait()["w0"]["step"] == 48
            refused = swarm.start("w0", "--set", "run.seed=1")
            assert refused.wait() == 8
    assert "run.seed: 0 in it, 1 asked for" in refused.errors


def swarm(out: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    sizes = ("--stages", "2", "--workers", "2", "--steps", "4", "--inner-steps", "2")
    return swarm_ended(out, *sizes, *SMALL, *args)


def stages(out: Path) -> list[int]:
    return [json.loads((out / name / "result.json").read_text())["stage"] for name in ("w0", "w1")]


def test_workers_keep_the_stages_that_they_have_moved_to(tmp_path):
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
    assert f"{out / 'w0' / 'checkpoints'}: no usable checkpoint" in line
