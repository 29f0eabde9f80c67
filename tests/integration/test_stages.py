"""A model in stages, as `murmur swarm` trains it: one model at the end, also without a replica."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner

from murmuration.coordinator.asking import ask
from murmuration.protos.figures import measured
from murmuration.worker.cli import cli
from murmuration.worker.identity.certificates import member_identity
from tests.support.fork_server import MURMUR, ForkedPopen
from tests.support.gates import Gate
from tests.support.workers import PATIENCE_S, QUICK, looked, report_of, settings_of

SMALL = (
    "--stages", "3", "--workers", "6", "--inner-steps", "2",
    *settings_of(
        task__batch_size=2,
        task__context_bytes=32,
        task__architecture="{hidden_size=32, intermediate_size=64, num_hidden_layers=3, "
        "num_attention_heads=2, num_key_value_heads=2}",
        stages__microbatches=4,
        stages__activations="fp32",
    ),
)  # fmt: skip


@contextmanager
def swarm(out: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    """A swarm that is gone afterwards, whatever happens."""
    command = [*MURMUR, "swarm", *SMALL, "--out", str(out), *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = ForkedPopen(command, text=True, **pipes)
    try:
        assert process.stdout is not None
        with process.stdout:
            yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


def ended(process: "subprocess.Popen[str]", out: Path) -> tuple[dict[str, Any], str]:
    """The report of a swarm that ends in good order, and what it printed until then."""
    assert process.stdout is not None
    text = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0, text
    return report_of(out), text


def murmur(*args: str) -> str:
    """The output of a command, run in this process."""
    done = CliRunner().invoke(cli, args, catch_exceptions=False, standalone_mode=False)
    assert done.exit_code == 0
    return done.stdout


def loss_of(report: dict[str, Any]) -> str:
    return f"validation loss {measured(report['val_loss'], report['val_loss_error'])}"


def hashes(report: dict[str, Any], stage: int) -> set[tuple[str, str]]:
    """The hashes of anchors and momenta that the replicas of a stage reported."""
    peers = [peer for peer in report["peers"] if peer["stage"] == stage]
    return {(p["anchor_hash"], p["momentum_hash"]) for p in peers if p["anchor_hash"]}


def listening(out: Path, name: str) -> dict[str, Any]:
    """A worker's first word: its address and process."""
    event: dict[str, Any] = json.loads((out / name / "events.jsonl").read_text().splitlines()[0])
    assert event["event"] == "listening"
    return event


KILLED = ("w1", "w4")


def members_at(out: Path, name: str) -> list[dict[str, Any]]:
    """As a worker of the swarm in that folder knows them."""
    address = listening(out, name)["address"]
    members: list[dict[str, Any]] = ask(address, identity=member_identity(out))["members"]
    return members


def wait_for_stage(stage: int, out: Path, name: str, *phases: str) -> None:
    """Until the worker there knows of a peer in that stage and in one of the phases.

    Not of one that was killed: for a while the others still take it to be alive."""
    looked(
        lambda: members_at(out, name),
        lambda members: any(
            m["stage"] == stage
            and m["phase"] in phases
            and m["health"] == "alive"
            and m["peer"] not in KILLED
            for m in members
        ),
    )


def kill_stage_1(printed: IO[str], out: Path) -> None:
    """Both of its replicas, once training has started."""
    for line in printed:
        if "started at step" in line:
            break
    for name in KILLED:
        os.kill(listening(out, name)["pid"], signal.SIGKILL)


def test_three_stages_of_two_replicas_make_one_model(tmp_path):
    out = tmp_path / "run"
    with swarm(out, "--steps", "4") as process:
        report, text = ended(process, out)
    assert [peer["stage"] for peer in report["peers"]] == [0, 1, 2, 0, 1, 2]
    assert [peer["exit_code"] for peer in report["peers"]] == [0] * 6
    assert [len(hashes(report, stage)) for stage in range(3)] == [1, 1, 1]
    assert len({each for stage in range(3) for each in hashes(report, stage)}) == 3
    assert report["hashes_agree"]
    assert report["params"] == 2 * 256 * 32 + 32 + 3 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)
    assert "equal within each of 3 stages, bit for bit" in text
    assert report["rounds_completed"] == 2
    stages = report["stages"]
    # Two origins, 4 iterations, 4 microbatches, 3 stages; and all of them came back.
    assert stages["counts"]["visits"] == 2 * 4 * 4 * 3
    assert [stages["counts"][key] for key in ("rerouted", "skipped", "dropped")] == [0, 0, 0]
    activation_bytes = 4 * 2 * 32 * 32  # fp32 of (B, T, D)
    # To each of the next two stages and to the loss, and as much of gradients back.
    sent = 2 * 4 * 4 * 2 * 3 * activation_bytes / (6 * 4)
    assert stages["activation_bytes_per_iteration"] == pytest.approx(sent, rel=0.1)
    assert 0 < stages["in_flight_peak_bytes"] <= stages["in_flight_limit_bytes"]
    assert 0 < stages["iteration_s"] <= stages["iteration_p95_s"]
    whole = Path(report["checkpoint"])
    assert whole.parent == out / "w0" / "assembled"
    assert loss_of(report) in murmur("evaluate", str(out))
    assert murmur("generate", str(out), "def ", "--bytes", "20").startswith("def ")
    again = Path(murmur("assemble", str(out)).strip())
    assert again == out / "assembled" / whole.name
    assert loss_of(report) in murmur("evaluate", str(again))


def test_a_stage_whose_replicas_are_all_killed_is_rebuilt(tmp_path):
    out, fifo = tmp_path / "run", tmp_path / "gate"
    os.mkfifo(fifo)
    settings = settings_of(
        task__name='"tests.support.gates:GatedOrigins"', task__gate=f'"{fifo}"', task__gate_batch=10
    )
    held, printed = Gate(fifo, tuple(settings)), []
    with swarm(out, "--steps", "6", *QUICK, *held.settings) as process:
        assert process.stdout is not None
        kill_stage_1(process.stdout, out)
        for line in process.stdout:
            printed.append(line)
            if "rebuilt stage 1" in line:
                break
        for name in ("w0", "w3"):
            wait_for_stage(1, out, name, "ready", "training")
        with held.opened():
            report, _ = ended(process, out)
    codes = {peer["peer"]: peer["exit_code"] for peer in report["peers"]}
    assert codes == {"w0": 0, "w1": -9, "w2": 0, "w3": 0, "w4": -9, "w5": 0}
    moving = [line for line in printed if "moves from stage 2 to stage 1" in line]
    assert len(moving) == 1, printed
    # By links that were measured, or the last by name: either leaves stage 2 a replica.
    (mover,) = [name for name in ("w2", "w5") if f"{name}: moves" in moving[0]]
    assert sum("stage 1 has no replica left" in line for line in printed) == 1, printed
    events = [json.loads(line) for line in (out / mover / "events.jsonl").read_text().splitlines()]
    (moves,) = [event for event in events if event["event"] == "moves"]
    assert (moves["stage"], moves["to"]) == (2, 1)
    (rebuilt,) = [event for event in events if event["event"] == "rebuilt"]
    assert rebuilt["stage"] == 1
    assert sum(rebuilt["from"].values()) == pytest.approx(1, abs=0.01)
    assert rebuilt["from"].keys() == {"0", "2"}
    stages = {peer["peer"]: peer["stage"] for peer in report["peers"] if peer["exit_code"] == 0}
    assert stages == {"w0": 0, "w2": 2, "w3": 0, "w5": 2} | {mover: 1}
    assert Path(report["checkpoint"]).parent == out / "w0" / "assembled"
    assert loss_of(report) in murmur("evaluate", str(out))


def test_who_is_done_waits_for_a_stage_that_is_being_rebuilt(tmp_path):
    out = tmp_path / "run"
    origins, anew = tmp_path / "origins", tmp_path / "anew"
    for fifo in (origins, anew):
        os.mkfifo(fifo)
    settings = settings_of(
        task__name='"tests.support.gates:GatedRebuild"',
        task__gate=f'"{origins}"',
        task__gate_batch=10,
        task__gate_anew=f'"{anew}"',
        task__gate_layer=1,
    )
    with swarm(out, "--steps", "6", *QUICK, *settings) as process:
        assert process.stdout is not None
        kill_stage_1(process.stdout, out)
        origin_names = ("w0", "w3")
        for name in origin_names:
            wait_for_stage(1, out, name, "starting")
        with Gate(origins, ()).opened():
            for name in origin_names:
                wait_for_stage(0, out, name, "done")
                wait_for_stage(2, out, name, "done")
            with Gate(anew, ()).opened():
                report, text = ended(process, out)
    codes = {peer["peer"]: peer["exit_code"] for peer in report["peers"]}
    assert codes == {"w0": 0, "w1": -9, "w2": 0, "w3": 0, "w4": -9, "w5": 0}
    assert {peer["step"] for peer in report["peers"] if peer["exit_code"] == 0} == {6}
    assert "no whole model" not in text
    assert loss_of(report) in murmur("evaluate", str(out))
