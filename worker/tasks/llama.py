"""A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, no biases.

Parameter names, shapes and the order of rotary dimensions are those of Hugging Face's
`LlamaForCausalLM`, so its state dict is a checkpoint that transformers loads as it is.

Shape suffixes: B batch, T time (query), S time (key), D hidden size, H query heads, K key and
value heads, E size of one head, V vocabulary.
"""
# ruff: noqa: N803, N806, N815 (shape suffixes are capitals)

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn

from worker.tasks.errors import TaskError, nearest

__all__ = ["PRESETS", "KeyValueCache", "Llama", "LlamaConfig", "build_llama", "llama_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a decoder, under the names that Hugging Face's `config.json` uses.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layer.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads; each is hidden_size / num_attention_heads wide.
        num_key_value_heads: key and value heads; query heads share them evenly.
        vocab_size: tokens; 256 for bytes.
        max_position_embeddings: the context in tokens.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square before its root.
        tie_word_embeddings: whether the head is the embedding.

    Raises:
        TaskError: sizes do not fit one another.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 256
    max_position_embeddings: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_field(field.name, str(field.type), getattr(self, field.name))
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
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def hf_config(self) -> dict[str, object]:
        """Return the contents of Hugging Face's `config.json` for this model."""
        return asdict(self) | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "head_dim": self.head_size,
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": 1 / math.sqrt(self.hidden_size),
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "float32",
        }


def _check_field(name: str, kind: str, value: object) -> None:
    """Raise TaskError unless a value that came from a TOML file is of the field's type."""
    if kind == "bool":
        if not isinstance(value, bool):
            raise TaskError(f"model: {name} must be true or false, got {value!r}")
        return
    number = (int,) if kind == "int" else (int, float)
    if not isinstance(value, number) or isinstance(value, bool) or value <= 0:
        described = "an integer" if kind == "int" else "a number"
        raise TaskError(f"model: {name} must be {described} above 0, got {value!r}")


# 'tiny' was chosen by trial: four workers on two cores, 100 s of DiLoCo on Python's own sources.
# Larger ones (128 wide, 3 or 4 layers) take fewer steps in that time and end at a higher loss.
PRESETS: dict[str, LlamaConfig] = {
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


def llama_config(preset: str, **changes: object) -> LlamaConfig:
    """Return a preset's sizes, some of them changed.

    Args:
        preset: 'tiny', 'small' or 'base'.
        changes: fields of `LlamaConfig` by name.

    Raises:
        TaskError: an unknown preset or field (with the nearest valid name), or sizes that do not
            fit one another.
    """
    if preset not in PRESETS:
        raise TaskError(f"unknown model {preset!r}{nearest(preset, PRESETS)}")
    known = {field.name for field in fields(LlamaConfig)}
    for name in changes:
        if name not in known:
            raise TaskError(f"model {preset!r} has no setting {name!r}{nearest(name, known)}")
    return replace(PRESETS[preset], **changes)  # type: ignore[arg-type]


def build_llama(config: LlamaConfig, seed: int) -> Llama:
    """Return a decoder whose parameters depend on the config and the seed alone.

    Values are uniform, made of a 24-bit draw, one product and one difference: no rounding is left
    to the processor, so machines of different kinds start from the same bits.

    Args:
        config: its sizes.
        seed: the run's seed.

    Returns:
        A model on the CPU, fp32. Torch's global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws values that are replaced below
        model = Llama(config)
    generator = torch.Generator().manual_seed(seed)
    residual_scale = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue  # norms begin at one
            std = 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= residual_scale
            bound = std * math.sqrt(3)
            draws = torch.rand(parameter.shape, generator=generator)
            parameter.copy_(draws.mul_(2 * bound).sub_(bound))
    return model


class KeyValueCache:
    """Keys and values of the tokens read so far, so that each new token costs one forward.

    Attributes:
        length: tokens held.
    """

    def __init__(self, config: LlamaConfig, device: torch.device) -> None:
        shape = (
            config.num_hidden_layers,
            1,
            config.num_key_value_heads,
            config.max_position_embeddings,
            config.head_size,
        )
        self.length = 0
        self._keys = torch.zeros(shape, device=device)
        self._values = torch.zeros(shape, device=device)

    def extend(
        self, layer: int, key_BKTE: torch.Tensor, value_BKTE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values of one layer; return all of it so far (BKSE each)."""
        end = self.length + key_BKTE.shape[2]
        self._keys[layer, :, :, self.length : end] = key_BKTE
        self._values[layer, :, :, self.length : end] = value_BKTE
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]


class Llama(nn.Module):
    """Decoder with a head: tokens to logits.

    Args:
        config: its sizes.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def forward(self, tokens_BT: torch.Tensor, cache: KeyValueCache | None = None) -> torch.Tensor:
        """Return the logits of the token that follows each token.

        Args:
            tokens_BT: int64; at most `max_position_embeddings` long, those in the cache included.
            cache: tokens read before, which gets the new ones added; B is then 1, and T is 1
                unless the cache is empty.

        Returns:
            logits_BTV, fp32.
        """
        hidden_BTD = self.model(tokens_BT, cache)
        head_VD = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden_BTD, head_VD)


class _Decoder(nn.Module):
    """Everything but the head."""

    cos_TE: torch.Tensor
    sin_TE: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _Layer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        cos_TE, sin_TE = _rotary_table(config)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, tokens_BT: torch.Tensor, cache: KeyValueCache | None) -> torch.Tensor:
        start = 0 if cache is None else cache.length
        end = start + tokens_BT.shape[1]
        assert end <= self.cos_TE.shape[0], "more tokens than the context holds"
        assert start == 0 or end == start + 1, "a cache that holds tokens takes one at a time"
        rotary = self.cos_TE[start:end], self.sin_TE[start:end]
        hidden_BTD: torch.Tensor = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, rotary, cache)
        if cache is not None:
            cache.length = end
        normed_BTD: torch.Tensor = self.norm(hidden_BTD)
        return normed_BTD


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp = _SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rotary, cache)
        hidden_BTD = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return hidden_BTD


class _Attention(nn.Module):
    """Causal attention; several query heads may share a key and value head."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        key_size = config.num_key_value_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: KeyValueCache | None,
    ) -> torch.Tensor:
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
        mixed_BTD: torch.Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).reshape(B, T, D))
        return mixed_BTD


class _SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = F.silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD)
        result_BTD: torch.Tensor = self.down_proj(gated)
        return result_BTD


def _rotary_table(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and the signed sines of every position: TE each.

    Hugging Face pairs dimension i with i + E/2 and computes x * cos + rotate_half(x) * sin, where
    rotate_half swaps the halves and negates the first. The sign is put into the sines here, so
    that a plain swap is left to do.
    """
    half = config.head_size // 2
    frequency_E = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_TE = torch.outer(
        torch.arange(config.max_position_embeddings, dtype=torch.float64), frequency_E
    )
    cos_TE, sin_TE = angle_TE.cos().float(), angle_TE.sin().float()
    return torch.cat([cos_TE, cos_TE], dim=1), torch.cat([-sin_TE, sin_TE], dim=1)


def _rotate(x_BHTE: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Turn each pair of dimensions (i, i + E/2) by its position's angle."""
    swapped_BHTE = x_BHTE.roll(x_BHTE.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BHTE * cos_TE, swapped_BHTE, sin_TE)
