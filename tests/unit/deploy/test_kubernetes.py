"""The manifests for Kubernetes: by its schemas, and that they type what a worker takes."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from murmuration.worker.cli.commands import up
from murmuration.worker.config import load_config

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
LABELS = {"app.kubernetes.io/name": "murmuration"}

Resource = dict[str, Any]


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
def test_every_resource_is_as_kubernetes_has_it(version: str) -> None:
    assert set(resources()) == {"Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
    for each in resources().values():
        check(each, version)
    broken = resources()["StatefulSet"]
    broken["spec"]["replicaz"] = broken["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        check(broken, version)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kustomize_builds_them_with_the_runs_toml() -> None:
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


def test_the_runs_toml_is_one() -> None:
    load_config(FOLDER / "run.toml", [])


def test_all_select_the_same_pods() -> None:
    found = {kind: each["spec"] for kind, each in resources().items()}
    assert found["StatefulSet"]["template"]["metadata"]["labels"] == LABELS
    assert found["Service"]["selector"] == LABELS
    assert found["NetworkPolicy"]["podSelector"] == {"matchLabels": LABELS}
    for kind in ("StatefulSet", "PodDisruptionBudget"):
        assert found[kind]["selector"] == {"matchLabels": LABELS}
    (service,) = {found["StatefulSet"]["serviceName"], resources()["Service"]["metadata"]["name"]}
    assert service == "murmuration"


@pytest.mark.parametrize(
    ("pod", "joined"),
    [
        ("murmuration-0", ["murmuration-1", "murmuration-2"]),
        ("murmuration-2", ["murmuration-0", "murmuration-1"]),
        ("murmuration-7", ["murmuration-0", "murmuration-1", "murmuration-2"]),
    ],
)
def test_a_pod_runs_a_worker_that_joins_the_others(
    tmp_path: Path, pod: str, joined: list[str]
) -> None:
    murmur = tmp_path / "murmur"
    murmur.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    murmur.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTNAME": pod}
    command, *typed = subprocess.run(
        worker()["command"], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert command == "up"
    typed[0] = str(FOLDER / "run.toml")
    given = up.make_context("up", typed).params
    assert given["name"] == pod
    assert given["advertise"] == f"{pod}.murmuration:7700"
    assert list(given["joins"]) == [f"{each}.murmuration:7700" for each in joined]
    assert given["metrics"] == "0.0.0.0:9464"


def test_probes_and_services_know_the_ports() -> None:
    ports = {each["name"]: each["containerPort"] for each in worker()["ports"]}
    assert ports == {"grpc": 7700, "metrics": 9464}
    probes = [
        worker()[f"{kind}Probe"]["grpc"]["port"] for kind in ("startup", "readiness", "liveness")
    ]
    assert set(probes) == {ports["grpc"]}
    served = {each["name"]: each["port"] for each in resources()["Service"]["spec"]["ports"]}
    assert served == ports
