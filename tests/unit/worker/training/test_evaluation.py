"""Text from a checkpoint: which one is taken, and that its anchor is what writes."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from murmuration.algorithms.fragments import TensorSpec
from murmuration.worker.cli.commands import evaluate
from murmuration.worker.config import Config, load_config
from murmuration.worker.errors import CheckpointError
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import Batch, Cursor, TaskError, load_task
from murmuration.worker.training import checkpoint
from murmuration.worker.training.evaluation import (
    Evaluation,
    find_checkpoint,
    generate_sample,
    generate_text,
    validate,
)

SIZES = (
    "{hidden_size = 8, intermediate_size = 16, num_hidden_layers = 2, num_attention_heads = 2, "
    "num_key_value_heads = 1}"
)
WITHOUT_TEXT = """
import torch

class Numbers:
    def model(self): return torch.nn.Linear(1, 1)
    def batches(self, split, cursor): yield from ()
    def loss(self, model, batch): return model(batch.inputs)

def build(*, seed): return Numbers()
"""


def save_step(folder: Path, step: int, **values: Any) -> Path:
    return checkpoint.save(folder, step, {"anchor/0": torch.zeros(1)}, {"step": step, **values})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("the flock turns as one, and no bird leads. " * 30)
    return load_config(
        None,
        [
            f"task.text={text}",
            f"task.architecture={SIZES}",
            "task.context_bytes=16",
            "diloco.fragments=2",
        ],
    )


def test_the_anchor_writes_whatever_the_number_of_fragments(config: Config, tmp_path: Path) -> None:
    task = load_task(config.task.name, seed=0, options=config.task.options)
    model = task.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    schema = [TensorSpec(name, tuple(p.shape)) for name, p in parameters.items()]
    tensors = {f"anchor/{name}": values for name, values in parameters.items()}
    values = {"step": 5, "manifest": Manifest.of(config, schema).plain()}
    checkpoint.save(tmp_path / "run" / "w0" / "checkpoints", 5, tensors, values)
    pieces = list(generate_text(tmp_path / "run", "a bird ", 30, temperature=0.7, seed=3))
    assert len(pieces) > 1
    written = "".join(pieces)
    assert written == task.generate(model, "a bird ", 30, 0.7, 3)
    assert written != task.generate(task.model(), "a bird ", 30, 0.7, 3)


def test_a_task_that_writes_no_text_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numbers_without_text.py").write_text(WITHOUT_TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    manifest = Manifest.of(load_config(None, ["task.name=numbers_without_text:build"]), [])
    save_step(tmp_path, 1, manifest=manifest.plain())
    with pytest.raises(TaskError, match=r"task 'numbers_without_text:build' has no generate\(\)"):
        generate_text(tmp_path, "x", 1, 0.0, 0)


class Measured:
    """A task whose loss is the number of its batch."""

    sample_prompt = "Once "

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        return (Batch(number, None, cursor) for number in range(99))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.tensor(float(batch.inputs))

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor | float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        even = {"even": float(batch.inputs % 2 == 0)}
        return {**even, "first": torch.ones(())} if batch.inputs < 4 else {**even}

    def generate(self, model: nn.Module, prompt: str, *_: object) -> str:
        return f"upon {prompt!r}"


def test_a_report_has_the_means_of_what_a_task_measures_and_a_sample_of_its_prompt() -> None:
    task = Measured()
    model = task.model()
    spread = statistics.stdev(range(16))
    error = pytest.approx(spread / 4)
    assert validate(task, model, 0) == Evaluation(7.5, {"even": 0.5, "first": 1.0}, error)
    one = validate(task, model, 0, count=1)
    assert one is not None
    assert one.error is None
    assert generate_sample(task, model, 0) == "Once upon 'Once '"


def test_a_task_that_does_not_stream_writes_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = WITHOUT_TEXT.replace("Numbers", "Writer").replace(
        "    def loss", "    def generate(self, *_): return 'all of it'\n    def loss"
    )
    (tmp_path / "writes_at_once.py").write_text(writing)
    monkeypatch.syspath_prepend(tmp_path)
    schema = [TensorSpec("weight", (1, 1)), TensorSpec("bias", (1,))]
    manifest = Manifest.of(load_config(None, ["task.name=writes_at_once:build"]), schema)
    values = {"step": 1, "manifest": manifest.plain()}
    checkpoint.save(
        tmp_path, 1, {"anchor/weight": torch.zeros(1, 1), "anchor/bias": torch.zeros(1)}, values
    )
    assert list(generate_text(tmp_path, "x", 9, 0.0, 0)) == ["all of it"]


DROPS_OUT = """
import torch
from murmuration.worker.tasks import Batch

class Forgetful:
    def model(self): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    def batches(self, split, cursor):
        while True:
            cursor = cursor.advance(1)
            yield Batch(torch.full((1, 4), float(cursor.position)), torch.zeros(1), cursor)
    def loss(self, model, batch): return model(batch.inputs).sum() * SCALE

def build(*, seed): return Forgetful()
"""


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (1.0, "loss 34.0 ± 4.8, perplexity 5"),
        (1e30, "perplexity above 3e+43"),
        (float("nan"), "nan"),
    ],
)
def test_two_evaluations_agree_and_print_whatever_the_loss_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, told: str
) -> None:
    name = f"drops_out_{scale:.0f}"
    (tmp_path / f"{name}.py").write_text(f"SCALE = float('{scale}')\n" + DROPS_OUT)
    monkeypatch.syspath_prepend(tmp_path)
    schema = [TensorSpec("0.weight", (4, 4)), TensorSpec("0.bias", (4,))]
    manifest = Manifest.of(load_config(None, [f"task.name={name}:build"]), schema)
    tensors = {"anchor/0.weight": torch.eye(4), "anchor/0.bias": torch.zeros(4)}
    saved = checkpoint.save(tmp_path, 1, tensors, {"step": 1, "manifest": manifest.plain()})
    command = [str(saved), "--set", f"task.name={name}:build"]
    first, second = (CliRunner().invoke(evaluate, command) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert told in first.output
    assert first.output == second.output


def test_a_checkpoint_without_all_of_the_model_says_so(config: Config, tmp_path: Path) -> None:
    saved = save_step(tmp_path, 1, manifest=Manifest.of(config, []).plain())
    with pytest.raises(CheckpointError, match=f"^{saved}: does not hold the whole model"):
        generate_text(tmp_path, "x", 1, 0.0, 0)


def test_the_highest_step_of_all_workers_is_found(tmp_path: Path) -> None:
    for worker, steps in (("w0", (100, 200)), ("w1", (100, 300)), ("w2", (250,))):
        for step in steps:
            save_step(tmp_path / worker / "checkpoints", step)
    assert find_checkpoint(tmp_path).path == tmp_path / "w1" / "checkpoints" / "step-00000300"
    assert find_checkpoint(tmp_path / "w0").values["step"] == 200
    assert find_checkpoint(tmp_path / "w0" / "checkpoints").values["step"] == 200


def test_damaged_checkpoints_are_passed_over(tmp_path: Path) -> None:
    save_step(tmp_path / "w0", 100)
    save_step(tmp_path / "w0", 300)
    (tmp_path / "w0" / "step-00000300" / "tensors.safetensors").write_bytes(b"")
    save_step(tmp_path / "w1", 400)
    (tmp_path / "w1" / "step-00000400" / "manifest.json").write_text("{")
    assert find_checkpoint(tmp_path).values["step"] == 100


def test_a_checkpoint_that_is_named_is_the_one(tmp_path: Path) -> None:
    older, newer = save_step(tmp_path, 100), save_step(tmp_path, 200)
    assert find_checkpoint(newer).values["step"] == 200
    assert find_checkpoint(older).values["step"] == 100
    (older / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"^{older}: unreadable"):
        find_checkpoint(older)


def test_where_there_is_none_it_says_what_to_name(tmp_path: Path) -> None:
    for run in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=f"^{run}: no usable checkpoint; name a folder"):
            find_checkpoint(run)
