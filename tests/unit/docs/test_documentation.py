"""What the documentation shows works as it stands there."""

import re
import tomllib
from itertools import islice
from pathlib import Path

import pytest

from tests.support import programs_table
from worker.config import parse_config
from worker.tasks import Cursor, load_task

ROOT = Path(__file__).resolve().parents[3]


def block(page: str, language: str, of: str = "") -> str:
    """The first piece of code in that language, or the first that holds `of`."""
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(text for text in found if of in text)


def test_the_toml_example_is_the_defaults() -> None:
    document = tomllib.loads(block("docs/configuration.md", "toml"))
    shown = parse_config(document, "docs/configuration.md")
    task = document["task"]
    defaults = parse_config({"task": task}, "defaults")
    assert shown == defaults


def test_the_task_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "documented_task.py").write_text(block("README.md", "python", of="class Parity"))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task("documented_task:Parity", seed=1, options={})
    model = task.model()
    cursor = Cursor(seed=1, stream="w0")
    first, second = islice(task.batches("train", cursor), 2)
    again = next(task.batches("train", first.cursor))
    assert (second.inputs == again.inputs).all()
    loss = task.loss(model, first)
    loss.backward()
    assert 0 < task.metrics(model, first)["accuracy"] < 1
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_table_of_programs_is_what_its_tests_say() -> None:
    _, held, _ = programs_table.parts((ROOT / "docs/library.md").read_text())
    assert held == programs_table.table(), "python -m tests.support.programs_table writes it anew"
