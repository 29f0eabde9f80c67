"""SkyPilot's task: by its schema where SkyPilot is installed, and that it types what a worker has.

SkyPilot is none of our dependencies, since it brings a web server and a database. To check the
file, run this test in an environment that has both: `pip install skypilot`.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from murmuration.worker.cli.commands import join

FILE = Path(__file__).parents[3] / "deploy" / "skypilot" / "murmuration.yaml"
TASK: dict[str, Any] = yaml.safe_load(FILE.read_text())


def test_skypilot_takes_the_file() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="no skypilot here")
    from jsonschema import Draft7Validator

    Draft7Validator(schemas.get_task_schema()).validate(TASK)
    Draft7Validator(schemas.get_resources_schema()).validate(TASK["resources"])
    with pytest.raises(Exception, match="use_spots"):
        Draft7Validator(schemas.get_resources_schema()).validate(
            TASK["resources"] | {"use_spots": True}
        )


def test_a_job_joins_under_its_own_name_and_leaves_on_the_clouds_notice(tmp_path: Path) -> None:
    programs = tmp_path / "murmuration" / "bin"
    programs.mkdir(parents=True)
    for path, text in (
        (programs / "murmur", "#!/bin/sh\nprintf '%s\\n' \"$@\"\n"),
        (tmp_path / "curl", "#!/bin/sh\necho 203.0.113.7\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    environment = {**TASK["envs"], "ADDRESS": "first.example:7700", "WORKER": "w3"}
    environment |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = TASK["run"].replace("/out/", f"{tmp_path}/out/")
    said = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout
    command, *words = said.splitlines()
    assert command == "join"
    typed = join.make_context("join", words).params
    assert (typed["words"], typed["name"]) == (("first.example:7700",), "w3")
    assert (typed["listen"], typed["advertise"]) == ("0.0.0.0:7700", "203.0.113.7:7700")
    assert typed["leave_on"] == TASK["envs"]["NOTICE"]
    assert typed["out"] == tmp_path / "out" / "w3"
    assert TASK["secrets"] == {"MURMUR_TOKEN": None}
    assert TASK["resources"]["ports"] == [7700]
