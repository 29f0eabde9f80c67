"""Text from a checkpoint: which one is taken, and that its anchor is what writes. The validation
loss on the way: told at its steps, and without a trace in the training."""

import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.cli.commands import evaluate
from murmuration.worker.errors import CheckpointError
from murmuration.worker.tasks import Batch, Cursor, TaskError, load_task
from murmuration.worker.training import checkpoint, evaluation
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.optimizers import InnerConfig
from tests.support.lone_trainer import LoneTrainer
from tests.support.saved_runs import own_task, save_run, tiny_llama, trained


def save_step(folder: Path, step: int, **values: Any) -> Path:
    return checkpoint.save(folder, step, {"anchor/0": torch.zeros(1)}, {"step": step, **values})


def test_the_anchor_writes(tmp_path):
    config = tiny_llama(tmp_path)
    task = load_task(config.task.name, seed=0, options=config.task.options)
    save_run(config, model := trained(config), tmp_path / "run" / "w0" / "checkpoints")
    pieces = list(
        evaluation.generate_text(tmp_path / "run", "a bird ", 30, temperature=0.7, seed=3)
    )
    assert len(pieces) > 1
    written = "".join(pieces)
    assert written == task.generate(model, "a bird ", 30, 0.7, 3)
    assert written != task.generate(task.model(), "a bird ", 30, 0.7, 3)


class Measured:
    """A task whose loss is the number of its batch."""

    sample_prompt = "Once "

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        return (Batch(number, None, cursor) for number in range(99))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return torch.tensor(float(batch.inputs))

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        even = {"even": float(batch.inputs % 2 == 0)}
        return {**even, "first": torch.ones(())} if batch.inputs < 4 else {**even}

    def generate(self, model: nn.Module, prompt: str, *_: object) -> str:
        return f"upon {prompt!r}"


def test_a_report_has_the_means_of_what_a_task_measures_and_a_sample_of_its_prompt():
    task = Measured()
    model, error = task.model(), pytest.approx(statistics.stdev(range(16)) / 4)
    assert evaluation.validate(task, model, 0) == evaluation.Evaluation(
        7.5, {"even": 0.5, "first": 1.0}, error
    )
    one = evaluation.validate(task, model, 0, count=1)
    assert one is not None
    assert one.error is None
    assert evaluation.generate_sample(task, model, 0) == "Once upon 'Once '"


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


def test_a_task_that_does_not_stream_writes_in_one_piece_or_says_that_it_does_not_write(
    tmp_path, monkeypatch
):
    config = own_task(DROPS_OUT, tmp_path, monkeypatch)
    save_run(config, trained(config), tmp_path)
    with pytest.raises(TaskError, match=r"task 'task_in_.*:build' has no generate\(\)"):
        evaluation.generate_text(tmp_path, "x", 1, 0.0, 0)
    task = type(load_task(config.task.name, seed=0, options={}))
    monkeypatch.setattr(task, "generate", lambda *_: "all of it", raising=False)
    assert list(evaluation.generate_text(tmp_path, "x", 9, 0.0, 0)) == ["all of it"]


@pytest.mark.parametrize(
    ("scale", "told"),
    [("1", "loss 34.0 ± 4.8, perplexity 5"), ("1e30", "perplexity above 3e+43"), ("nan", "nan")],
)
def test_two_evaluations_agree_and_print_whatever_the_loss_is(tmp_path, monkeypatch, scale, told):
    source = f"SCALE = float('{scale}')\n{DROPS_OUT}"
    config = own_task(source, tmp_path, monkeypatch)
    model = load_task(config.task.name, seed=0, options={}).model()
    model.load_state_dict({"0.weight": torch.eye(4), "0.bias": torch.zeros(4)})
    command = [str(save_run(config, model, tmp_path)), "--set", f"task.name={config.task.name}"]
    first, second = (CliRunner().invoke(evaluate, command) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert told in first.output
    assert first.output == second.output


def _load(load: Any, loaded: list[int], path: Path) -> Any:
    loaded.append(int(path.name[-3:]))
    return load(path)


def test_the_highest_step_of_all_workers_is_found(tmp_path, capsys, monkeypatch):
    for worker, steps in (("w0", (100, 200)), ("w1", (100, 300)), ("w2", (250,))):
        for step in steps:
            save_step(tmp_path / worker / "checkpoints", step)
    assert (
        evaluation.find_checkpoint(tmp_path).path
        == tmp_path / "w1" / "checkpoints" / "step-00000300"
    )
    assert evaluation.find_checkpoint(tmp_path / "w0").values["step"] == 200
    assert evaluation.find_checkpoint(tmp_path / "w0" / "checkpoints").values["step"] == 200
    for damaged in ("w1/checkpoints/step-00000300", "w2/checkpoints/step-00000250"):
        (tmp_path / damaged / "manifest.json").write_text("{")
    assert not capsys.readouterr().err
    monkeypatch.setattr(checkpoint, "load_one", partial(_load, checkpoint.load_one, loaded := []))
    assert evaluation.find_checkpoint(tmp_path).values["step"] == 200
    assert loaded == [300, 250, 200]
    told = capsys.readouterr().err
    assert (told.count("unreadable"), told.count("going back to the one before")) == (2, 2)
    (tmp_path / "w0/checkpoints/step-00000200/tensors.safetensors").write_bytes(b"")
    assert evaluation.find_checkpoint(tmp_path).values["step"] == 100


def test_a_checkpoint_that_is_named_is_the_one_and_where_there_is_none_it_says_so(tmp_path):
    for run in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=f"^{run}: no usable checkpoint; name a folder"):
            evaluation.find_checkpoint(run)
    older, newer = save_step(tmp_path, 100), save_step(tmp_path, 200)
    assert evaluation.find_checkpoint(newer).values["step"] == 200
    assert evaluation.find_checkpoint(older).values["step"] == 100
    (older / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"^{older}: unreadable"):
        evaluation.find_checkpoint(older)


STEPS = 10


class Drawing:
    """Its model has dropout, running statistics and a cache; its loss draws from every global
    generator, of training and of held-out batches."""

    def __init__(self, *, noise: bool) -> None:
        self._noise = noise

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return Caching()

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        while True:
            generator = torch.Generator().manual_seed(cursor.position + 1000 * len(split))
            inputs = torch.randn(16, 4, generator=generator)
            cursor = cursor.advance(16)
            yield Batch(inputs, inputs.sum(1), cursor)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        noise = self._noise * (torch.rand(()) + random.random() + float(np.random.rand()))
        return nn.functional.mse_loss(model(batch.inputs).squeeze(1), batch.targets + noise)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.layers = nn.Sequential(*parts)
        self._scale: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self._scale is None:
            self._scale = torch.ones(1)  # what is cached in an evaluation is used in training
        return self.layers(inputs) * self._scale


class Run(LoneTrainer):
    def __init__(
        self, every_steps: int, *, noise: bool = True, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.task, inner = Drawing(noise=noise), InnerConfig(warmup_steps=0)

        def evaluate(trainer: Trainer) -> None:
            periodic.evaluate_if_due(trainer, wanted)

        super().__init__(self.task, PRESETS["local"], STEPS, inner, between_steps=evaluate)
        given = {"seed": 0, "every_steps": every_steps, "step": 0}
        periodic = evaluation.PeriodicEvaluation(self.task, self.model, **given)
        self.run()


def test_the_training_is_the_same_to_the_bit():
    never = Run(every_steps=0)
    after = torch.rand(()), random.random(), np.random.rand()
    often = Run(every_steps=3)
    assert (torch.rand(()), random.random(), np.random.rand()) == after
    other = often.model.state_dict()
    for name, value in never.model.state_dict().items():
        assert torch.equal(value, other[name]), name
    assert often.model.training


def test_it_is_the_loss_of_the_anchor_and_not_of_the_local_parameters(monkeypatch):
    monkeypatch.setattr(Trainer, "exchanges", True)  # in rounds that have not come yet
    run = Run(every_steps=2, noise=False)
    losses = {event["val_loss"] for event in run.told("validation")}
    # The anchor is as it began, until the end.
    assert losses == {evaluation.validate(run.task, run.task.model(), 0).loss}
    assert losses != {evaluation.validate(run.task, run.model, 0).loss}


def test_one_that_a_signal_cuts_short_tells_no_loss():
    run = Run(every_steps=3, wanted=lambda: False)
    assert run.told("validation") == []
    assert run.step == STEPS
