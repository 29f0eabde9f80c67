"""Checkpoints of runs that were never trained: of a tiny Llama, or of a task written here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from murmuration.worker.config import Config, load_config
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import load_task
from murmuration.worker.training import checkpoint
from murmuration.worker.training.model import integer_buffers, running_statistics, schema_of

SIZES = (
    "{hidden_size = 8, intermediate_size = 16, num_hidden_layers = 4, num_attention_heads = 2, "
    "num_key_value_heads = 1}"
)


def tiny_llama(folder: Path, *more: str) -> Config:
    """A run over a text in the folder."""
    text = folder / "text.txt"
    text.write_text("the flock turns as one, and no bird leads. " * 40)
    sizes = (f"task.text={text}", f"task.architecture={SIZES}", "task.context_bytes=16")
    return load_config(None, [*sizes, *more])


def own_task(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run of the task that `build` in the source makes. The folder's name is the module's."""
    module = f"task_in_{folder.name}"
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    return load_config(None, [f"task.name={module}:build"])


def trained(config: Config) -> nn.Module:
    """A model other than the run's first, so that a forgotten anchor would show."""
    model = load_task(config.task.name, seed=config.run.seed, options=config.task.options).model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def save_run(
    config: Config, model: nn.Module, folder: Path, step: int = 7, without: str = "", **values: Any
) -> Path:
    """Args: without: a parameter that is left out; values: of the checkpoint besides."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    named |= running_statistics(model) | integer_buffers(model)
    tensors = {f"anchor/{name}": held for name, held in named.items() if name != without}
    manifest = Manifest.of(config, schema_of(model)).plain()
    return checkpoint.save(folder, step, tensors, {"step": step, "manifest": manifest, **values})
