"""Fine-tuning by seeds: parameters follow coefficients, slopes are those of the loss."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from murmuration.worker.config import load_config
from murmuration.worker.errors import ConfigError
from murmuration.worker.tasks import Batch, Cursor, TaskError
from murmuration.worker.training import kseed
from murmuration.worker.training.kseed import (
    SeedReplica,
    give_seed_space,
    seed_space_of as space_of,
)
from murmuration.worker.training.model import schema_of, trained_parameters
from murmuration.worker.training.optimizers import InnerConfig


class Line:
    """Fits a line; the dropout makes two passes differ unless they draw the same."""

    def __init__(self, dropout: float = 0.0) -> None:
        self._dropout = dropout

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(self._dropout), nn.Linear(4, 1))

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        while True:
            generator = torch.Generator().manual_seed(cursor.position)
            inputs = torch.randn(8, 3, generator=generator)
            cursor = cursor.advance(8)
            yield Batch(inputs, inputs.sum(1, keepdim=True), cursor)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch.inputs), batch.targets)


def replica(task: Line, **changes: float) -> SeedReplica:
    model = task.model()
    config = InnerConfig(optimizer="kseed", seeds=16, warmup_steps=0, schedule="constant")
    give_seed_space(model, config.seeds)
    changed = InnerConfig(**{**vars(config), **changes})
    return SeedReplica(task, model, changed, Cursor(seed=0, stream="a"), 100)


def set_coefficients(model: nn.Module, values: dict[int, float]) -> None:
    with torch.no_grad():
        for index, value in values.items():
            space_of(model).coefficients[index] = value
    space_of(model).follow()


def test_what_travels_is_a_vector_of_coefficients_named_after_the_first_values():
    first, same, other = Line().model(), Line().model(), Line().model()
    with torch.no_grad():
        other[0].bias[0] += 1e-6
    for model in (first, same, other):
        give_seed_space(model, 16)
    (spec,) = schema_of(first)
    assert spec.shape == (16,)
    assert schema_of(same) == [spec]
    assert schema_of(other) != [spec]
    assert space_of(first).elements == 3 * 4 + 4 + 4 + 1


def test_parameters_are_the_first_values_and_the_sum_over_seeds():
    model, before = Line().model(), Line().model()
    give_seed_space(model, 8)
    set_coefficients(model, {2: 0.5, 7: -1.5})
    directions = {index: torch.Generator().manual_seed(index) for index in (2, 7)}
    for now, first in zip(model[0].parameters(), before[0].parameters(), strict=True):
        drawn = {k: torch.randn(now.shape, generator=g) for k, g in directions.items()}
        assert torch.allclose(now, first + 0.5 * drawn[2] - 1.5 * drawn[7])
    with torch.no_grad():
        space_of(model).coefficients.zero_()
    kseed.take_seed_space(model)
    assert [*model.state_dict()] == [*before.state_dict()]
    for now, first in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(now, first, atol=1e-6)


def test_the_slope_is_the_gradient_along_the_direction():
    task = Line(dropout=0.5)
    trained = replica(task, clip=0.0)
    torch.manual_seed(5)
    (gradient,) = trained.backward(1).values()
    index = kseed.drawn_seed(Cursor(seed=0, stream="a"), 16)
    assert torch.nonzero(gradient).flatten().tolist() == [index]
    model = task.model()
    torch.manual_seed(5)
    task.loss(model, next(task.batches("train", Cursor(seed=0, stream="a")))).backward()
    generator = torch.Generator().manual_seed(index)
    drawn = [(p.grad, torch.randn(p.shape, generator=generator)) for p in model.parameters()]
    slope = sum(float((gradient * direction).sum()) for gradient, direction in drawn)
    assert gradient[index].item() == pytest.approx(slope, rel=0.01)


def test_a_loss_that_is_not_finite_moves_nothing():
    trained = replica(Line())
    trained.batches = iter([Batch(torch.full((1, 3), math.inf), torch.zeros(1, 1), trained.cursor)])
    (gradient,) = trained.backward(1).values()
    assert not gradient.any()


def test_parameters_come_back_to_the_bit():
    trained = replica(Line())
    trained.inner_step(1, trained.backward(1))
    space, before = space_of(trained.model), [p.clone() for p in trained.model.parameters()]
    with space.kept():
        with torch.no_grad():
            space.coefficients[3] += 1
        space.follow()
        with torch.no_grad():
            space.coefficients[3] -= 1
    (coefficients,) = trained_parameters(trained.model).values()
    for now, then in zip(trained.model.parameters(), before, strict=True):
        assert torch.allclose(now, then) if now is coefficients else torch.equal(now, then)


def test_a_coefficient_that_was_absurd_for_a_while_leaves_no_trace():
    model, sound = Line().model(), Line().model()
    for each in (model, sound):
        give_seed_space(each, 8)
        set_coefficients(each, {2: 0.01})
    for index, value in ((3, 1e6), (3, -1e6), (5, 0.02), (3, 0.01)):
        with space_of(model).kept():
            set_coefficients(model, {index: value})
        space_of(model).follow()
    set_coefficients(sound, {3: 0.01, 5: 0.02})
    for one, other in zip(model.parameters(), sound.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_what_does_not_go_with_it_is_refused_in_a_line():
    with pytest.raises(TaskError, match=r"kseed.*0\.weight is in torch\.bfloat16"):
        give_seed_space(Line().model().bfloat16(), 16)
    with pytest.raises(ConfigError, match=r"--set .*kseed.* is for whole models"):
        load_config(None, ["inner.optimizer=kseed", "stages.count=2"])
    with pytest.raises(ValueError, match=r"seeds is 0 and perturbation"):
        InnerConfig(seeds=0)


def test_the_preset_brings_its_inner_optimizer_unless_another_is_set():
    assert load_config(None, [], "kseed").inner.optimizer == "kseed"
    changed = load_config(None, ["inner.lr=0.5"], "kseed").inner
    assert (changed.optimizer, changed.lr) == ("kseed", 0.5)
    assert load_config(None, [], "diloco").inner == InnerConfig()
