"""The anchor as a model and as files that others read, and where a model's first values come from.

DIR/model.safetensors   parameters and buffers by name; `model.load_state_dict(load_file(...))`
DIR/config.json         Hugging Face's, where the task's model has a class there
DIR/murmuration.json    run, step and settings that it came from
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from murmuration.algorithms.diloco import AT_HOME
from murmuration.worker.config import Config, parse_config, task_of
from murmuration.worker.errors import CheckpointError, UsageError
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import ExportsToHuggingFace, Task
from murmuration.worker.training import checkpoint, model as models
from murmuration.worker.training.checkpoint import Checkpoint, config_of
from murmuration.worker.training.kseed import give_seed_space, take_seed_space
from murmuration.worker.training.optimizers import KSEED

MODEL = "model.safetensors"
_SOURCE, _CONFIG = "murmuration.json", "config.json"

Layout = Literal["hf", "safetensors"]


def export(
    run: Path, out: Path, layout: Layout | None, settings: Iterable[str] = ()
) -> tuple[Path, str]:
    """Writes the newest anchor below the folder `run` to the folder `out`. Returns the file of the
    tensors, and what it holds, for the user. Args: layout: None takes Hugging Face's where the
    model has it; settings: as `config_of` takes them. Raises as that, as `task_of` and as
    `anchored_model`; UsageError: the layout or the folder cannot be."""
    if not (out / _SOURCE).exists() and any((out / name).exists() for name in (MODEL, _CONFIG)):
        raise UsageError(f"{out} holds a model that is no export: choose another folder")
    saved = find_checkpoint(run)
    manifest, config = Manifest(saved.values["manifest"]), config_of(saved, settings)
    task = task_of(config)
    known = isinstance(task, ExportsToHuggingFace)
    if layout == "hf" and not known:
        raise UsageError(
            f"--to hf: the task {config.task.name!r} has no to_huggingface(); leave --to out"
        )
    chosen: Layout = layout or ("hf" if known else "safetensors")
    model, step = anchored_model(saved, config, task), int(saved.values["step"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        source = {"run": f"{manifest.run:016x}", "step": step, "settings": manifest.sections}
        (out / _SOURCE).write_text(json.dumps(source, indent=1))  # first: it may be tried again
        if chosen == "hf" and isinstance(task, ExportsToHuggingFace):
            model = task.to_huggingface(model, out)
        tensors = distinct_tensors(model)
        if chosen == "safetensors":  # with each name of what is tied: a file holds no two views
            state = model.state_dict().items()
            tensors = {models.bare_name(n): value.contiguous().clone() for n, value in state}
        save_file(tensors, out / MODEL, {"format": "pt"})
        (out / MODEL).chmod((out / _SOURCE).stat().st_mode)  # by the umask, which it passes over
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{out}: cannot be written: {error}; choose another folder") from error
    kind = "Hugging Face's layout" if chosen == "hf" else "tensors alone"
    parameters = sum(p.numel() for p in model.parameters())
    return out / MODEL, f"{parameters:,} parameters of step {step}, {kind}"


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Gives the model's state by its names in the bare model, each storage once."""
    state, found = model.state_dict(), dict[int, str]()
    for name, value in state.items():
        found.setdefault(value.data_ptr() if value.numel() else -len(found) - 1, name)
    return {models.bare_name(name): state[name].contiguous() for name in found.values()}


def model_of(task: Task, config: Config) -> nn.Module:
    """Makes the task's whole model as a run trains it: with `kseed` it has its first values, which
    never travel, and a seed space. Raises CheckpointError: these values are not on this machine, or
    of another model; TaskError: the model is none for `kseed`."""
    model = task.model()
    if config.inner.optimizer == KSEED:
        if config.task.init:
            load_initial(model, Path(config.task.init), task)
        give_seed_space(model, config.inner.seeds)
    return model


def anchored_model(saved: Checkpoint, config: Config, task: Task) -> nn.Module:
    """The task's model with the anchors as parameters; where nothing is exchanged, with the local
    ones. Raises CheckpointError: some is missing."""
    model = model_of(task, config)
    anchor, integers = saved.named("anchor"), models.integer_buffers(model)
    anchor |= saved.named("local") if config.plan.exchange == "none" else {}
    statistics = models.running_statistics(model).keys() - integers
    held_here = {**models.trained_parameters(model), **models.running_statistics(model), **integers}
    for name, held in held_here.items():
        if name not in anchor or anchor[name].shape != held.shape:
            raise CheckpointError(
                f"{saved.path}: does not hold the whole model of its run ({name}); "
                "name a checkpoint of a worker that trained all layers"
            )
        value, local = anchor[name], saved.tensors.get(f"local/{name}")
        if name in statistics and local is not None:
            value = torch.where(value == AT_HOME, local, value)
        held.detach().copy_(value)
    take_seed_space(model)
    return model


@torch.no_grad()
def load_initial(model: nn.Module, source: Path, task: Task) -> None:
    """Puts exported values, or those of a run's newest anchor, in the place of drawn ones. Raises
    CheckpointError: something is missing, or of another shape. Args: model: a whole model, or a
    stage of one: it takes what it has; source: a folder that `export` wrote or Hugging Face's, a
    file of safetensors, or a run's folder; task: whose model it is. A run's folder says which task
    it had; that one is not loaded."""
    if not source.exists():
        raise CheckpointError(f"[task] init = {source}: no such file or folder")
    given = _exported(source, task)
    every = {models.bare_name(name): each for name, each in model.named_parameters()}
    for name, parameter in every.items():
        value = given.get(name)
        if parameter.requires_grad if value is None else value.shape != parameter.shape:
            there = "missing" if value is None else f"of shape {tuple(value.shape)}"
            raise CheckpointError(
                f"[task] init = {source}: {name} is {there}, wanted {tuple(parameter.shape)}; "
                "name an export of the same model"
            )
    for name, held in {**every, **models.saved_buffers(model)}.items():
        if (value := given.get(name)) is not None:
            held.copy_(value)


def _exported(source: Path, task: Task) -> Mapping[str, Tensor]:
    try:
        if source.is_file():
            return load_file(source)
        files = sorted(source.glob("*.safetensors"))
        if files:
            return {name: value for file in files for name, value in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"[task] init = {source}: cannot be read: {error}") from error
    saved = find_checkpoint(source)
    config = parse_config(Manifest(saved.values["manifest"]).sections, str(saved.path))
    values = anchored_model(saved, config, task).state_dict()
    return {models.bare_name(name): value for name, value in values.items()}


def find_checkpoint(run: Path) -> checkpoint.Checkpoint:
    """Finds the usable checkpoint with the highest step below `run`. Raises CheckpointError."""
    if (run / checkpoint.MANIFEST).exists():
        try:
            return checkpoint.load_one(run)
        except checkpoint.CheckpointDamaged as error:
            raise CheckpointError(f"{run}: {error}; name the folder above it") from error
    if (found := next(checkpoint.below(run, whole=True), None)) is not None:
        return found
    if any(checkpoint.held_stage(path.parent) is not None for path in run.glob("**/step-*")):
        raise CheckpointError(
            f"{run}: holds single stages of a model; put them together with `murmur assemble {run}`"
        )
    raise CheckpointError(f"{run}: no usable checkpoint; name a folder that `murmur` wrote to")
