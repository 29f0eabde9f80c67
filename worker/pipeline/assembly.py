"""The whole model again, from the anchors of its stages: from live peers, or from checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from algorithms.fragments import Fragment, TensorSpec, partition
from worker.catchup.state_transfer import fetch_states
from worker.config import Config, task_of
from worker.errors import CheckpointError
from worker.exchange.context import Offload
from worker.manifest import Manifest
from worker.membership import Member, Phase
from worker.pipeline.part import part_of
from worker.tasks import Task
from worker.training import checkpoint
from worker.transport import Transport, TransportError
from worker.wire import WireError


def stage_fragments(task: Task, config: Config, stage: int) -> tuple[Fragment, ...]:
    """The fragments of one stage, as the peers that serve it lay them out."""
    return _fragments(part_of(task, config, stage).module.named_parameters(), config)


def whole_model(
    task: Task, config: Config, anchors: Mapping[int, Sequence[Tensor]]
) -> dict[str, Tensor]:
    """The anchor of every parameter of the model by name, in the order of the model.

    Args:
        anchors: by stage, of each of its fragments.
    """
    whole: dict[str, Tensor] = {}
    for stage, flat in anchors.items():
        for fragment, anchor in zip(stage_fragments(task, config, stage), flat, strict=True):
            whole.update(fragment.views(anchor))
    # A checkpoint's fragments are laid out in that order by whoever reads it.
    return {name: whole[name] for name, _ in task.model().named_parameters() if name in whole}


def save_whole(
    folder: Path, step: int, manifest: Manifest, config: Config, whole: Mapping[str, Tensor]
) -> Path:
    """Writes a checkpoint that `murmur generate` and `murmur evaluate` take. Raises OSError."""
    fragments = _fragments(whole.items(), config)
    tensors = {f"anchor/{fragment.index}": fragment.flatten(whole) for fragment in fragments}
    return checkpoint.save(folder, step, tensors, {"manifest": manifest.plain(), "step": step})


async def fetch_stages(
    transport: Transport,
    members: Sequence[Member],
    run: int,
    expected: Mapping[int, Mapping[int, tuple[int, int]]],
    offload: Offload,
) -> dict[int, list[Tensor]]:
    """The anchors of stages from their replicas, by stage; of those that answer.

    Args:
        expected: by stage and fragment, the number of values of anchor and momentum.
    """
    fetched: dict[int, list[Tensor]] = {}
    for stage, sizes in expected.items():
        replicas = [member for member in members if member.stage == stage and member.live]
        for member in sorted(replicas, key=lambda c: (c.phase is not Phase.DONE, -c.step, c.peer)):
            try:
                _, states = await fetch_states(transport, member.address, run, sizes, offload)
            except (TransportError, WireError):
                continue
            fetched[stage] = [states[index].anchor for index in sorted(states)]
            break
    return fetched


@dataclass(frozen=True)
class Assembled:
    """Args:
    path: of the checkpoint, named after the least of the steps.
    steps: by stage, which may differ where a run was cut off.
    """

    path: Path
    steps: Mapping[int, int]


def assemble(run: Path, out: Path) -> Assembled:
    """Puts the newest checkpoints of all stages below the folder `run` together.

    Raises:
        CheckpointError: not all stages are there, or they are of different runs.
    """
    newest: dict[int, checkpoint.Checkpoint] = {}
    for saved in checkpoint.below(run):
        stage = saved.values.get("stage")
        if stage is None:
            continue
        if stage not in newest or saved.values["step"] > newest[stage].values["step"]:
            newest[stage] = saved
    if not newest:
        raise CheckpointError(
            f"{run}: no checkpoint of a stage; name the folder of a run with --stages"
        )
    plain: dict[str, Any] = next(iter(newest.values())).values["manifest"]
    manifest = Manifest(plain)
    config = manifest.config(str(run))
    missing = [str(stage) for stage in range(config.stages.count) if stage not in newest]
    if missing:
        raise CheckpointError(f"{run}: no checkpoint of stage {', '.join(missing)}")
    if any(Manifest(s.values["manifest"]).run != manifest.run for s in newest.values()):
        raise CheckpointError(f"{run}: checkpoints of several runs; name the folder of one")
    task = task_of(config)
    anchors = {
        stage: [saved.tensors[f"anchor/{n}"] for n in range(len(saved.values["states"]))]
        for stage, saved in newest.items()
    }
    steps = {stage: int(newest[stage].values["step"]) for stage in sorted(newest)}
    whole = whole_model(task, config, anchors)
    return Assembled(save_whole(out, min(steps.values()), manifest, config, whole), steps)


def _fragments(parameters: Any, config: Config) -> tuple[Fragment, ...]:
    schema = [TensorSpec(name, tuple(values.shape)) for name, values in parameters]
    return partition(schema, config.plan.fragments, config.plan.pattern)
