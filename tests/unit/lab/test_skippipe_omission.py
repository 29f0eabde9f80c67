"""The training whose perplexities are tabled: each stage steps by the mean over its visits."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from murmuration.worker.pipeline.config import StagesConfig
from murmuration.worker.tasks import Batch, Cursor, Staged, StageModule, load_task
from murmuration.worker.training.evaluation import build_stages, route_loss
from tests.lab import skippipe_omission as omission

ROUTES = [(0, 1), (0, 1), (0, 2)]  # nothing visits stage 3


@pytest.fixture
def task(tmp_path: Path) -> Staged:
    text = tmp_path / "text.txt"
    text.write_text("the flock turns as one, and no bird leads. " * 40)
    architecture = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    options = {"text": str(text), "context_bytes": 20, "architecture": architecture}
    task = load_task("llama-bytes", seed=4, options=options)
    assert isinstance(task, Staged)
    return task


def parameters(stages: list[StageModule]) -> list[dict[str, Tensor]]:
    return [{n: p.detach().clone() for n, p in each.named_parameters()} for each in stages]


def expected_parameters(
    stages: list[StageModule], batches: list[Batch], rate: float
) -> list[dict[str, Tensor]]:
    """After a step of plain gradient descent by each stage's mean gradient, taken by itself."""
    stepped = parameters(stages)
    for number, (stage, held) in enumerate(zip(stages, stepped, strict=True)):
        visits = [(r, b) for r, b in zip(ROUTES, batches, strict=True) if number in r]
        for route, batch in visits:
            named = dict(stage.named_parameters())
            gradients = torch.autograd.grad(route_loss(stages, route, batch), list(named.values()))
            for name, gradient in zip(named, gradients, strict=True):
                held[name] -= rate * gradient / len(visits)
    return stepped


def test_each_step_is_by_the_mean_over_the_visits_of_that_step(task: Staged) -> None:
    rate, steps = 0.5, 2
    stages = build_stages(task, StagesConfig(count=4))
    sums = [omission.gradient_sums(stage) for stage in stages]
    optimizers = [torch.optim.SGD(stage.parameters(), rate) for stage in stages]
    made = task.batches("train", Cursor(seed=1, stream="test"))
    batches = list(itertools.islice(made, steps * len(ROUTES)))
    for step in range(steps):
        here = batches[step * len(ROUTES) : (step + 1) * len(ROUTES)]
        expected = expected_parameters(stages, here, rate)
        omission.train_step(stages, sums, optimizers, ROUTES, iter(here))
        torch.testing.assert_close(parameters(stages), expected, rtol=1e-5, atol=1e-6)
