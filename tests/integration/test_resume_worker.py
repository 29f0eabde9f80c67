"""A worker that was stopped with rounds on their way goes on as if it had not been, and further."""

import signal
from pathlib import Path

import pytest

from tests.support.gate import gate
from tests.support.workers import SMALL, Hashes, running_swarm, settings_of

STREAMING = settings_of(
    run__steps=40,
    diloco__preset="streaming",
    diloco__inner_steps=8,
    diloco__overlap_steps=6,
    inner__warmup_steps=0,
)


@pytest.mark.parametrize("preset", ["streaming", "onebit"])
def test_a_worker_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, preset: str
) -> None:
    held = gate(tmp_path, 20)
    settings = (*SMALL, *STREAMING, *settings_of(diloco__preset=preset), *held.settings)
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
