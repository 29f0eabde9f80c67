"""Stages of the decoder: together they are the whole model, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from worker.tasks import Batch, Cursor, Staged, StageModule, load_task
from worker.tasks.llama_bytes import LlamaBytes

LAYERS = 3
CUTS = ([(0, 2)], [(0, 0), (1, 2)], [(0, 1), (2, 2)], [(0, -1), (0, 0), (1, 2)])


def build(tmp_path: Path, *, tied: bool = False, seed: int = 4) -> LlamaBytes:
    text = tmp_path / "text.txt"
    text.write_text("the flock turns as one, and no bird leads. " * 40)
    architecture = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    options = {"text": str(text), "context_bytes": 20, "architecture": architecture}
    task = load_task("llama-bytes", seed=seed, options=options)
    assert isinstance(task, LlamaBytes)
    return task


@pytest.fixture(params=[False, True], ids=["own head", "tied head"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> LlamaBytes:
    return build(tmp_path, tied=request.param)


def cut(task: LlamaBytes, ranges: list[tuple[int, int]]) -> list[StageModule]:
    return [task.stage(*layers, outer=index == 0) for index, layers in enumerate(ranges)]


def batch_of(task: LlamaBytes) -> Batch:
    return next(task.batches("train", Cursor(seed=1, stream="stages")))


def pipeline_loss(stages: list[StageModule], batch: Batch) -> Tensor:
    hidden = stages[0].embed(batch)
    for stage in stages:
        hidden = stage(hidden)
    return stages[0].loss(hidden, batch)


def named(stages: list[StageModule]) -> list[tuple[str, nn.Parameter]]:
    return [each for stage in stages for each in stage.named_parameters()]


@pytest.mark.parametrize("ranges", CUTS, ids=str)
def test_stages_together_hold_the_models_parameters_once(
    task: LlamaBytes, ranges: list[tuple[int, int]]
) -> None:
    whole = dict(task.model().named_parameters())
    found = named(cut(task, ranges))
    assert sorted(name for name, _ in found) == sorted(whole)
    for name, parameter in found:
        assert torch.equal(parameter, whole[name]), name
        assert (parameter.dtype, parameter.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize("ranges", CUTS, ids=str)
def test_loss_and_gradients_are_the_models_bit_for_bit(
    task: LlamaBytes, ranges: list[tuple[int, int]]
) -> None:
    model, stages, batch = task.model(), cut(task, ranges), batch_of(task)
    expected, found = task.loss(model, batch), pipeline_loss(stages, batch)
    assert torch.equal(found, expected)
    expected.backward()
    found.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in named(stages):
        expected_gradient = gradients[name]
        assert parameter.grad is not None
        assert expected_gradient is not None
        assert torch.equal(parameter.grad, expected_gradient), name


def test_hidden_states_keep_their_shape_whatever_the_length(task: LlamaBytes) -> None:
    middle = task.stage(1, 1, outer=False)
    for length in (1, 7, 20):
        assert middle(torch.ones(2, length, 24)).shape == (2, length, 24)


def test_an_empty_stage_changes_nothing(task: LlamaBytes) -> None:
    hidden = torch.ones(2, 7, 24)
    assert torch.equal(task.stage(0, -1, outer=True)(hidden), hidden)
    assert list(task.stage(2, 1, outer=False).parameters()) == []


def test_a_state_dict_holds_what_the_whole_models_does(task: LlamaBytes) -> None:
    assert list(task.stage(0, LAYERS - 1, outer=True).state_dict()) == list(
        task.model().state_dict()
    )


def test_sizes_count_each_parameter_once(task: LlamaBytes) -> None:
    assert isinstance(task, Staged)
    whole = sum(parameter.numel() for parameter in task.model().parameters())
    assert task.outer_size() + sum(task.layer_sizes()) == whole
    for index, size in enumerate(task.layer_sizes()):
        layer = task.stage(index, index, outer=False)
        assert sum(parameter.numel() for parameter in layer.parameters()) == size


def test_the_global_generator_is_left_alone(task: LlamaBytes) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    task.stage(1, 2, outer=False)
    task.layer_sizes()
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_is_another_stage(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    values = [
        build(tmp_path, seed=seed).stage(2, 2, outer=False).get_parameter(name) for seed in (4, 5)
    ]
    assert not torch.equal(*values)


@pytest.mark.parametrize("layers", [(0, 3), (-1, 1), (2, 0), (4, 3), (3, 3)])
def test_layers_that_are_not_there_are_refused(task: LlamaBytes, layers: tuple[int, int]) -> None:
    first, last = layers
    with pytest.raises(
        ValueError, match=f"^layers {first} to {last} of a model with layers 0 to 2"
    ):
        task.stage(first, last, outer=False)
