"""What the documentation shows works as it stands there."""

import re
import tomllib
from itertools import islice
from pathlib import Path

import pytest

from tests.support import programs_table
from worker.config import parse_config
from worker.tasks import Cursor, load_task
from worker.training.config import InnerConfig
from worker.training.evaluation import validate
from worker.training.replica import InnerReplica

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


def test_the_task_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "documented_task.py").write_text(block("README.md", "python", of="class Tones"))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_task("documented_task:Tones", seed=1, options={})
    model, steps = task.model(), 300
    cursor = Cursor(seed=1, stream="w0")
    first, second = islice(task.batches("train", cursor), 2)
    again = next(task.batches("train", first.cursor))
    assert (second.inputs == again.inputs).all()
    before = validate(task, model, seed=1)
    inner = InnerReplica(task, model, InnerConfig(), cursor, steps)
    for step in range(1, steps + 1):
        inner.inner_step(step, inner.backward(step))
    after = validate(task, model, seed=1)
    assert before is not None
    assert after is not None
    assert before.loss > 1.9
    assert before.metrics["accuracy"] < 0.25
    assert after.loss < 0.2
    assert after.metrics["accuracy"] > 0.95


def test_the_table_of_programs_is_what_its_tests_say() -> None:
    _, held, _ = programs_table.parts((ROOT / "docs/library.md").read_text())
    assert held == programs_table.table(), "python -m tests.support.programs_table writes it anew"
