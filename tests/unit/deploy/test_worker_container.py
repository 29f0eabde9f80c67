"""How a container of compose.yaml starts its worker, run by hand; and the file as a Swarm stack."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from murmuration.worker.cli.commands import up

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
MURMUR = """#!/bin/bash
printf '%s\\n' "$@" > "$FOLDER/typed"
[ -z "$STAYS" ] && exit "$CODE"
trap 'exit 0' TERM
mkfifo "$FOLDER/silent"
exec 3<>"$FOLDER/silent"
echo trains
read -r -u 3
"""
# The script as it goes on without rights, in a container whose name has an address.
PROGRAMS = {
    "murmur": MURMUR,
    "id": "#!/bin/sh\necho 10001\n",
    "getent": '#!/bin/sh\n[ "$*" = "ahostsv4 0123abcd" ] && echo "10.0.1.7 STREAM 0123abcd"\n',
}


def start(folder: Path, **environment: str) -> "subprocess.Popen[str]":
    """The script, with a `murmur` that only tells of itself."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FOLDER": str(folder),
        "HOSTNAME": "0123abcd",
        "MIN_PEERS": "4",
        "CODE": "0",
        **environment,
    }
    return subprocess.Popen(
        ["sh", DEPLOY / "worker.sh"], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("slot", "name"), [("{{.Task.Slot}}", "0123abcd"), ("3", "worker-3"), ("", "0123abcd")]
)
def test_a_container_types_what_a_worker_takes(tmp_path: Path, slot: str, name: str) -> None:
    given = {
        "SLOT": slot,
        "PRESET": "diloco",
        "STEPS": "50",
        "MURMUR_ARGS": "--seed 3 --model tiny",
    }
    with start(tmp_path, CODE="4", **given) as container:
        assert container.wait() == 4  # the worker's own
    command, *words = (tmp_path / "typed").read_text().splitlines()
    assert command == "up"
    typed = up.make_context("up", words).params
    assert (typed["name"], typed["out"]) == (name, Path("/out") / name)
    assert (typed["advertise"], typed["metrics"]) == ("10.0.1.7:7700", "0.0.0.0:9464")
    assert typed["coordinator"] == "coordinator:7600"
    assert (typed["steps"], typed["preset"], typed["seed"], typed["min_peers"]) == (
        50, "diloco", 3, 4,
    )  # fmt: skip


def test_a_container_passes_a_signal_on_and_waits_for_its_worker(tmp_path: Path) -> None:
    with start(tmp_path, STAYS="yes", RESTART="unless-stopped") as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "trains\n"
        container.send_signal(signal.SIGTERM)
        assert container.wait() == 0
        assert container.stdout.read() == ""


def test_a_container_that_is_always_started_again_stays_when_its_run_is_over(
    tmp_path: Path,
) -> None:
    with start(tmp_path, RESTART="unless-stopped") as container:
        assert container.stdout is not None
        assert container.stdout.readline().startswith("the run is over")
        container.send_signal(signal.SIGTERM)
        assert container.wait() == 0
    with start(tmp_path, RESTART="no") as container:
        assert container.wait() == 0


def stack() -> str:
    """As the first lines of the file say."""
    (command,) = re.findall(r"sed '([^']+)' deploy/compose.yaml", COMPOSE)
    return subprocess.run(
        ["sed", command], input=COMPOSE, capture_output=True, text=True, check=True
    ).stdout


def test_the_stack_is_the_same_file_without_the_charts() -> None:
    whole, stacked = yaml.safe_load(COMPOSE), yaml.safe_load(stack())
    charts = {name for name, each in whole["services"].items() if "profiles" in each}
    assert charts == {"prometheus", "grafana"}
    assert stacked["services"] == {
        name: each for name, each in whole["services"].items() if name not in charts
    }
    for service in stacked["services"].values():
        assert service["restart"] == "${RESTART:-unless-stopped}"
        assert "ports" not in service


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker here")
def test_docker_takes_the_stack() -> None:
    asked = subprocess.run(
        ["docker", "stack", "config", "--help"], capture_output=True, check=False
    )
    if asked.returncode != 0 or b"--compose-file" not in asked.stdout:
        pytest.skip("this docker cannot check a stack file")
    command = ["docker", "stack", "config", "--compose-file", "-"]
    checked = subprocess.run(command, input=stack(), capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert yaml.safe_load(checked.stdout)["services"]["worker"]["deploy"]["replicas"] == 4
