"""The decoder, against a naive one written from the definitions."""

import math
from dataclasses import replace

import pytest
import torch

from worker.tasks.llama import KeyValueCache, build_llama
from worker.tasks.llama_config import LlamaConfig

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


def test_no_position_sees_a_later_one() -> None:
    model = build_llama(SMALL, seed=1)
    tokens = torch.arange(20)[None] % SMALL.vocab_size
    changed = tokens.clone()
    changed[0, 11:] = 49
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :11], after[:, :11], rtol=0, atol=1e-6)
    assert (before[:, 11:] - after[:, 11:]).abs().amax(dim=-1).min() > 1e-3


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
