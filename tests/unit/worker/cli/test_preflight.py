"""What workers would refuse, said before any of them is started."""

from pathlib import Path
from typing import Any

import pytest

from worker import checkpoint
from worker.cli.preflight import preflight

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
        (["run.steps=many"], 3, "--set run.steps=many: [run] steps is 'many'"),
        (["stages.count=99"], 3, "[stages] count = 99: "),
        (["task.modle=tiny"], 4, "task 'llama-bytes' has no option 'modle'"),
        (["task.name=lama"], 4, "unknown task 'lama'"),
        (["task.text=missing.txt"], 4, "text 'missing.txt': no such file"),
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


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[diloco]\ninner_step = 5\n")
    assert answer(config=str(path))["refused"].startswith(f"{path}: [diloco] has no key")
    missing = str(tmp_path / "missing.toml")
    assert answer(config=missing)["refused"].startswith(f"{missing}: cannot be read")


def test_a_task_of_ones_own_is_left_to_the_workers() -> None:
    assert answer("task.name=nowhere:build")["stages"] == 1


def test_the_stages_that_folders_hold_are_told(tmp_path: Path) -> None:
    for name, stage in (("w0", 2), ("w1", None)):
        checkpoint.save(tmp_path / name / "checkpoints", 5, {}, {"stage": stage})
    folders = [str(tmp_path / name) for name in ("w0", "w1", "missing")]
    assert answer(resume=folders)["held"] == [2, None, None]
