"""The anchor as files that others read, and the way back: Hugging Face's layout, or safetensors.

DIR/model.safetensors   parameters and buffers by name; `model.load_state_dict(load_file(...))`
DIR/config.json         Hugging Face's, where the task's model has a class there
DIR/murmuration.json    run, step and settings that it came from
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from murmuration.worker.config import task_of
from murmuration.worker.errors import UsageError
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import ExportsToHuggingFace
from murmuration.worker.training.checkpoint import config_of
from murmuration.worker.training.initial import anchored_model, find_checkpoint
from murmuration.worker.training.model import bare_name

MODEL = "model.safetensors"

Layout = Literal["hf", "safetensors"]


@dataclass(frozen=True)
class Exported:
    """Args:
    path: of the tensors.
    step: of the anchor.
    parameters: how many.
    layout: of the folder.
    """

    path: Path
    step: int
    parameters: int
    layout: Layout


def export(run: Path, out: Path, layout: Layout | None, settings: Iterable[str] = ()) -> Exported:
    """Writes the newest anchor below the folder `run` to the folder `out`.

    Args:
        layout: None takes Hugging Face's where the model has it.
        settings: of [task], typed here; what loads code or reads files must be among them.

    Raises:
        CheckpointError: there is no anchor of a whole model.
        TaskError: the run's task cannot be loaded here.
        UsageError: the layout or the folder cannot be.
    """
    saved = find_checkpoint(run)
    manifest = Manifest(saved.values["manifest"])
    config = config_of(saved, settings)
    task = task_of(config)
    known = isinstance(task, ExportsToHuggingFace)
    if layout == "hf" and not known:
        raise UsageError(
            f"--to hf: the task {config.task.name!r} has no to_huggingface(); leave --to out"
        )
    chosen: Layout = layout or ("hf" if known else "safetensors")
    model = anchored_model(saved, config, task)
    step = int(saved.values["step"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        if chosen == "hf" and isinstance(task, ExportsToHuggingFace):
            model = task.to_huggingface(model, out)
        save_file(distinct_tensors(model), out / MODEL, {"format": "pt"})
        source = {"run": f"{manifest.run:016x}", "step": step, "settings": manifest.sections}
        (out / "murmuration.json").write_text(json.dumps(source, indent=1))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{out}: cannot be written: {error}; choose another folder") from error
    return Exported(out / MODEL, step, sum(p.numel() for p in model.parameters()), chosen)


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by its names in the bare model, each storage once: of tied weights the
    first name."""
    found: dict[int, str] = {}
    for name, value in model.state_dict().items():
        found.setdefault(value.data_ptr() if value.numel() else -len(found) - 1, name)
    state = model.state_dict()
    return {bare_name(name): state[name].contiguous() for name in found.values()}
