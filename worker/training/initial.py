"""A model with its first values, or with those of a checkpoint, and where such values are found."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from murmuration.algorithms.diloco import AT_HOME
from murmuration.worker.config import Config, parse_config
from murmuration.worker.errors import CheckpointError
from murmuration.worker.manifest import Manifest
from murmuration.worker.tasks import Task
from murmuration.worker.training import checkpoint
from murmuration.worker.training.checkpoint import Checkpoint
from murmuration.worker.training.config import KSEED
from murmuration.worker.training.kseed import give_seed_space, take_seed_space
from murmuration.worker.training.model import (
    bare_name,
    integer_buffers,
    running_statistics,
    trained_parameters,
)


def model_of(task: Task, config: Config) -> nn.Module:
    """The task's whole model as a run trains it: with `kseed` it has its first values, which never
    travel, and a seed space.

    Raises:
        CheckpointError: these values are not on this machine, or of another model.
        TaskError: the model is none for `kseed`.
    """
    model = task.model()
    if config.inner.optimizer == KSEED:
        if config.task.init:
            trained = {n: p.detach() for n, p in trained_parameters(model).items()}
            load_initial(model, Path(config.task.init), trained, task)
        give_seed_space(model, config.inner.seeds)
    return model


def anchored_model(saved: Checkpoint, config: Config, task: Task) -> nn.Module:
    """The task's model with the anchors as parameters.

    Args:
        saved: of a whole model.
        config, task: of its run.

    Raises:
        CheckpointError: it does not hold the whole model of its run.
    """
    model = model_of(task, config)
    anchor, integers = saved.named("anchor"), integer_buffers(model)
    statistics = running_statistics(model).keys() - integers
    held_here = {**trained_parameters(model), **running_statistics(model), **integers}
    for name, held in held_here.items():
        if name in integers and name not in anchor:
            continue  # of a run before they were exchanged
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


def load_initial(model: nn.Module, source: Path, names: Mapping[str, Tensor], task: Task) -> None:
    """Puts exported values, or those of a run's newest anchor, in the place of drawn ones.

    Args:
        model: a whole model, or a stage of one: it takes what it has.
        source: a folder that `export` wrote or Hugging Face's, a file of safetensors, or a run's
            folder.
        names: what must be there: parameters by name.
        task: whose model it is. A run's folder says which task it had; that one is not loaded.

    Raises:
        CheckpointError: something is missing, or of another shape.
    """
    if not source.exists():
        raise CheckpointError(f"[task] init = {source}: no such file or folder")
    given = _exported(source, task)
    for name, parameter in names.items():
        value = given.get(name)
        if value is None or value.shape != parameter.shape:
            there = "missing" if value is None else f"of shape {tuple(value.shape)}"
            raise CheckpointError(
                f"[task] init = {source}: {name} is {there}, wanted {tuple(parameter.shape)}; "
                "name an export of the same model"
            )
        parameter.copy_(value)
    state = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in state and (value := given.get(bare_name(name))) is not None:
            buffer.copy_(value)


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
    return {bare_name(name): value for name, value in values.items()}


def find_checkpoint(run: Path) -> checkpoint.Checkpoint:
    """The usable checkpoint with the highest step below `run`; not of runs that were set aside.

    Raises:
        CheckpointError: there is none.
    """
    if (run / checkpoint.MANIFEST).exists():
        try:
            return checkpoint.load_one(run)
        except checkpoint.CheckpointDamaged as error:
            raise CheckpointError(f"{run}: {error}; name the folder above it") from error
    saved = list(checkpoint.below(run))
    found = [each for each in saved if each.values.get("stage") is None]
    if saved and not found:
        raise CheckpointError(
            f"{run}: holds single stages of a model; put them together with `murmur assemble {run}`"
        )
    if not found:
        raise CheckpointError(f"{run}: no usable checkpoint; name a folder that `murmur` wrote to")
    return max(found, key=lambda saved: saved.values["step"])
