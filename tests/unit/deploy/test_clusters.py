"""Kubernetes, SkyPilot and Slurm: that they type what a worker takes; Kubernetes by its schemas."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from murmuration.worker.cli.commands import join, up
from murmuration.worker.config import load_config

DEPLOY = Path(__file__).parents[3] / "deploy"
FOLDER = DEPLOY / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
SKYPILOT: dict[str, Any] = yaml.safe_load((DEPLOY / "skypilot/murmuration.yaml").read_text())

Resource = dict[str, Any]
Start = Callable[..., "subprocess.Popen[str]"]


def resources() -> dict[str, Resource]:
    """By kind."""
    found = [yaml.safe_load((FOLDER / name).read_text()) for name in KUSTOMIZATION["resources"]]
    return {each["kind"]: each for each in found}


def worker() -> Resource:
    (container,) = resources()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def check(resource: Resource, version: str) -> None:
    """Raises: it is not as that version of Kubernetes has it."""
    kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", ["1.27", "1.32", "1.36"])
def test_every_resource_is_as_kubernetes_has_it(version):
    assert set(resources()) == {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
    for each in resources().values():
        check(each, version)
    broken = resources()["StatefulSet"]
    broken["spec"]["replicaz"] = broken["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        check(broken, version)
    load_config(FOLDER / "run.toml", [])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kustomize_builds_them_with_the_runs_toml():
    command = ["kubectl", "kustomize", FOLDER]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {each["kind"]: each for each in yaml.safe_load_all(built)}
    assert set(found) == {*resources(), "ConfigMap"}
    for each in found.values():
        check(each, "1.36")
    (volume,) = (
        each["configMap"]["name"]
        for each in found["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
        if "configMap" in each
    )
    assert volume == found["ConfigMap"]["metadata"]["name"]
    assert found["ConfigMap"]["data"] == {"run.toml": (FOLDER / "run.toml").read_text()}


@pytest.mark.parametrize(("pod", "others"), [(0, (1, 2)), (2, (0, 1)), (7, (0, 1, 2))])
def test_a_pod_runs_a_worker_that_joins_the_others(start, typed, pod, others):
    name = f"murmuration-{pod}"
    command = [word.replace("/etc/murmuration", str(FOLDER)) for word in worker()["command"]]
    with start(command, {}, HOSTNAME=name) as script:
        assert script.wait() == 0
    given = typed(up)
    assert (given["name"], given["advertise"]) == (name, f"{name}.murmuration:7700")
    assert list(given["joins"]) == [f"murmuration-{each}.murmuration:7700" for each in others]
    assert given["metrics"] == "0.0.0.0:9464"


def test_a_job_joins_under_its_own_name_and_leaves_on_the_clouds_notice(start, typed, tmp_path):
    (tmp_path / "murmuration" / "bin").mkdir(parents=True)
    (tmp_path / "murmuration" / "bin" / "murmur").symlink_to(tmp_path / "murmur")
    programs = {"curl": "#!/bin/sh\necho 203.0.113.7\n"}
    script = SKYPILOT["run"].replace("/out/", f"{tmp_path}/out/")
    environment = {**SKYPILOT["envs"], "ADDRESS": "first.example:7700", "WORKER": "w3"}
    with start(["bash", "-c", script], programs, HOME=str(tmp_path), **environment) as job:
        assert job.wait() == 0
    expected = {
        "words": ("first.example:7700",), "name": "w3", "listen": "0.0.0.0:7700",
        "advertise": "203.0.113.7:7700", "leave_on": SKYPILOT["envs"]["NOTICE"],
        "out": tmp_path / "worker",
    }  # fmt: skip
    assert typed(join).items() >= expected.items()
    assert SKYPILOT["secrets"] == {"MURMUR_TOKEN": None}
    assert SKYPILOT["resources"]["ports"] == [7700]


@pytest.fixture
def task(start: Start, tmp_path: Path) -> Start:
    """A task of Slurm's array job, by its number."""

    def begin(number: int, *more: str, **environment: str) -> "subprocess.Popen[str]":
        return start(
            ["bash", DEPLOY / "slurm" / "murmuration.sbatch", *more],
            {"scontrol": '#!/bin/sh\necho "$@" > "$FOLDER/asked"\n'},
            **{"MURMUR_RUN": str(tmp_path / "run"), "SLURM_ARRAY_TASK_ID": str(number)},
            **{"SLURM_ARRAY_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "2", **environment},
        )

    return begin


def test_each_task_joins_those_that_came_before_it(task, typed):
    host = socket.gethostname()
    for number, joined in ((0, []), (1, [f"{host}:7700"]), (0, [f"{host}:7701"])):
        with task(number, "--steps", "50", CODE="4") as job:
            assert job.wait() == 4  # the worker's own
        given = typed(up)
        assert list(given["joins"]) == joined
        assert (given["advertise"], given["name"]) == (f"{host}:770{number}", f"task-{number}")
        assert given["steps"] == 50


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_before_its_time_limit_a_task_queues_itself_again(task, tmp_path, number, requeued):
    with task(3, STAYS="yes") as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "trains\n"
        if not requeued:  # Slurm sends it to every process of the task
            (worker,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            os.kill(int(worker), number)
        job.send_signal(number)
        assert job.wait() == 0
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 17_3\n" if requeued else "")
