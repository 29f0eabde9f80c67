"""The built-in task: a Llama-style decoder that learns the bytes of a text.

Shape suffixes: B batch, T time, V vocabulary.
"""
# ruff: noqa: N806 (shape suffixes are capitals)

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from murmuration.worker.errors import TaskError
from murmuration.worker.tasks import llama, text as texts
from murmuration.worker.tasks.task import SPLITS, Batch, Cursor


class LlamaBytes:
    """Next-byte prediction on windows of a text.

    A sample is a window of context_bytes + 1 bytes at a place that (seed, stream, position) alone
    decide, so samples repeat by chance only, and a resumed worker goes on exactly.

    Args:
        seed: the run's seed: it decides the model's first parameters.
        model: a preset: 'tiny', 'small' or 'base'.
        text: a file, a folder, a glob, or 'stdlib' for Python's own sources.
        batch_size: samples per batch. Small batches learned most in a given time on a CPU.
        context_bytes: length of a sample; by default what the preset says.
        architecture: fields of `LlamaConfig` to change in the preset.
        sample_prompt: what the sample in a run's report begins with.

    Raises:
        TaskError: an unknown preset or field, or sizes that do not fit one another.
        TextError: the text is missing, unreadable or too short."""

    loss_unit = "nats per byte"

    @staticmethod
    def local_options(options: Mapping[str, object]) -> tuple[str, ...]:
        """Names those of these options that name files of this machine."""
        return ("text",) if options.get("text", texts.STDLIB) != texts.STDLIB else ()

    @staticmethod
    def least_bytes(options: Mapping[str, Any], stages: int) -> int:
        """Counts the values of the largest stage with gradients, anchor and momentum, and the
        logits of a batch. Raises TaskError."""
        changes = dict(options.get("architecture") or {})
        if (context := options.get("context_bytes")) is not None:
            changes["max_position_embeddings"] = context
        config = llama.llama_config(options.get("model", "tiny"), **changes)
        layers = -(-config.num_hidden_layers // stages) * config.layer_elements
        samples = max(1, int(options.get("batch_size", 1)))
        logits = samples * config.max_position_embeddings * config.vocab_size
        return 4 * (4 * (config.outer_elements + layers) + logits)

    def __init__(
        self,
        *,
        seed: int,
        model: str = "tiny",
        text: str = texts.STDLIB,
        batch_size: int = 4,
        context_bytes: int | None = None,
        architecture: Mapping[str, object] | None = None,
        sample_prompt: str = "def ",
    ) -> None:
        changes = dict(architecture or {})
        if changes.get("vocab_size", 256) != 256:
            raise TaskError("task 'llama-bytes' reads bytes: leave vocab_size at 256")
        if context_bytes is not None:
            changes["max_position_embeddings"] = context_bytes
        texts.check_sizes(batch_size=batch_size)
        self.seed, self.sample_prompt = seed, sample_prompt
        self.config, self.batch_size = llama.llama_config(model, **changes), batch_size
        self.tokens_per_sample = self.config.max_position_embeddings
        self.activation_shape = (batch_size, self.tokens_per_sample, self.config.hidden_size)
        self.corpus = texts.load_text(text, min_bytes=self.tokens_per_sample + 1)
        self.warnings = self.corpus.warnings

    def model(self) -> llama.Llama:
        """Return a new decoder (CPU, fp32) whose parameters depend on the seed alone."""
        return llama.build_llama(self.config, self.seed)

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        """Yield batches without end: inputs and targets are int64, (batch_size, context_bytes)."""
        if split not in SPLITS:
            raise ValueError(f"split is 'train' or 'validation', not {split!r}")
        text = self.corpus.train if split == "train" else self.corpus.validation
        return texts.drawn_windows(
            text, cursor, self.batch_size, self.config.max_position_embeddings
        )

    def loader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a loader of the text's windows, each byte in one of them."""
        windows = texts.Windows(self.corpus.train, self.tokens_per_sample)
        return DataLoader(windows, self.batch_size, shuffle=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the batch in nats per byte: scalar, fp32."""
        return llama.next_token_loss(model(batch.inputs), batch.targets)

    def to_huggingface(self, model: nn.Module, folder: Path) -> nn.Module:
        """Write the `config.json` of transformers' LlamaForCausalLM, which has the same names."""
        sizes = {k: v for k, v in asdict(self.config).items() if v is not None}
        rope = {"rope_type": "default", "rope_theta": self.config.rope_theta}
        config = {
            **sizes,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": self.config.head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": rope,  # transformers from 5 on; before it reads rope_theta
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        return model

    def layer_sizes(self) -> list[int]:
        return [self.config.layer_elements] * self.config.num_hidden_layers

    def outer_size(self) -> int:
        return self.config.outer_elements

    def stage(self, first: int, last: int, *, outer: bool) -> llama.LlamaStage:
        return llama.build_llama_stage(self.config, self.seed, first, last, outer=outer)

    def generate(
        self, model: nn.Module, prompt: str, n_tokens: int, temperature: float, seed: int
    ) -> str:
        """Return what `stream` adds to a text."""
        return "".join(self.stream(model, prompt, n_tokens, temperature, seed))

    def stream(
        self, model: nn.Module, prompt: str, n_tokens: int, temperature: float, seed: int
    ) -> Iterator[str]:
        """Continue a text character by character, bytes that are no UTF-8 as U+FFFD; yield what is
        added. When the context is full, its later half is read again and the earlier half
        forgotten, so the model never meets a position that it was not trained on. Args: model: a
        decoder of this task, on any device; prompt: its end counts where it is longer than the
        context; n_tokens: bytes to add; temperature: 0 takes the likeliest byte; 1 samples from the
        model as it is; seed: of the sampling; torch's global random generator is neither read nor
        moved."""
        sampled = self._sampled(model, prompt, n_tokens, temperature, seed)
        return codecs.iterdecode((bytes([each]) for each in sampled), "utf-8", "replace")

    @torch.inference_mode()
    def _sampled(
        self, model: nn.Module, prompt: str, n_tokens: int, temperature: float, seed: int
    ) -> Iterator[int]:
        assert isinstance(model, llama.Llama)
        device, context = next(model.parameters()).device, self.tokens_per_sample
        generator, tokens = torch.Generator("cpu").manual_seed(seed), list(prompt.encode() or b"\n")
        cache, unread = llama.KeyValueCache(self.config, device), tokens[-context:]
        for _ in range(n_tokens):
            if cache.length + len(unread) > context:
                cache.length = 0
                unread = tokens[-max(context // 2, 1) :]
            logits_BTV = model(torch.tensor([unread], dtype=torch.int64, device=device), cache)
            token = int(texts.next_token(logits_BTV[0, -1].float().cpu(), temperature, generator))
            tokens.append(token)
            unread = [token]
            yield token
