"""`murmur evaluate` and `murmur assemble`: the loss of a checkpoint, and one of all stages."""

import math
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from murmuration.algorithms.fragments import TensorSpec
from murmuration.worker.cli.commands import assemble, evaluate
from murmuration.worker.config import Config, load_config
from murmuration.worker.manifest import Manifest
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import Cursor, load_task
from murmuration.worker.training import checkpoint
from murmuration.worker.training.export import find_checkpoint
from tests.support import commands

LAYERS = 4
SIZES = (
    f"{{hidden_size = 8, intermediate_size = 16, num_hidden_layers = {LAYERS}, "
    "num_attention_heads = 2, num_key_value_heads = 1}"
)
UNSTAGED = """
import torch
from murmuration.worker.tasks import Batch

class Numbers:
    def model(self): return torch.nn.Linear(1, 1, bias=False)
    def batches(self, split, cursor):
        while True: yield Batch(torch.ones(1), None, cursor)
    def loss(self, model, batch): return model(batch.inputs).sum()

def build(*, seed): return Numbers()
"""


def trained(config: Config) -> nn.Module:
    """A model of the run other than its first, so that a forgotten anchor would show."""
    model = load_task(config.task.name, seed=config.run.seed, options=config.task.options).model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def save(config: Config, model: nn.Module, folder: Path, *, without: str | None = None) -> Path:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    schema = [TensorSpec(name, tuple(p.shape)) for name, p in parameters.items()]
    tensors = {f"anchor/{name}": values for name, values in parameters.items() if name != without}
    values = {"step": 7, "manifest": Manifest.of(config, schema).plain()}
    return checkpoint.save(folder, 7, tensors, values)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("the flock turns as one, and no bird leads. " * 40)
    options = (f"text={text}", f"architecture={SIZES}", "context_bytes=16")
    return load_config(
        None, ["run.seed=5", "diloco.fragments=2", *(f"task.{option}" for option in options)]
    )


def printed(*args: str | Path) -> str:
    return commands.printed(evaluate, *args).strip()


def loss_in(line: str) -> float:
    found = re.search(r" loss (\d+\.\d{3})(?: ± 0\.\d+)?, perplexity (\d+\.\d\d)", line)
    assert found is not None, line
    assert math.exp(float(found[1])) == pytest.approx(float(found[2]), rel=1e-3, abs=0.005)
    return float(found[1])


def expected_loss(config: Config, model: nn.Module, split: str = "validation") -> float:
    """By the task alone, over the batches that a run's report takes."""
    task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
    batches = islice(task.batches(split, Cursor(seed=5, stream="validation")), 16)
    with torch.no_grad():
        losses = [float(task.loss(model, batch)) for batch in batches]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("split", ["validation", "train"])
def test_the_anchors_loss_on_either_split(config: Config, tmp_path: Path, split: str) -> None:
    model = trained(config)
    path = save(config, model, tmp_path / "w0" / "checkpoints")
    line = printed(tmp_path, "--split", split)
    assert line.startswith(f"{path}: {split} loss ")
    assert loss_in(line) == pytest.approx(expected_loss(config, model, split), abs=5e-4)


def test_a_checkpoint_of_a_part_is_refused(config: Config, tmp_path: Path) -> None:
    path = save(config, trained(config), tmp_path, without="model.norm.weight")
    line = commands.refused(evaluate, 8, tmp_path)
    assert line.startswith(
        f"{path}: does not hold the whole model of its run (model.norm.weight); name "
    )


def test_a_task_of_ones_own_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers_without_stages.py").write_text(UNSTAGED)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(None, ["task.name=numbers_without_stages:build"])
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.25)
    save(config, model, tmp_path)
    assert loss_in(printed(tmp_path)) == 0.25


# --------------------------------------------------------------------------------- assemble


@pytest.fixture
def staged(config: Config) -> Config:
    """The same in three stages and one fragment."""
    plan = replace(config.plan, fragments=1)
    return replace(config, plan=plan, stages=replace(config.stages, count=3))


def save_stage(config: Config, model: nn.Module, run: Path, stage: int, step: int) -> None:
    """As the worker that serves the stage would."""
    task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
    part = part_of(task, config, stage)
    names = [name for name, _ in part.module.named_parameters()]
    values = {name: p.detach() for name, p in model.named_parameters() if name in names}
    checkpoint.save(
        run / f"w{stage}" / "checkpoints",
        step,
        {f"anchor/{name}": value for name, value in values.items()},
        {
            "step": step,
            "stage": stage,
            "manifest": Manifest.of(config, part.whole).plain(),
        },
    )


def assembled(*args: str | Path) -> Path:
    """The folder that it names; nothing else is printed."""
    return Path(commands.printed(assemble, *args).strip())


@pytest.mark.parametrize("layers", [(), (2, 1, 1), (1, 1, 2)])
def test_the_stages_make_the_model_that_they_were_cut_from(
    staged: Config, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    config = replace(staged, stages=replace(staged.stages, layers=layers))
    model, run = trained(config), tmp_path / "run"
    for stage in range(3):
        save_stage(config, trained(config), run, stage, step=1)
        save_stage(config, model, run, stage, step=10)
    path = assembled(run)
    assert path == run / "assembled" / "step-00000010"
    saved = find_checkpoint(run)
    assert saved.path == path
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    whole = saved.named("anchor")
    assert whole.keys() == parameters.keys()
    assert all(torch.equal(whole[name], values) for name, values in parameters.items())


def test_stages_of_different_steps_are_told_and_the_least_names_the_model(
    staged: Config, tmp_path: Path
) -> None:
    for stage, step in ((2, 11), (0, 12), (1, 10)):
        save_stage(staged, trained(staged), tmp_path / "run", stage, step)
    result = CliRunner().invoke(assemble, [str(tmp_path / "run")])
    assert result.exit_code == 0
    assert "(stage -> step: 0 -> 12, 1 -> 10, 2 -> 11)" in result.stderr
    assert result.stdout.strip() == str(tmp_path / "run" / "assembled" / "step-00000010")


def test_it_goes_where_it_is_told(staged: Config, tmp_path: Path) -> None:
    for stage in range(3):
        save_stage(staged, trained(staged), tmp_path / "run", stage, 7)
    out = tmp_path / "elsewhere"
    assert assembled(tmp_path / "run", "--out", out) == out / "step-00000007"
    assert assembled(tmp_path / "run", "--out", out) == out / "step-00000007"  # and again


def test_a_missing_stage_is_named(staged: Config, tmp_path: Path) -> None:
    save_stage(staged, trained(staged), tmp_path / "run", 1, 7)
    assert commands.refused(assemble, 8, tmp_path / "run").endswith(
        "run: no checkpoint of stage 0, 2"
    )


def test_a_run_that_was_not_cut_has_nothing_to_assemble(tmp_path: Path) -> None:
    assert "no checkpoint of a stage; name the folder" in commands.refused(assemble, 8, tmp_path)


def test_stages_of_several_runs_are_not_mixed(staged: Config, tmp_path: Path) -> None:
    for stage in range(3):
        save_stage(staged, trained(staged), tmp_path / "one", stage, 7)
    other = load_config(None, [f"task.text={tmp_path / 'text.txt'}", "stages.count=3"])
    save_stage(other, trained(other), tmp_path / "two", 1, 9)
    assert commands.refused(assemble, 8, tmp_path).endswith(
        "checkpoints of several runs; name the folder of one"
    )


def test_a_folder_that_cannot_be_written_is_said(staged: Config, tmp_path: Path) -> None:
    for stage in range(3):
        save_stage(staged, trained(staged), tmp_path / "run", stage, 7)
    (tmp_path / "file").write_text("in the way")
    line = commands.refused(assemble, 2, tmp_path / "run", "--out", tmp_path / "file" / "below")
    assert line.startswith(f"--out {tmp_path / 'file' / 'below'}: no checkpoint can be written")
