"""Prometheus and Grafana beside the containers: what they ask for is there."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from murmuration.worker.status.exporter import metrics_of
from tests.support.worker_status import STATUS

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "observe" / "dashboard.json").read_text())
OF_THE_PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def test_the_dashboard_asks_for_metrics_and_labels_that_a_worker_has() -> None:
    full = {**STATUS, "loss": 2.5, "samples": 480, "samples_per_s": 38.0}
    samples = [sample for family in metrics_of(full) for sample in family.samples]
    names = {sample.name for sample in samples}
    labels = {label for sample in samples for label in sample.labels}
    asked: set[str] = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            found = set(re.findall(r"\b(?:murmuration|process)_\w+", target["expr"]))
            assert found, panel["title"]
            asked |= found
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
    assert asked <= names | OF_THE_PROCESS
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"][1:]]
    assert all(name in names for text in variables for name in re.findall(r"murmuration_\w+", text))


def test_prometheus_scrapes_every_worker_of_the_containers() -> None:
    (job,) = yaml.safe_load((DEPLOY / "observe" / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    (port,) = re.findall(r"--metrics 0\.0\.0\.0:(\d+)", (DEPLOY / "worker.sh").read_text())
    assert found == {"names": ["worker"], "type": "A", "port": int(port)}  # of each container
    assert compose()["services"]["worker"]["deploy"]["endpoint_mode"] == "dnsrr"


def test_what_is_mounted_is_there_and_nothing_but_this_machine_can_read_the_charts() -> None:
    observers = {name: each for name, each in compose()["services"].items() if "ports" in each}
    assert set(observers) == {"prometheus", "grafana"}
    for service in observers.values():
        assert service["profiles"] == ["observe"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((DEPLOY / each).is_file() for each in sources if each.startswith("."))


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="no docker-compose here")
def test_compose_takes_the_file() -> None:
    command = ["docker-compose", "-f", DEPLOY / "compose.yaml", "--profile", "observe", "config"]
    checked = subprocess.run([*command, "-q"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
