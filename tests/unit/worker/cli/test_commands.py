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

from murmuration.worker.cli.commands import assemble, evaluate
from murmuration.worker.config import Config
from murmuration.worker.manifest import Manifest
from murmuration.worker.pipeline.part import part_of
from murmuration.worker.tasks import Cursor, load_task
from murmuration.worker.training.export import find_checkpoint
from tests.support import commands
from tests.support.saved_runs import save_run, tiny_llama, trained


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return tiny_llama(tmp_path, "run.seed=5", "diloco.fragments=2")


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
def test_the_anchors_loss_on_either_split(config, tmp_path, split):
    model = trained(config)
    path = save_run(config, model, tmp_path / "w0" / "checkpoints")
    line = printed(tmp_path, "--split", split)
    assert line.startswith(f"{path}: {split} loss ")
    assert loss_in(line) == pytest.approx(expected_loss(config, model, split), abs=5e-4)


def test_a_checkpoint_of_a_part_is_refused(config, tmp_path):
    path = save_run(config, trained(config), tmp_path, without="model.norm.weight")
    assert commands.refused(evaluate, 8, tmp_path).startswith(
        f"{path}: does not hold the whole model of its run (model.norm.weight); name "
    )


@pytest.fixture
def staged(config: Config) -> Config:
    """The same in three stages and one fragment."""
    plan = replace(config.plan, fragments=1)
    return replace(config, plan=plan, stages=replace(config.stages, count=3))


def save_stage(config: Config, model: nn.Module, run: Path, stage: int, step: int) -> None:
    """As the worker that serves the stage would."""
    task = load_task(config.task.name, seed=config.run.seed, options=config.task.options)
    part = part_of(task, config, stage)
    part.module.load_state_dict(model.state_dict(), strict=False)
    folder, manifest = run / f"w{stage}" / "checkpoints", Manifest.of(config, part.whole).plain()
    save_run(config, part.module, folder, step, stage=stage, manifest=manifest)


def assembled(*args: str | Path) -> Path:
    """The folder that it names; nothing else is printed."""
    return Path(commands.printed(assemble, *args).strip())


@pytest.mark.parametrize("layers", [(), (2, 1, 1), (1, 1, 2)])
def test_the_stages_make_the_model_that_they_were_cut_from(staged, tmp_path, layers):
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


def test_stages_of_different_steps_are_told_and_the_least_names_the_model(staged, tmp_path):
    for stage, step in ((2, 11), (0, 12), (1, 10)):
        save_stage(staged, trained(staged), tmp_path / "run", stage, step)
    result = CliRunner().invoke(assemble, [str(tmp_path / "run")])
    assert result.exit_code == 0
    assert "(stage -> step: 0 -> 12, 1 -> 10, 2 -> 11)" in result.stderr
    assert result.stdout.strip() == str(tmp_path / "run" / "assembled" / "step-00000010")


def test_it_goes_where_it_is_told_or_says_what_is_missing(staged, tmp_path):
    run, out = tmp_path / "run", tmp_path / "elsewhere"
    assert "no checkpoint of a stage; name the folder" in commands.refused(assemble, 8, tmp_path)
    save_stage(staged, trained(staged), run, 1, 7)
    assert commands.refused(assemble, 8, run).endswith("run: no checkpoint of stage 0, 2")
    for stage in (0, 2):
        save_stage(staged, trained(staged), run, stage, 7)
    for _ in range(2):
        assert assembled(run, "--out", out) == out / "step-00000007"
    (tmp_path / "file").write_text("in the way")
    line = commands.refused(assemble, 2, run, "--out", tmp_path / "file" / "below")
    assert line.startswith(f"--out {tmp_path / 'file' / 'below'}: no checkpoint can be written")
    other = replace(staged, run=replace(staged.run, seed=6))
    save_stage(other, trained(other), tmp_path / "two", 1, 9)
    assert commands.refused(assemble, 8, tmp_path).endswith(
        "checkpoints of several runs; name the folder of one"
    )
