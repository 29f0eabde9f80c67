"""The task `huggingface`: a causal language model of transformers, on a text, in full or by LoRA.

    [task]
    name = "huggingface"
    model = "path/of/a/checkpoint"     # or { model_type = "llama", hidden_size = 64, ... }
    text = "stories/*.txt"
    lora = { r = 8, target_modules = ["q_proj", "v_proj"] }

Instead of a text, `dataset` names one of the library `datasets`, which is read as it comes.

The model and its tokenizer are folders on each machine, and are never fetched.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import DataLoader

from murmuration.worker.errors import TaskError, TextError
from murmuration.worker.tasks import text as texts
from murmuration.worker.tasks.task import SPLITS, Batch, Cursor, one_line

BYTES = "bytes"
# Where a word in a config is the name of something that transformers has itself.
_MODEL_WORDS = frozenset(
    {"model_type", "hidden_act", "hidden_activation", "activation_function", "rope_type"}
)
# Width, layers and inner width of a config, as kinds of models call them.
_SIZES = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "num_layers"),
    ("intermediate_size", "n_inner", "ffn_dim"),
)
_WITHIN = bytes(range(0x80, 0xC0))  # a character of UTF-8 begins with none of these
_ROTARY = {"rope_theta", "rope_scaling", "rope_parameters"}
_LORA = frozenset(
    {
        *("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "bias"),
        *("use_rslora", "use_dora", "fan_in_fan_out", "task_type", "layers_to_transform"),
    }
)


class HuggingFace:
    """A model of transformers that guesses each token from those before it.

    Args:
        seed: of values that are drawn.
        model: a folder with `config.json` and, unless all values are to be drawn, weights; or the
            config itself, with `model_type`.
        tokenizer: a folder; by default the model's, or 'bytes', which makes a token of each byte.
        text: a file, a folder, a glob, or "stdlib"; it is packed to windows of `context` tokens.
        dataset: instead of a text, arguments of `datasets.load_dataset`; column: of its text.
        lora: arguments of peft's `LoraConfig`: only the adapters are trained, and travel.
        sample_prompt: what the sample in a run's report begins with.

    Raises:
        TaskError: transformers, peft or datasets is missing, or refuses what it is given.
        TextError: the text is missing, unreadable or too short."""

    loss_unit = "nats per token"

    @staticmethod
    def local_options(options: Mapping[str, object]) -> tuple[str, ...]:
        """Names the options that name files of this machine, or could have a library load code: a
        config and adapters are harmless if they consist of numbers and known words."""
        model, lora = options.get("model"), options.get("lora")
        named = {
            "model": not (isinstance(model, Mapping) and _harmless(model, _MODEL_WORDS)),
            "tokenizer": options.get("tokenizer", BYTES) not in (None, BYTES),
            "text": options.get("text", texts.STDLIB) != texts.STDLIB,
            "dataset": options.get("dataset") is not None,
            "lora": not (
                lora is None
                or (isinstance(lora, Mapping) and set(lora) <= _LORA and _harmless(lora, _LORA))
            ),
        }
        return tuple(key for key, local in named.items() if local and key in options)

    @staticmethod
    def least_bytes(options: Mapping[str, Any], stages: int) -> int:
        """Counts what a process with such options holds at least: the values, with gradients,
        anchor and momentum unless adapters alone are trained; 0 for a folder of this machine."""
        model = options.get("model")
        if not isinstance(model, Mapping):
            return 0
        hidden, layers, inner = (
            max((int(model.get(name) or 0) for name in names), default=0) for names in _SIZES
        )
        layer = 4 * hidden * hidden + 2 * hidden * inner
        elements = hidden * int(model.get("vocab_size") or 0) + layers * layer // stages
        return 4 * elements * (4 if options.get("lora") is None else 1)

    def __init__(
        self,
        *,
        seed: int,
        model: str | Mapping[str, Any],
        tokenizer: str | None = None,
        text: str | None = None,
        dataset: Mapping[str, Any] | None = None,
        column: str = "text",
        context: int = 128,
        batch_size: int = 4,
        lora: Mapping[str, Any] | None = None,
        sample_prompt: str = "def ",
    ) -> None:
        texts.check_sizes(context=context, batch_size=batch_size)
        if text is not None and dataset is not None:
            raise TaskError("text and dataset are both given: leave one of them out")
        self._transformers = texts.library("transformers", "task 'huggingface'", "hf")
        self._source, self._seed, self._lora = model, seed, lora
        self.batch_size, self._context = batch_size, context
        self.tokens_per_sample, self.sample_prompt = context, sample_prompt
        self._config = self._read_config()
        shape = self._config.get_text_config()
        self._vocab = int(getattr(shape, "vocab_size", 0))
        places = getattr(shape, "max_position_embeddings", None) or context
        if context > places > 0 and not _ROTARY & vars(shape).keys():  # these are computed
            raise TaskError(
                f"context is {context}, and the model has {places} positions: shorten it"
            )
        self._tokenizer = self._read_tokenizer(tokenizer)
        if self._tokenizer is None:
            self.loss_unit = "nats per byte"
        self._streamed = None
        self.warnings: tuple[str, ...] = ()
        if dataset is None:
            self._tokens = self._read_text(texts.STDLIB if text is None else text)
        else:
            end = getattr(self._tokenizer, "eos_token_id", None)
            self._streamed = texts.Streamed(dataset, column, self._tokenized, end)

    def model(self) -> nn.Module:
        """Return a new model (CPU, fp32), from its checkpoint or by the seed."""
        auto, source = self._transformers.AutoModelForCausalLM, self._source
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            if isinstance(source, str) and any(Path(source).glob("*.safetensors")):
                kinds = (OSError, ValueError, RuntimeError, SafetensorError)
                with _refusals(f"model {source!r}", kinds=kinds):
                    made = auto.from_pretrained(source, dtype=torch.float32, local_files_only=True)
            else:
                if isinstance(source, str) and (held := _other_weights(Path(source))):
                    raise TaskError(
                        f"model {source!r}: {held} is not read: store the weights as safetensors "
                        "(`save_pretrained` does), or remove it to draw new ones"
                    )
                made = auto.from_config(self._config, dtype=torch.float32)
            model: nn.Module = made.train()
            if self._lora is not None:
                peft = texts.library("peft", "task 'huggingface'", "hf")
                with _refusals("lora", kinds=(TypeError, ValueError)):
                    settings = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **self._lora})
                    model = peft.get_peft_model(model, settings)
            return model

    def batches(self, split: str, cursor: Cursor) -> Iterator[Batch]:
        """Yield batches without end: inputs and targets are int64, (batch_size, context)."""
        if split not in SPLITS:
            raise ValueError(f"split is 'train' or 'validation', not {split!r}")
        if self._streamed is not None:
            found = self._streamed.windows(split, cursor, self._context + 1)
            while True:
                windows = np.stack([next(found) for _ in range(self.batch_size)])
                cursor = cursor.advance(self.batch_size)
                yield texts.batch_of(torch.from_numpy(windows), cursor)
        yield from texts.drawn_windows(self._tokens[split], cursor, self.batch_size, self._context)

    def loader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        """Return a loader of the text's windows, each token in one. Raises TaskError: of a data
        set."""
        if self._streamed is not None:
            raise TaskError('data = "leased" needs a text: it does not go with a dataset')
        windows = texts.Windows(self._tokens["train"], self._context)
        return DataLoader(windows, self.batch_size, shuffle=True)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy of the batch in nats per token: scalar, fp32."""
        logits = model(input_ids=batch.inputs, use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())

    def generate(
        self, model: nn.Module, prompt: str, n_tokens: int, temperature: float, seed: int
    ) -> str:
        """Return the `n_tokens` tokens that the model puts after `prompt`."""
        tokens = torch.from_numpy(self._tokenized(prompt.encode() or b"\n"))[None]
        if not tokens.numel():
            raise TaskError(f"the prompt {prompt!r} has no token: give another")
        device = next(model.parameters()).device
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            torch.manual_seed(seed)
            for _ in range(n_tokens):
                seen = tokens[:, -self._context :].to(device)
                logits = model(input_ids=seen, use_cache=False).logits[0, -1].float().cpu()
                tokens = torch.cat([tokens, texts.next_token(logits, temperature)[None]], dim=1)
        added: list[int] = tokens[0, -n_tokens:].tolist()
        if self._tokenizer is None:
            return bytes(token for token in added if token < 256).decode("utf-8", "replace")
        return str(self._tokenizer.decode(added))

    def to_huggingface(self, model: nn.Module, folder: Path) -> nn.Module:
        """Write config and tokenizer; return the model to store beside them, adapters merged."""
        if self._lora is not None:
            model = model.merge_and_unload()  # type: ignore[operator]  # peft's
        self._config.architectures = [type(model).__name__]
        self._config.save_pretrained(folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
        return model

    def _read_config(self) -> Any:
        auto, source = self._transformers.AutoConfig, self._source
        instead = "; name a folder with config.json, or give the config as a table with model_type"
        instead += ', such as { model_type = "llama" }'
        with _refusals(f"model {source!r}", instead, (OSError, ValueError, TypeError, KeyError)):
            if isinstance(source, str):
                return auto.from_pretrained(source, local_files_only=True)
            return auto.for_model(**source)

    def _read_tokenizer(self, named: str | None) -> Any:
        """None for bytes."""
        folder = named or (self._source if isinstance(self._source, str) else BYTES)
        if folder == BYTES:
            if self._vocab < 256:
                raise TaskError(
                    f"tokenizer 'bytes' has 256 tokens, the model {self._vocab}: set "
                    "vocab_size = 256 or name a tokenizer"
                )
            return None
        with _refusals(f"tokenizer {folder!r}", "; name a folder with a tokenizer, or 'bytes'"):
            return self._transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def _read_text(self, text: str) -> dict[str, npt.NDArray[np.int64]]:
        corpus = texts.load_text(text)
        self.warnings += corpus.warnings
        train, held_out = bytes(corpus.train), bytes(corpus.validation)
        if self._tokenizer is not None:  # a file may be cut within a character
            rest = len(held_out[:3]) - len(held_out[:3].lstrip(_WITHIN))
            train, held_out = train + held_out[:rest], held_out[rest:]
        found = {"train": self._tokenized(train), "validation": self._tokenized(held_out)}
        for split, tokens in found.items():
            if tokens.size <= self._context:
                raise TextError(
                    f"text {text!r}: too short: {tokens.size:,} tokens of {split}, but one sample "
                    f"takes {self._context + 1:,}: give more text or a smaller context"
                )
        return found

    def _tokenized(self, text: bytes) -> npt.NDArray[np.int64]:
        if self._tokenizer is None:
            return np.frombuffer(text, np.uint8).astype(np.int64)
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            decoded = text.decode("utf-8", "replace")
            self.warnings += (f"the text is not all UTF-8 ({error.reason}): some bytes are lost",)
        ids = self._tokenizer(decoded, add_special_tokens=False)["input_ids"]
        found = np.asarray(ids, np.int64)
        if (most := int(found.max(initial=0))) >= self._vocab:
            raise TaskError(
                f"the tokenizer gives token {most}, the model has {self._vocab}: name its own"
            )
        return found


def _other_weights(folder: Path) -> str | None:
    kinds = ("pytorch_model*.bin", "*.pth", "*.ckpt*", "*.h5", "*.msgpack", "*.gguf")
    return next((path.name for kind in kinds for path in sorted(folder.glob(kind))), None)


def _harmless(value: object, words: Container[str], key: str = "") -> bool:
    """Tells whether it is made of numbers, and of text only under one of the keys `words`."""
    if isinstance(value, Mapping):
        return all(_harmless(inner, words, str(key)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_harmless(inner, words, key) for inner in value)
    return value is None or isinstance(value, int | float) or key in words


@contextmanager
def _refusals(
    what: str, instead: str = "", kinds: tuple[type[Exception], ...] = (OSError, ValueError)
) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise TaskError(f"{what}: {one_line(error)[:300]}{instead}") from error
