"""Slurm's array job, run by hand: how workers find each other, and what a signal does."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from murmuration.worker.cli.commands import up

SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "murmuration.sbatch"
MURMUR = """#!/bin/bash
printf '%s\\n' "$@" > "$MURMUR_RUN/typed-$SLURM_ARRAY_TASK_ID"
[ -z "$STAYS" ] && exit 4
trap 'exit 0' TERM
mkfifo "$MURMUR_RUN/silent"
exec 3<>"$MURMUR_RUN/silent"
echo trains
read -r -u 3
"""


def start(folder: Path, task: int, *more: str, **environment: str) -> "subprocess.Popen[str]":
    """The script of one task, with a `murmur` and a `scontrol` that only tell of themselves."""
    for name, text in (
        ("murmur", MURMUR),
        ("scontrol", '#!/bin/sh\necho "$@" > "$MURMUR_RUN/scontrol"\n'),
    ):
        program = folder / name
        program.write_text(text)
        program.chmod(0o755)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    return subprocess.Popen(
        ["bash", SCRIPT, *more],
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "MURMUR_RUN": str(run),
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_ARRAY_JOB_ID": "17",
            "SLURM_CPUS_PER_TASK": "2",
            **environment,
        },
        stdout=subprocess.PIPE,
        text=True,
    )


def test_each_task_joins_those_that_came_before_it(tmp_path: Path) -> None:
    typed: list[list[str]] = []
    for task in (0, 1, 0):
        with start(tmp_path, task, "--steps", "50") as job:
            assert job.wait() == 4  # the worker's own
        command, *words = (tmp_path / "run" / f"typed-{task}").read_text().splitlines()
        assert command == "up"
        typed.append(words)
    host = socket.gethostname()
    found = [up.make_context("up", words).params for words in typed]
    assert [list(each["joins"]) for each in found] == [[], [f"{host}:7700"], [f"{host}:7701"]]
    assert [each["advertise"] for each in found] == [f"{host}:770{task}" for task in (0, 1, 0)]
    assert [each["name"] for each in found] == ["task-0", "task-1", "task-0"]
    assert {each["steps"] for each in found} == {50}


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_before_its_time_limit_a_task_queues_itself_again(
    tmp_path: Path, number: signal.Signals, requeued: bool
) -> None:
    with start(tmp_path, 3, STAYS="yes") as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "trains\n"
        if not requeued:  # Slurm sends it to every process of the task
            (worker,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            os.kill(int(worker), number)
        job.send_signal(number)
        assert job.wait() == 0
    asked = tmp_path / "run" / "scontrol"
    assert asked.exists() == requeued
    if requeued:
        assert asked.read_text() == "requeue 17_3\n"
