"""`murmur assemble`: the stages' newest checkpoints become the model that they were cut from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from algorithms.fragments import TensorSpec, partition
from worker.cli import exit_code_of
from worker.cli.commands import assemble
from worker.config import Config, load_config
from worker.manifest import Manifest
from worker.pipeline.part import part_of
from worker.tasks import load_task
from worker.training import checkpoint
from worker.training.evaluation import checkpoint_loss, find_checkpoint

SIZES = (
    "{hidden_size = 8, intermediate_size = 16, num_hidden_layers = 4, "
    "num_attention_heads = 2, num_key_value_heads = 1}"
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("the flock turns as one, and no bird leads. " * 40)
    options = (f"text={text}", f"architecture={SIZES}", "context_bytes=16")
    return load_config(
        None, ["run.seed=5", "stages.count=3", *(f"task.{option}" for option in options)]
    )


def trained(config: Config) -> nn.Module:
    """A model of the run other than its first."""
    model = load_task(config.task.name, seed=config.run.seed, options=config.task.options).model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def save_stage(config: Config, model: nn.Module, run: Path, stage: int, step: int) -> None:
    """As the worker that serves the stage would."""
    task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
    part = part_of(task, config, stage)
    names = [name for name, _ in part.module.named_parameters()]
    values = {name: p.detach() for name, p in model.named_parameters() if name in names}
    schema = [TensorSpec(name, tuple(values[name].shape)) for name in names]
    fragments = partition(schema, config.plan.fragments, config.plan.pattern)
    checkpoint.save(
        run / f"w{stage}" / "checkpoints",
        step,
        {f"anchor/{fragment.index}": fragment.flatten(values) for fragment in fragments},
        {
            "step": step,
            "stage": stage,
            "states": [{} for _ in fragments],
            "manifest": Manifest.of(config, part.whole).plain(),
        },
    )


def assembled(*args: str | Path) -> Path:
    result = CliRunner().invoke(assemble, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return Path(result.stdout.strip())


def refusal(code: int, *args: str | Path) -> str:
    result = CliRunner().invoke(assemble, [str(arg) for arg in args])
    assert isinstance(result.exception, Exception), result.output
    assert exit_code_of(result.exception) == code
    return str(result.exception)


@pytest.mark.parametrize("layers", [(), (2, 1, 1), (1, 1, 2)])
def test_the_stages_make_the_model_that_they_were_cut_from(
    config: Config, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    config = replace(config, stages=replace(config.stages, layers=layers))
    model, run = trained(config), tmp_path / "run"
    for stage in range(3):
        save_stage(config, trained(config), run, stage, step=1)
        save_stage(config, model, run, stage, step=10)
    path = assembled(run)
    assert path == run / "assembled" / "step-00000010"
    saved = find_checkpoint(run)
    assert saved.path == path
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    schema = [TensorSpec(name, tuple(p.shape)) for name, p in parameters.items()]
    (fragment,) = partition(schema, config.plan.fragments, config.plan.pattern)
    assert torch.equal(saved.tensors["anchor/0"], fragment.flatten(parameters))
    assert checkpoint_loss(saved) == pytest.approx(checkpoint_loss(saved, stages=3))


def test_stages_of_different_steps_are_told_and_the_least_names_the_model(
    config: Config, tmp_path: Path
) -> None:
    for stage, step in ((2, 11), (0, 12), (1, 10)):
        save_stage(config, trained(config), tmp_path / "run", stage, step)
    result = CliRunner().invoke(assemble, [str(tmp_path / "run")])
    assert result.exit_code == 0
    assert "(stage -> step: 0 -> 12, 1 -> 10, 2 -> 11)" in result.stderr
    assert result.stdout.strip() == str(tmp_path / "run" / "assembled" / "step-00000010")


def test_it_goes_where_it_is_told(config: Config, tmp_path: Path) -> None:
    for stage in range(3):
        save_stage(config, trained(config), tmp_path / "run", stage, 7)
    out = tmp_path / "elsewhere"
    assert assembled(tmp_path / "run", "--out", out) == out / "step-00000007"
    assert assembled(tmp_path / "run", "--out", out) == out / "step-00000007"  # and again


def test_a_missing_stage_is_named(config: Config, tmp_path: Path) -> None:
    save_stage(config, trained(config), tmp_path / "run", 1, 7)
    assert refusal(8, tmp_path / "run").endswith("run: no checkpoint of stage 0, 2")


def test_a_run_that_was_not_cut_has_nothing_to_assemble(tmp_path: Path) -> None:
    assert "no checkpoint of a stage; name the folder" in refusal(8, tmp_path)


def test_stages_of_several_runs_are_not_mixed(config: Config, tmp_path: Path) -> None:
    for stage in range(3):
        save_stage(config, trained(config), tmp_path / "one", stage, 7)
    other = load_config(None, [f"task.text={tmp_path / 'text.txt'}", "stages.count=3"])
    save_stage(other, trained(other), tmp_path / "two", 1, 9)
    assert refusal(8, tmp_path).endswith("checkpoints of several runs; name the folder of one")


def test_a_folder_that_cannot_be_written_is_said(config: Config, tmp_path: Path) -> None:
    for stage in range(3):
        save_stage(config, trained(config), tmp_path / "run", stage, 7)
    (tmp_path / "file").write_text("in the way")
    line = refusal(2, tmp_path / "run", "--out", tmp_path / "file" / "below")
    assert line.startswith(f"--out {tmp_path / 'file' / 'below'}: no checkpoint can be written")
