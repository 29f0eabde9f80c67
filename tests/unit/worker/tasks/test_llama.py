"""The decoder, against a naive one written from the definitions; and a stage of it."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from murmuration.worker.errors import TaskError
from murmuration.worker.tasks import Batch, Cursor, StageModule, load_task
from murmuration.worker.tasks.llama import KeyValueCache, build_llama
from murmuration.worker.tasks.llama_bytes import LlamaBytes
from murmuration.worker.tasks.llama_config import LlamaConfig, llama_config

SMALL = LlamaConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=50,
    max_position_embeddings=20,
)


def naive_logits(
    weights: dict[str, torch.Tensor], config: LlamaConfig, tokens: list[int]
) -> torch.Tensor:
    """Logits of every position, one position and one head at a time, in float64."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    size = config.head_size
    shared = config.num_attention_heads // config.num_key_value_heads

    def norm(vector: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = float((vector**2).sum()) / len(vector)
        return vector / math.sqrt(mean_square + config.rms_norm_eps) * weights[name]

    def rotate(vector: torch.Tensor, position: int) -> torch.Tensor:
        turned = vector.clone()
        for i in range(size // 2):
            angle = position * config.rope_theta ** (-2 * i / size)
            a, b = float(vector[i]), float(vector[i + size // 2])
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    stream = [weights["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."

        def project(vector: torch.Tensor, name: str, prefix: str = prefix) -> torch.Tensor:
            return weights[f"{prefix}{name}.weight"] @ vector

        normed = [norm(vector, f"{prefix}input_layernorm.weight") for vector in stream]
        queries = [torch.split(project(vector, "self_attn.q_proj"), size) for vector in normed]
        keys = [torch.split(project(vector, "self_attn.k_proj"), size) for vector in normed]
        values = [torch.split(project(vector, "self_attn.v_proj"), size) for vector in normed]
        for t in range(len(tokens)):
            heads = []
            for head in range(config.num_attention_heads):
                query = rotate(queries[t][head], t)
                scores = torch.stack(
                    [
                        query @ rotate(keys[s][head // shared], s) / math.sqrt(size)
                        for s in range(t + 1)
                    ]
                )
                share = scores.exp() / scores.exp().sum()
                mixed = [share[s] * values[s][head // shared] for s in range(t + 1)]
                heads.append(torch.stack(mixed).sum(dim=0))
            stream[t] = stream[t] + project(torch.cat(heads), "self_attn.o_proj")
            inner = norm(stream[t], f"{prefix}post_attention_layernorm.weight")
            gate = project(inner, "mlp.gate_proj")
            gated = gate / (1 + (-gate).exp()) * project(inner, "mlp.up_proj")
            stream[t] = stream[t] + project(gated, "mlp.down_proj")
    head_weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return torch.stack([head_weight @ norm(vector, "model.norm.weight") for vector in stream])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_logits_equal_a_naive_decoder(key_heads: int, tied: bool) -> None:
    config = replace(SMALL, num_key_value_heads=key_heads, tie_word_embeddings=tied)
    model = build_llama(config, seed=5)
    with torch.no_grad():  # norms begin at one, which would hide a forgotten weight
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()) * (1 + index % 3))
    tokens = [(7 * index + index * index) % config.vocab_size for index in range(8)]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0]
    expected = naive_logits(dict(model.state_dict()), config, tokens)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_cache_gives_the_logits_of_one_pass() -> None:
    model = build_llama(SMALL, seed=3)
    tokens = (torch.arange(20)[None] * 7) % SMALL.vocab_size
    cache = KeyValueCache(SMALL, torch.device("cpu"))
    with torch.inference_mode():
        whole = model(tokens)
        parts = [model(tokens[:, :6], cache)]
        parts += [model(tokens[:, t : t + 1], cache) for t in range(6, 20)]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_hugging_faces(tied: bool) -> None:
    config = replace(SMALL, tie_word_embeddings=tied)
    shapes = {
        name: tuple(tensor.shape) for name, tensor in build_llama(config, 0).state_dict().items()
    }
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (50, 24),
        "model.norm.weight": (24,),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        expected |= {
            f"{prefix}self_attn.q_proj.weight": (24, 24),
            f"{prefix}self_attn.k_proj.weight": (8, 24),
            f"{prefix}self_attn.v_proj.weight": (8, 24),
            f"{prefix}self_attn.o_proj.weight": (24, 24),
            f"{prefix}mlp.gate_proj.weight": (40, 24),
            f"{prefix}mlp.up_proj.weight": (40, 24),
            f"{prefix}mlp.down_proj.weight": (24, 40),
            f"{prefix}input_layernorm.weight": (24,),
            f"{prefix}post_attention_layernorm.weight": (24,),
        }
    if not tied:
        expected["lm_head.weight"] = (50, 24)
    assert shapes == expected


def test_parameters_depend_on_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build_llama(SMALL, seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second, other = build_llama(SMALL, seed=4).state_dict(), build_llama(SMALL, seed=5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_first_parameters_are_exact_multiples_of_a_24_bit_draw() -> None:
    """What keeps machines with other processors at the same bits: pinned to known values."""
    weight = build_llama(SMALL, seed=0).state_dict()["model.embed_tokens.weight"]
    bound = math.sqrt(3) / math.sqrt(24)
    draw = torch.rand(50, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw * 2**24, (draw * 2**24).round())
    assert torch.equal(weight, draw * (2 * bound) - bound)
    assert weight.abs().max() <= bound + 1e-6


def test_one_initializer_range_is_that_of_all_matrices() -> None:
    wide, narrow = (
        build_llama(replace(SMALL, initializer_range=std), seed=0).state_dict()
        for std in (0.2, 0.02)
    )
    for name, weight in narrow.items():
        if weight.dim() > 1:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1), name
            assert torch.allclose(weight, wide[name] / 10), name
        else:
            assert torch.equal(weight, torch.ones_like(weight)), name


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


@pytest.mark.parametrize("layers", [(0, 3), (-1, 1), (2, 0), (4, 3), (3, 3)])
def test_layers_that_are_not_there_are_refused(task: LlamaBytes, layers: tuple[int, int]) -> None:
    first, last = layers
    with pytest.raises(
        ValueError, match=f"^layers {first} to {last} of a model with layers 0 to 2"
    ):
        task.stage(first, last, outer=False)


def test_a_model_that_trains_or_generates_needs_no_compiler() -> None:
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
task.generate(model, "def ", 2)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("preset", "changes", "expected"),
    [
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
    ],
)
def test_sizes_that_do_not_fit_say_what_to_change(
    preset: str, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(TaskError, match=expected):
        llama_config(preset, **changes)
