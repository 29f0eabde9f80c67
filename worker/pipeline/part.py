"""The part of the model that a process holds: all of it, or one stage. Stages are assembled from
live peers or from checkpoints; one that nobody serves is rebuilt from its neighbours."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.worker.catchup.donors import fetch_states
from murmuration.worker.config import Config, fragments_of
from murmuration.worker.errors import CheckpointError, ConfigError
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Member, Phase
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stage_replica import StageReplica
from murmuration.worker.pipeline.stages_config import cut_of
from murmuration.worker.tasks import Cursor, Staged, StageModule, Task
from murmuration.worker.training import checkpoint
from murmuration.worker.training.export import model_of
from murmuration.worker.training.kseed import SeedReplica
from murmuration.worker.training.mailbox import Mailbox
from murmuration.worker.training.model import schema_of
from murmuration.worker.training.optimizers import KSEED
from murmuration.worker.training.replica import InnerReplica
from murmuration.worker.transport import TransportError
from murmuration.worker.wire import WireError

Anchors = Mapping[int, Sequence[Tensor]]  # of stages, by fragment

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Part:
    """The part of the model that a process holds: a `stage`, or all. `whole` is in the manifest of
    a staged run for the whole model, which nobody holds."""

    module: nn.Module
    stage: int | None = None
    whole: Sequence[TensorSpec] = ()

    @property
    def schema(self) -> list[TensorSpec]:
        """The tensors that are exchanged; running statistics of whole models only."""
        return schema_of(self.module, statistics=self.stage is None)

    def fragments(self, config: Config) -> tuple[Fragment, ...]:
        """As the plan has them. Raises ConfigError."""
        where = "" if self.stage is None else f"stage {self.stage}: "
        return fragments_of(self.schema, config, where)

    def replica(self, task: Task, config: Config, cursor: Cursor, mailbox: Mailbox) -> InnerReplica:
        if self.stage is None:
            whole = SeedReplica if config.inner.optimizer == KSEED else InnerReplica
            return whole(task, self.module, config.inner, cursor, config.run.steps)
        assert isinstance(self.module, StageModule)
        begins = self.stage == 0
        return StageReplica(task, self.module, config, cursor, mailbox.post, begins=begins)


def part_of(task: Task, config: Config, stage: int = 0) -> Part:
    """Raises as `model_of`, and ConfigError: a task that cannot be cut, or not into such stages."""
    count = config.stages.count
    if count == 1:
        return Part(model_of(task, config))
    if not isinstance(task, Staged):
        where = config.source.of("stages", ["count"])
        raise ConfigError(
            f"{where}: [stages] count = {count}: the task {config.task.name!r} cannot be cut into "
            "stages; give it layer_sizes, outer_size and stage, or leave [stages] out"
        )
    if not 0 <= stage < count:
        raise ConfigError(f"--stage {stage}: this run has stages 0 to {count - 1}")
    try:
        first, last = cut_of(task, config.stages)[stage]
    except ValueError as error:
        where = config.source.of("stages", ["layers" if config.stages.layers else "count"])
        raise ConfigError(f"{where}: [stages] count = {count}: {error}") from error
    whole = [TensorSpec(f"layers.{n}", (size,)) for n, size in enumerate(task.layer_sizes())]
    whole.append(TensorSpec("outside the layers", (task.outer_size(),)))
    return Part(task.stage(first, last, outer=stage == 0), stage, whole)


def whole_model(task: Task, config: Config, anchors: Anchors) -> dict[str, Tensor]:
    """The anchor of every parameter by name, in the order of the model, from its stages."""
    whole: dict[str, Tensor] = {}
    for stage, flat in anchors.items():
        fragments = part_of(task, config, stage).fragments(config)
        for fragment, anchor in zip(fragments, flat, strict=True):
            whole.update(fragment.views(anchor))
    return {name: whole[name] for name, _ in task.model().named_parameters() if name in whole}


def save_whole(folder: Path, step: int, manifest: Manifest, whole: Mapping[str, Tensor]) -> Path:
    """Writes a checkpoint that `murmur generate` and `murmur evaluate` take. Raises OSError."""
    tensors = {f"anchor/{name}": values for name, values in whole.items()}
    return checkpoint.save(folder, step, tensors, {"manifest": manifest.plain(), "step": step})


async def fetch_stages(
    context: StageContext, expected: Mapping[int, Mapping[int, tuple[int, int]]]
) -> dict[int, list[Tensor]]:
    """The anchors of stages from their replicas, by stage; of those that answer. `expected`: by
    stage and fragment, the number of values of anchor and momentum."""
    fetched, transport, run = dict[int, list[Tensor]](), context.transport, context.run
    for stage, sizes in expected.items():
        replicas = [m for m in context.members() if m.stage == stage and m.live]
        for member in sorted(replicas, key=lambda m: (m.phase is not Phase.DONE, -m.step, m.peer)):
            try:
                _, states = await fetch_states(transport, member, run, sizes, context.offload)
            except (TransportError, TimeoutError, WireError):
                continue
            fetched[stage] = [states[index].anchor for index in sorted(states)]
            break
    return fetched


def assemble(run: Path, out: Path, settings: Iterable[str] = ()) -> tuple[Path, Mapping[int, int]]:
    """Puts the newest checkpoints of all stages below `run` together. Returns the new one, named
    after the least step, and the step of each stage. The settings are of [task], typed here; what
    loads code or reads files must be among them. Raises CheckpointError: not all stages are there,
    or they are of different runs; TaskError: the run's task cannot be loaded here."""
    newest: dict[int, checkpoint.Checkpoint] = {}
    for saved in checkpoint.below(run):
        if (stage := saved.values.get("stage")) is not None:
            newest[stage] = max(newest.get(stage, saved), saved, key=lambda s: s.values["step"])
    if not newest:
        raise CheckpointError(
            f"{run}: no checkpoint of a stage; name the folder of a run with --stages"
        )
    one = next(iter(newest.values()))
    manifest, config = Manifest(one.values["manifest"]), checkpoint.config_of(one, settings)
    missing = [str(stage) for stage in range(config.stages.count) if stage not in newest]
    if missing:
        raise CheckpointError(f"{run}: no checkpoint of stage {', '.join(missing)}")
    if any(Manifest(s.values["manifest"]).run != manifest.run for s in newest.values()):
        raise CheckpointError(f"{run}: checkpoints of several runs; name the folder of one")
    anchors = [saved.named("anchor") for saved in newest.values()]
    whole = {name: each for anchor in anchors for name, each in anchor.items()}
    steps = {stage: int(newest[stage].values["step"]) for stage in sorted(newest)}
    return save_whole(out, min(steps.values()), manifest, whole), steps


def neighbour_weights(stage: int, members: Sequence[Member]) -> dict[int, float]:
    """The stages to make this one from, and their weights: the norm of the last gradient, in the
    median of a stage's replicas, alike where none is known. The last stage has but one neighbour.

    Ref: arXiv:2506.15461 (CheckFree): W_i = (n_{i-1} W_{i-1} + n_{i+1} W_{i+1}) / their sum."""
    told: dict[int, list[float]] = {}
    for member in members:
        if member.live and abs(member.stage - stage) == 1:
            told.setdefault(member.stage, []).append(Profile.unpack(member.profile).gradient_norm)
    norms = {n: statistics.median_low([*filter(None, each)] or [0.0]) for n, each in told.items()}
    return weights_of(norms, norms)


def weights_of(there: Iterable[int], weights: Mapping[int, float]) -> dict[int, float]:
    """The weights of the stages that are there, with a sum of 1; alike where all of them are 0."""
    left = {stage: weights[stage] for stage in there}
    total = sum(left.values())
    return {n: weight / total if total > 0 else 1 / len(left) for n, weight in left.items()}


def rebuilt_stage(
    task: Task, config: Config, stage: int, anchors: Anchors, weights: Mapping[int, float]
) -> dict[str, Tensor]:
    """The stage's parameters by name: the weighted mean of its neighbours', layer by layer. Takes
    the neighbours' anchors and their weights, with a sum of 1."""
    assert isinstance(task, Staged)
    cut, known = cut_of(task, config.stages), whole_model(task, config, anchors)
    first, last = cut[stage]

    def part(name: str, neighbour: int) -> Tensor:
        """The values of the neighbour's layer at the same place, or of its last if it has fewer."""
        begin, end = cut[neighbour]
        there = _LAYER.sub(lambda found: str(min(begin + int(found[0]) - first, end)), name, 1)
        return weights[neighbour] * known[there]

    return {
        name: torch.stack([part(name, neighbour) for neighbour in weights]).sum(dim=0)
        for name, _ in task.stage(first, last, outer=False).named_parameters()
    }
