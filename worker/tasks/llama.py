"""A Llama-style decoder, its sizes, and presets: RMSNorm, rotary positions, SwiGLU, no biases.

Parameter names, shapes and the order of rotary dimensions are those of Hugging Face's
`LlamaForCausalLM`, so its state dict is a checkpoint that transformers loads as it is. A stage of a
pipeline holds some of its layers under the same names. It finds rotary positions from the length
of what arrives, so a hop carries hidden states alone and any layer may be left out.

Shape suffixes: B batch, T time (query), S time (key), D hidden size, H query heads, K key and
value heads, E size of one head, V vocabulary.
"""
# ruff: noqa: N803, N806, N815 (shape suffixes are capitals)

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

from murmuration.worker.errors import TaskError
from murmuration.worker.tasks.task import Batch, StageModule, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a decoder, under the names that Hugging Face's `config.json` uses. Raises TaskError:
    sizes do not fit one another."""

    hidden_size: int
    intermediate_size: int  # width of the SwiGLU layer
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # query heads share them evenly
    vocab_size: int = 256  # for bytes
    max_position_embeddings: int = 128  # the context in tokens
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False  # whether the head is the embedding
    # Standard deviation of all first values. None: one over the root of a matrix's inputs, of those
    # that write to the residual stream less with every layer.
    initializer_range: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, kind, value = field.name, str(field.type), getattr(self, field.name)
            if value is None and kind.endswith("| None"):
                continue
            if kind == "bool":
                if not isinstance(value, bool):
                    raise TaskError(f"model: {name} must be true or false, got {value!r}")
                continue
            number = (int,) if kind == "int" else (int, float)
            if not isinstance(value, number) or isinstance(value, bool) or value <= 0:
                described = "an integer" if kind == "int" else "a number"
                raise TaskError(f"model: {name} must be {described} above 0, got {value!r}")
        if self.hidden_size % self.num_attention_heads:
            raise TaskError(
                f"model: hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_attention_heads}: change one of them"
            )
        if self.head_size % 2:
            raise TaskError(
                f"model: heads of size {self.head_size} (hidden_size / num_attention_heads) cannot "
                "be rotated in pairs: make that even"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise TaskError(
                f"model: num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}: change one of them"
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_elements(self) -> int:
        keys = self.num_key_value_heads * self.head_size
        attention = 2 * self.hidden_size * (self.hidden_size + keys)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def outer_elements(self) -> int:
        """Parameters outside the layers: embedding, head and last norm."""
        return ((1 if self.tie_word_embeddings else 2) * self.vocab_size + 1) * self.hidden_size


# 'tiny' was chosen by trial: four workers on two cores, 100 s of DiLoCo on Python's own sources.
# Larger ones (128 wide, 3 or 4 layers) take fewer steps in that time and end at a higher loss.
MODELS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
    ),
    "small": LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    ),
    "base": LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    ),
}


def llama_config(model: str, **changes: Any) -> LlamaConfig:
    """Return a model's sizes ('tiny', 'small' or 'base'), some fields changed. Raises TaskError: an
    unknown model or field (with the nearest valid name), or sizes that do not fit one another."""
    if model not in MODELS:
        raise TaskError(f"unknown model {model!r}{nearest(model, MODELS)}")
    known = [field.name for field in fields(LlamaConfig)]
    if (unknown := next((name for name in changes if name not in known), None)) is not None:
        raise TaskError(f"model {model!r} has no setting {unknown!r}{nearest(unknown, known)}")
    return replace(MODELS[model], **changes)


def build_llama(config: LlamaConfig, seed: int) -> Llama:
    """Return a decoder whose parameters depend on config and seed alone: CPU, fp32."""
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws values that are replaced below
        model = Llama(config)
    held = dict(model.named_parameters())
    _draw_parameters(config, seed, held, held)
    return model


def empty_llama(config: LlamaConfig) -> Llama:
    """Return a decoder without values (on torch's meta device): its names, shapes and sizes."""
    with torch.device("meta"):
        return Llama(config)


def build_llama_stage(
    config: LlamaConfig, seed: int, first: int, last: int, *, outer: bool
) -> LlamaStage:
    """Return a part of `build_llama(config, seed)`, bit for bit; nothing else stays in memory."""
    if not 0 <= first <= last + 1 <= config.num_hidden_layers:
        raise ValueError(
            f"layers {first} to {last} of a model with layers 0 to {config.num_hidden_layers - 1}"
        )
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws values that are replaced below
        stage = LlamaStage(config, range(first, last + 1), outer=outer)
    decoder = dict(empty_llama(config).named_parameters())
    _draw_parameters(config, seed, dict(stage.named_parameters()), decoder)
    return stage


def _draw_parameters(
    config: LlamaConfig, seed: int, held: Mapping[str, nn.Parameter], of: Mapping[str, nn.Parameter]
) -> None:
    """Give parameters of a decoder their first values; norms, which begin at one, stay as they are.

    Values are uniform, made of a 24-bit draw, one product and one difference: no rounding is left
    to the processor, so machines of different kinds start from the same bits. All values of the
    decoder are drawn in its own order, one parameter at a time, and those not held are dropped.
    Args: held: some or all of the decoder's parameters by name, which are written to; of: all of
    them, of which the shapes are read. A whole model has them itself: torch takes a second or more
    to load what draws on its meta device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    residual_scale = 1 / math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in of.items():
        if parameter.dim() < 2:
            continue
        draws = torch.rand(parameter.shape, dtype=torch.float32, device="cpu", generator=generator)
        if name not in held:
            continue
        std = config.initializer_range
        if std is None:
            std = 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= residual_scale
        bound = std * math.sqrt(3)
        held[name].detach().copy_(draws.mul_(2 * bound).sub_(bound))


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token: scalar, fp32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.to(logits_BTV.device).flatten())


class KeyValueCache:
    """Keys and values of the `length` tokens read so far: each new token costs one forward."""

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
        heads = (config.num_hidden_layers, 1, config.num_key_value_heads)
        shape, self.length = (*heads, config.max_position_embeddings, config.head_size), 0
        self._keys = torch.zeros(shape, dtype=torch.float32, device=device)
        self._values = torch.zeros(shape, dtype=torch.float32, device=device)

    def extend(self, layer: int, key_BKTE: Tensor, value_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer; return all of it so far (BKSE each)."""
        end = self.length + key_BKTE.shape[2]
        self._keys[layer, :, :, self.length : end] = key_BKTE
        self._values[layer, :, :, self.length : end] = value_BKTE
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config, range(config.num_hidden_layers), outer=True)
        self.lm_head = _head_of(config)

    def forward(self, tokens_BT: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits of the token that follows each token: logits_BTV, fp32. Args:
        tokens_BT: int64; at most `max_position_embeddings` long, with those in the cache; cache:
        tokens read before, which gets the new ones added; B is then 1, and T is 1 unless it is
        empty."""
        return self.model.logits(self.model(self.model.embedded(tokens_BT), cache), self.lm_head)


class _Decoder(nn.Module):
    """The layers of these numbers; with `outer`, the embedding and the final norm."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, config: LlamaConfig, layers: range, *, outer: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if outer else None
        self.layers = nn.ModuleDict({str(index): _DecoderLayer(config, index) for index in layers})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if outer else None
        cos_TE, sin_TE = _rotary_table(config)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        assert self.embed_tokens is not None, "only stage 0 embeds"
        hidden_BTD: Tensor = self.embed_tokens(tokens_BT.to(self.embed_tokens.weight.device))
        return hidden_BTD

    def forward(self, hidden_BTD: Tensor, cache: KeyValueCache | None) -> Tensor:
        start = 0 if cache is None else cache.length
        end = start + hidden_BTD.shape[1]
        assert end <= self.cos_TE.shape[0], "more tokens than the context holds"
        assert start == 0 or end == start + 1, "a cache that holds tokens takes one at a time"
        rotary = self.cos_TE[start:end], self.sin_TE[start:end]
        for layer in self.layers.values():
            hidden_BTD = layer(hidden_BTD, rotary, cache)
        if cache is not None:
            cache.length = end
        return hidden_BTD

    def logits(self, hidden_BTD: Tensor, head: nn.Linear | None) -> Tensor:
        """By the final norm, and the head or, without one, the embedding."""
        assert self.norm is not None, "only stage 0 has the head"
        assert self.embed_tokens is not None
        head_VD = self.embed_tokens.weight if head is None else head.weight
        return F.linear(self.norm(hidden_BTD), head_VD)


def _head_of(config: LlamaConfig) -> nn.Linear | None:
    if config.tie_word_embeddings:
        return None
    return nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class _DecoderLayer(nn.Module):
    """Attention and SwiGLU, each added to what enters it."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp = _SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_BTD: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None
    ) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rotary, cache)
        hidden_BTD = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return hidden_BTD


class _Attention(nn.Module):
    """Causal attention; several query heads may share a key and value head."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.index, self.heads = index, config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        key_size = config.num_key_value_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden_BTD: Tensor, rotary: tuple[Tensor, Tensor], cache: KeyValueCache | None
    ) -> Tensor:
        B, T, D = hidden_BTD.shape
        query_BHTE = self.q_proj(hidden_BTD).view(B, T, self.heads, -1).transpose(1, 2)
        key_BKSE = self.k_proj(hidden_BTD).view(B, T, self.key_heads, -1).transpose(1, 2)
        value_BKSE = self.v_proj(hidden_BTD).view(B, T, self.key_heads, -1).transpose(1, 2)
        query_BHTE, key_BKSE = _rotate(query_BHTE, *rotary), _rotate(key_BKSE, *rotary)
        if cache is not None:
            key_BKSE, value_BKSE = cache.extend(self.index, key_BKSE, value_BKSE)
        shared = self.heads // self.key_heads
        if shared > 1:
            key_BKSE = key_BKSE.repeat_interleave(shared, dim=1)
            value_BKSE = value_BKSE.repeat_interleave(shared, dim=1)
        mixed_BHTE = F.scaled_dot_product_attention(
            query_BHTE, key_BKSE, value_BKSE, is_causal=T > 1
        )
        mixed_BTD: Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).reshape(B, T, D))
        return mixed_BTD


class _SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        gated: Tensor = F.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD)
        result_BTD: Tensor = self.down_proj(gated)
        return result_BTD


class LlamaStage(StageModule):
    """The layers of these numbers; with `outer`, as on stage 0, embedding, final norm and head."""

    def __init__(self, config: LlamaConfig, layers: range, *, outer: bool) -> None:
        super().__init__()
        self.model = _Decoder(config, layers, outer=outer)
        self.lm_head = _head_of(config) if outer else None

    def embed(self, batch: Batch) -> Tensor:
        return self.model.embedded(batch.inputs)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.model(hidden, None)
        return found

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        return next_token_loss(self.model.logits(hidden, self.lm_head), batch.targets)


def _rotary_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Return the cosines and the signed sines of every position: TE each.

    Hugging Face pairs dimension i with i + E/2 and computes x * cos + rotate_half(x) * sin, where
    rotate_half swaps the halves and negates the first. The sign is put into the sines here, so
    that a plain swap is left to do."""
    half = config.head_size // 2
    frequency_E = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    positions_T = torch.arange(config.max_position_embeddings, dtype=torch.float64)
    angle_TE = torch.outer(positions_T, frequency_E)
    cos_TE, sin_TE = angle_TE.cos().float(), angle_TE.sin().float()
    return torch.cat([cos_TE, cos_TE], dim=1), torch.cat([-sin_TE, sin_TE], dim=1)


def _rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each pair of dimensions (i, i + E/2) by its position's angle."""
    swapped_BHTE = x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BHTE * cos_TE, swapped_BHTE, sin_TE)
