"""The layers of the decoder that one stage of a pipeline holds, under the whole model's names.

Rotary positions are found from the length of what arrives, so a hop carries hidden states alone
and any layer may be left out.

Shape suffixes: B batch, T time, D hidden size, E size of one head, V vocabulary.
"""
# ruff: noqa: N806, N815 (shape suffixes are capitals)

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import nn

from worker.tasks.llama import (
    DecoderLayer,
    draw_parameters,
    next_token_loss,
    rotary_table,
)
from worker.tasks.llama_config import LlamaConfig
from worker.tasks.task import Batch, StageModule

__all__ = ["LlamaStage", "build_llama_stage"]


def build_llama_stage(
    config: LlamaConfig, seed: int, first: int, last: int, *, outer: bool
) -> LlamaStage:
    """Return a part of `build_llama(config, seed)`, bit for bit; nothing else stays in memory.

    Args:
        config: sizes of the whole decoder.
        seed: the run's seed.
        first: the first layer, from 0.
        last: the last one, included; `first - 1` for no layer.
        outer: whether the embedding, the final norm and the head come with them.

    Raises:
        ValueError: layers that the decoder does not have.
    """
    if not 0 <= first <= last + 1 <= config.num_hidden_layers:
        raise ValueError(
            f"layers {first} to {last} of a model with layers 0 to {config.num_hidden_layers - 1}"
        )
    with torch.random.fork_rng(devices=[]):  # nn.Linear draws values that are replaced below
        stage = LlamaStage(config, range(first, last + 1), outer=outer)
    draw_parameters(config, seed, dict(stage.named_parameters()))
    return stage


class LlamaStage(StageModule):
    """Some layers in a row; stage 0's has the embedding, the final norm and the head as well.

    Args:
        config: sizes of the whole decoder.
        layers: numbers of the layers, in order.
        outer: whether it is stage 0's.
    """

    def __init__(self, config: LlamaConfig, layers: range, *, outer: bool) -> None:
        super().__init__()
        self.model = _Part(config, layers, outer=outer)
        self.lm_head = (
            nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            if outer and not config.tie_word_embeddings
            else None
        )

    def embed(self, batch: Batch) -> torch.Tensor:
        """Return the embedded bytes: (B, T, D)."""
        assert self.model.embed_tokens is not None, "only stage 0 embeds"
        tokens_BT: torch.Tensor = batch.inputs
        hidden_BTD: torch.Tensor = self.model.embed_tokens(
            tokens_BT.to(self.model.embed_tokens.weight.device)
        )
        return hidden_BTD

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this stage's layers: (B, T, D), as `hidden`."""
        T = hidden.shape[1]
        rotary = self.model.cos_TE[:T], self.model.sin_TE[:T]
        for layer in self.model.layers.values():
            hidden = layer(hidden, rotary, None)
        return hidden

    def loss(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy of the batch in nats per byte: scalar, fp32."""
        assert self.model.embed_tokens is not None, "only stage 0 has the head"
        assert self.model.norm is not None
        head_VD = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return next_token_loss(F.linear(self.model.norm(hidden), head_VD), batch.targets)


class _Part(nn.Module):
    """What the whole model calls `model`, as far as the stage holds it."""

    cos_TE: torch.Tensor
    sin_TE: torch.Tensor

    def __init__(self, config: LlamaConfig, layers: range, *, outer: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if outer else None
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config, index) for index in layers})
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if outer else None
        cos_TE, sin_TE = rotary_table(config)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)
