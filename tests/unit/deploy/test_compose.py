"""compose.yaml: how a container starts its worker, the file as a Swarm stack, and the charts."""

import json
import re
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from murmuration.worker.cli.commands import up
from murmuration.worker.status.exporter import metrics_of
from tests.support.worker_status import STATUS

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
DASHBOARD = json.loads((DEPLOY / "observe" / "dashboard.json").read_text())
OF_THE_PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
# The script as it goes on without rights, in a container whose name has an address.
PROGRAMS = {
    "id": "#!/bin/sh\necho 10001\n",
    "getent": '#!/bin/sh\n[ "$*" = "ahostsv4 0123abcd" ] && echo "10.0.1.7 STREAM 0123abcd"\n',
}
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def container(start: Start) -> Start:
    script = ["sh", DEPLOY / "worker.sh"]
    return partial(start, script, PROGRAMS, HOSTNAME="0123abcd", MIN_PEERS="4")


@pytest.mark.parametrize(
    ("slot", "name"), [("{{.Task.Slot}}", "0123abcd"), ("3", "worker-3"), ("", "0123abcd")]
)
def test_a_container_types_what_a_worker_takes(container, typed, slot, name):
    given = {"SLOT": slot, "PRESET": "diloco", "STEPS": "50"}
    with container(CODE="4", MURMUR_ARGS="--seed 3 --model tiny", **given) as script:
        assert script.wait() == 4  # the worker's own
    expected = {
        "name": name, "out": Path("/out") / name, "advertise": "10.0.1.7:7700",
        "metrics": "0.0.0.0:9464", "coordinator": "coordinator:7600", "steps": 50,
        "preset": "diloco", "seed": 3, "min_peers": 4,
    }  # fmt: skip
    assert typed(up).items() >= expected.items()


@pytest.mark.parametrize(
    ("stays", "says"), [("yes", "trains\n"), ("", "the run is over; ")], ids=["trains", "over"]
)
def test_a_container_that_is_always_started_again_ends_when_it_is_told_to(container, stays, says):
    """It passes the signal on and waits for its worker, and stays when its run is over."""
    with container(STAYS=stays, RESTART="unless-stopped") as script:
        assert script.stdout is not None
        assert script.stdout.readline().startswith(says)
        script.send_signal(signal.SIGTERM)
        assert script.wait() == 0


def test_another_container_ends_with_its_run(container):
    with container(RESTART="no") as script:
        assert script.wait() == 0


def test_the_stack_is_the_same_file_without_the_charts():
    charts = {name for name, each in SERVICES.items() if "profiles" in each}
    assert charts == {"prometheus", "grafana"}
    (command,) = re.findall(r"sed '([^']+)' deploy/compose.yaml", COMPOSE)  # its first lines say so
    sed = subprocess.run(
        ["sed", command], input=COMPOSE, capture_output=True, text=True, check=True
    )
    stacked = yaml.safe_load(sed.stdout)["services"]
    assert stacked == {name: each for name, each in SERVICES.items() if name not in charts}
    for service in stacked.values():
        assert service["restart"] == "${RESTART:-unless-stopped}"
        assert "ports" not in service


def test_the_dashboard_asks_for_metrics_and_labels_that_a_worker_has():
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


def test_what_is_mounted_is_there_and_nothing_but_this_machine_can_read_the_charts():
    observers = {name: each for name, each in SERVICES.items() if "ports" in each}
    assert set(observers) == {"prometheus", "grafana"}
    for service in observers.values():
        assert service["profiles"] == ["observe"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((DEPLOY / each).is_file() for each in sources if each.startswith("."))
