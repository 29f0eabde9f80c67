"""What workers would refuse, said before any of them is started."""

import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from murmuration.worker.cli.preflight import preflight
from murmuration.worker.training import checkpoint

TEXT = f'task.text="{__file__}"'


def answer(*settings: str, **changes: object) -> dict[str, Any]:
    plain = {"config": None, "settings": [TEXT, *settings], "flags": {}, "presets": [None]}
    plain["resume"] = []
    return preflight({**plain, **changes})


def test_what_workers_take_is_taken() -> None:
    assert answer(presets=["diloco", "ddp", None]) == {"stages": 1, "held": []}
    assert answer("stages.count=3")["stages"] == 3


@pytest.mark.parametrize(
    ("settings", "code", "line"),
    [
        (["diloco.inner_step=5"], 3, "--set diloco.inner_step=5: [diloco] has no key 'inner_step'"),
        (
            ["stages.count=2", "stages.layers=[3, 1]"],
            3,
            "--set stages.layers=[3, 1]: [stages] count = 2: layers is [3, 1], 4 in all, but the "
            "model has 3; write 2 numbers that add up to 3, or leave layers out",
        ),
        (
            ["stages.count=3", "stages.layers=[2, 1]"],
            3,
            "--set stages.layers=[2, 1]: [stages] layers is [2, 1], of 2 stages, but count is 3; "
            "write one number for each stage, or set count to 2",
        ),
        (["task.modle=tiny"], 4, "--set task.modle=tiny: task 'llama-bytes' has no option 'modle'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refusal_has_its_line_and_exit_code(settings: list[str], code: int, line: str) -> None:
    found = answer(*settings)
    assert (found["exit_code"], found["preset"]) == (code, None)
    assert found["refused"].startswith(line)
    assert "\n" not in found["refused"]


def test_the_preset_that_is_refused_is_told() -> None:
    found = answer(presets=["local", "diloc"])
    assert found["preset"] == "diloc"
    assert found["refused"].startswith("--preset diloc: no preset 'diloc'; did you mean 'diloco'?")
    overlap = answer("diloco.overlap_steps=40", presets=["streaming", "diloco"])
    assert overlap["preset"] == "diloco"


def test_flags_are_named_as_they_were_typed() -> None:
    flags = {"diloco.inner_steps=0": "--inner-steps 0"}
    found = answer(settings=list(flags), flags=flags)
    assert found["refused"].startswith("--inner-steps 0: [diloco] inner_steps (H) is 0")
    flags = {TEXT: "--text TEXT", 'task.model="tny"': "--model tny"}
    found = answer(settings=list(flags), flags=flags)
    assert found["refused"] == "--model tny: unknown model 'tny'; did you mean 'tiny'?"


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[diloco]\ninner_step = 5\n")
    assert answer(config=str(path))["refused"].startswith(f"{path}: [diloco] has no key")
    missing = str(tmp_path / "missing.toml")
    assert answer(config=missing)["refused"].startswith(f"{missing}: cannot be read")


FRAGMENTS = "--set diloco.fragments=5: "


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["diloco.fragments=5"], FRAGMENTS + "[diloco] 5 fragments of 3 layers; use 1 to 3"),
        (
            ["diloco.fragments=2", "stages.count=2"],
            "--set diloco.fragments=2: stage 0: [diloco] 2 fragments of 1 layers; use 1 to 1",
        ),
        (
            ["diloco.fragments=2", "stages.count=2", "stages.layers=[2,1]"],
            "--set diloco.fragments=2: stage 1: [diloco] 2 fragments of 1 layers; use 1 to 1",
        ),
        (
            ["diloco.fragments=3", "diloco.inner_steps=2"],
            "--set diloco.fragments=3 and --set diloco.inner_steps=2: [diloco] 4 fragments do not",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_fragments_that_the_model_does_not_have_are_refused(settings: list[str], line: str) -> None:
    found = answer(*settings)
    assert (found["exit_code"], found["preset"]) == (3, None)
    assert found["refused"].startswith(line)


def test_fragments_are_those_of_each_preset() -> None:
    """Streaming has as many as there are layers, and one more: too many for a period of three."""
    found = answer("diloco.inner_steps=3", presets=["diloco", "streaming"])
    assert (found["exit_code"], found["preset"]) == (3, "streaming")
    line = "--set diloco.inner_steps=3: [diloco] 4 fragments do not fit into inner_steps = 3"
    assert found["refused"].startswith(line)


OWN = """
print("a module may print")

def build(*, seed, width=3):
    raise RuntimeError("what it does then is its own")
"""


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task_of_ones_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_task")
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ["task.name=nowhere:build"],
            "--set task.name=nowhere:build: task 'nowhere:build': no module named 'nowhere': "
            "install",
        ),
        (["task.name=task_of_ones_own:built"], "--set task.name=task_of_ones_own:built: task "),
        (
            ["task.name=task_of_ones_own:build", "task.widht=4"],
            "--set task.widht=4: task 'task_of_ones_own:build' has no option 'widht'; "
            "did you mean 'width'?",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_task_of_ones_own_is_refused_by_name(settings: list[str], line: str) -> None:
    found = answer(*settings, settings=settings)
    assert found["exit_code"] == 4
    assert found["refused"].startswith(line)


@pytest.mark.usefixtures("own_task")
def test_what_a_task_of_ones_own_does_is_left_to_the_workers() -> None:
    settings = ["task.name=task_of_ones_own:build", "task.width=4", "diloco.fragments=5"]
    assert answer(settings=settings)["stages"] == 1


@pytest.mark.usefixtures("own_task")
def test_what_a_module_prints_is_not_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"config": None, "settings": ["task.name=task_of_ones_own:build"], "flags": {}}
    asked = json.dumps({**request, "presets": [None], "resume": []})
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    monkeypatch.delitem(sys.modules, "murmuration.worker.cli.preflight")
    monkeypatch.delitem(sys.modules, "task_of_ones_own", raising=False)
    runpy.run_module("murmuration.worker.cli.preflight", run_name="__main__")
    written = capsys.readouterr()
    assert json.loads(written.out) == {"stages": 1, "held": []}
    assert "a module may print" in written.err


def test_the_stages_that_folders_hold_are_told(tmp_path: Path) -> None:
    for name, stage in (("w0", 2), ("w1", None)):
        checkpoint.save(tmp_path / name / "checkpoints", 5, {}, {"stage": stage})
    folders = [str(tmp_path / name) for name in ("w0", "w1", "missing")]
    assert answer(resume=folders)["held"] == [2, None, None]
