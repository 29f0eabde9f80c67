"""The decoder, against that of transformers; and a stage of it."""

import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from murmuration.worker.errors import TaskError
from murmuration.worker.tasks import Batch, Cursor, StageModule, load_task
from murmuration.worker.tasks.llama import KeyValueCache, LlamaConfig, build_llama, llama_config
from murmuration.worker.tasks.llama_bytes import LlamaBytes

HEADS = {"hidden_size": 24, "intermediate_size": 40}
HEADS |= {"num_attention_heads": 6, "num_key_value_heads": 2}
SMALL = LlamaConfig(**HEADS, num_hidden_layers=2, vocab_size=50, max_position_embeddings=20)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_names_shapes_and_logits_are_those_of_transformers(key_heads, tied):
    config = replace(SMALL, num_key_value_heads=key_heads, tie_word_embeddings=tied)
    model = build_llama(config, seed=5)
    with torch.no_grad():  # norms begin at one, which would hide a forgotten weight
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()) * (1 + index % 3))
    sizes = {name: value for name, value in asdict(config).items() if value is not None}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double()
    left_out = theirs.load_state_dict(model.state_dict(), strict=False)
    assert tuple(left_out) == (["lm_head.weight"] if tied else [], [])
    tokens = torch.tensor([[(7 * index + index * index) % config.vocab_size for index in range(8)]])
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-5)


def test_the_cache_gives_the_logits_of_one_pass():
    model, tokens = build_llama(SMALL, seed=3), (torch.arange(20)[None] * 7) % SMALL.vocab_size
    cache = KeyValueCache(SMALL, torch.device("cpu"))
    with torch.inference_mode():
        whole, parts = model(tokens), [model(tokens[:, :6], cache)]
        parts += [model(tokens[:, t : t + 1], cache) for t in range(6, 20)]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_parameters_depend_on_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build_llama(SMALL, seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second, other = build_llama(SMALL, seed=4).state_dict(), build_llama(SMALL, seed=5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_first_parameters_are_exact_multiples_of_a_24_bit_draw():
    """The draws are the same on machines with other processors: pinned to known values."""
    weight = build_llama(SMALL, seed=0).state_dict()["model.embed_tokens.weight"]
    bound = math.sqrt(3) / math.sqrt(24)
    draw = torch.rand(50, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw * 2**24, (draw * 2**24).round())
    assert torch.equal(weight, draw * (2 * bound) - bound)
    assert weight.abs().max() <= bound + 1e-6


LAYERS = 3
CUTS = ([(0, 2)], [(0, 0), (1, 2)], [(0, 1), (2, 2)], [(0, -1), (0, 0), (1, 2)])


def build(tmp_path: Path, *, tied: bool = False, seed: int = 4) -> LlamaBytes:
    text = tmp_path / "text.txt"
    text.write_text("the flock turns as one, and no bird leads. " * 40)
    architecture = {**HEADS, "num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
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


@pytest.mark.parametrize("ranges", CUTS, ids=str)
def test_loss_and_gradients_are_the_models_bit_for_bit(task, ranges):
    model, stages, batch = task.model(), cut(task, ranges), batch_of(task)
    expected, found = task.loss(model, batch), pipeline_loss(stages, batch)
    assert torch.equal(found, expected)
    expected.backward()
    found.backward()
    whole = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, whole[name].grad), name


def test_layers_that_are_not_there_are_refused(task):
    for first, last in ((0, 3), (-1, 1), (2, 0), (4, 3), (3, 3)):
        says = f"^layers {first} to {last} of a model with layers 0 to 2"
        with pytest.raises(ValueError, match=says):
            task.stage(first, last, outer=False)


def test_a_model_that_trains_or_generates_needs_no_compiler():
    """Torch's takes as long to load as all the rest of a worker."""
    code = """
import sys
from murmuration.worker.tasks import Cursor
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica
task = LlamaBytes(seed=0)
model = task.model()
replica = InnerReplica(task, model, InnerConfig(), Cursor(seed=0, stream="a"), 2)
replica.inner_step(1, replica.backward(1))
task.generate(model, "def ", 2, 0.8, 0)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_sizes_that_do_not_fit_say_what_to_change():
    for preset, changes, expected in [
        ("tinny", {}, r"unknown model 'tinny'; did you mean 'tiny'\?"),
        ("tiny", {"hidden": 3}, r"no setting 'hidden'; did you mean 'hidden_size'"),
        ("tiny", {"hidden_size": 130, "num_attention_heads": 4}, "no multiple of num_attention"),
        ("tiny", {"hidden_size": 20, "num_attention_heads": 4}, "make that even"),
        ("base", {"num_key_value_heads": 5}, "no multiple of num_key_value_heads 5"),
        ("tiny", {"num_hidden_layers": 0}, "num_hidden_layers must be an integer above 0, got 0"),
        ("tiny", {"hidden_size": True}, "hidden_size must be an integer above 0, got True"),
        ("tiny", {"rope_theta": "big"}, "rope_theta must be a number above 0, got 'big'"),
        ("tiny", {"initializer_range": 0}, "initializer_range must be a number above 0, got 0"),
        ("tiny", {"hidden_size": None}, "hidden_size must be an integer above 0, got None"),
        ("tiny", {"tie_word_embeddings": 1}, "must be true or false, got 1"),
    ]:
        with pytest.raises(TaskError, match=expected):
            llama_config(preset, **changes)
