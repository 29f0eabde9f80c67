"""Sizes of the decoder, and presets of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from murmuration.worker.errors import TaskError
from murmuration.worker.tasks.task import nearest


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
