"""Text from a checkpoint's anchor."""

from collections.abc import Iterator
from pathlib import Path

from worker.config import task_of
from worker.errors import CheckpointError
from worker.manifest import Manifest
from worker.tasks import Generates, Streams, TaskError
from worker.training import checkpoint
from worker.training.anchors import anchored_model


def generate_text(
    run: Path, prompt: str, n_tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """Continues `prompt` with the newest anchor below the folder `run`.

    Args:
        run: a swarm's folder, a worker's, one of checkpoints, or one checkpoint.

    Returns:
        The text in pieces, as they are made; in one where the task does not stream.

    Raises (before the first piece):
        CheckpointError: there is none that can be used.
        TaskError: the run's task cannot be loaded here, or writes no text.
    """
    saved = find_checkpoint(run)
    manifest = Manifest(saved.values["manifest"])
    config = manifest.config(str(saved.path))
    task = task_of(config)
    if not isinstance(task, Generates):
        raise TaskError(f"task {config.task.name!r} has no generate()")
    model = anchored_model(saved, config, task)
    if isinstance(task, Streams):
        return task.stream(model, prompt, n_tokens, temperature, seed)
    return iter([task.generate(model, prompt, n_tokens, temperature, seed)])


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
