"""The part of the model that a process holds: all of it, or one stage. Stages are assembled from
live peers or from checkpoints; one that nobody serves is rebuilt from its neighbours."""

import asyncio
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.fragments import Fragment, TensorSpec
from murmuration.protos.events import Log, new_event
from murmuration.worker.catchup.donors import confirms, fetch_states, headers_at
from murmuration.worker.config import Config, fragments_of
from murmuration.worker.errors import CheckpointError, ConfigError
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Digest, Health, Member, Phase
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stage_replica import StageReplica
from murmuration.worker.pipeline.stages_config import cut_of
from murmuration.worker.tasks import Cursor, Staged, StageModule, Task
from murmuration.worker.training import checkpoint
from murmuration.worker.training.export import model_of
from murmuration.worker.training.kseed import SeedReplica
from murmuration.worker.training.mailbox import IOThread, Mailbox
from murmuration.worker.training.model import schema_of
from murmuration.worker.training.optimizers import KSEED
from murmuration.worker.training.replica import InnerReplica
from murmuration.worker.transport import TransportError
from murmuration.worker.wire import Incoming, WireError

if TYPE_CHECKING:
    from murmuration.worker.training.loop import Trainer

Anchors = Mapping[int, Sequence[Tensor]]  # of stages, by fragment
Sizes = Mapping[int, tuple[int, int]]  # by fragment, the number of values of anchor and momentum

# How long a donor may send nothing, and a byte may take (s): at first, and where none is faster.
_PACES = (3.0, 1e-6), (40.0, 1e-5)
_ASKING_S, _ASK_AGAIN_S = 2.0, 0.25  # replicas that may be about to hold a state

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_PATIENCE_S = 30.0
_POLL_S = 0.1
# Of CheckFree (arXiv:2506.15461, algorithm 1): the mean of neighbours has to leave them.
_REBUILT_LR = 1.1


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


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """The whole model of a staged run: its anchors by parameter, and where they were written."""

    anchors: Mapping[str, Tensor]
    path: Path


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
    context: StageContext, expected: Mapping[int, Sizes], limit_s: float, *, alike: bool = True
) -> dict[int, list[Tensor]]:
    """The anchors of stages from their replicas, by stage; of those that come within `limit_s`.
    Args: alike: replicas of a stage hold one state; else any of them may do."""
    found: dict[int, list[Tensor]] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            for stage, sizes in expected.items():
                group.create_task(_fetch_stage(context, stage, sizes, found, alike=alike))
    return found


async def _fetch_stage(
    context: StageContext, stage: int, sizes: Sizes, found: dict[int, list[Tensor]], *, alike: bool
) -> None:
    """Finds a state that most replicas hold, or have held; else that which the most do. Those are
    asked first whose announced state the most have (docs/adr/0035)."""
    live = [member for member in context.members() if member.stage == stage and member.live]
    replicas = [member for member in live if len(member.digests) == len(sizes)]
    same = Counter(member.digests for member in replicas)
    replicas.sort(key=lambda m: (-same[m.digests], m.phase is not Phase.DONE, -m.step, m.peer))
    votes, most = alike or max(same.values(), default=0) > 1, 0
    donors, begun = replicas, dict[int, Incoming]()
    for pace in _PACES:
        slow: list[Member] = []
        for donor in donors:
            given = (context.transport, donor, context.run, sizes, context.offload, pace, begun)
            try:
                _, states = await fetch_states(*given)
            except TimeoutError:
                slow.append(donor)
                continue
            except (TransportError, WireError):
                continue
            newest = context.member(donor.peer) or donor
            if all(_is_another(states, each.digests) for each in (donor, newest)):
                text = f"{donor.peer} gives another state of stage {stage} than it announces"
                context.event("warning", text=f"{text}: it is not taken")
                continue
            answering = [member for member in replicas if member not in (donor, *slow)]
            enough = 1 + len(replicas) // 2 if votes else 1
            holders = await _holders(context, answering, states, enough)
            if holders > most:
                most, found[stage] = holders, [states[index].anchor for index in sorted(states)]
            if holders >= enough:
                return
        if stage in found:
            return
        donors = slow


def _is_another(states: Mapping[int, FragmentState], digests: Iterable[Digest]) -> bool:
    """Tells whether the states are not the announced ones, nor can follow them."""
    both = zip((states[index] for index in sorted(states)), digests, strict=False)
    return any(state.version <= said.version and state.hash != said.hash for state, said in both)


async def _holders(
    context: StageContext, open_: list[Member], states: Mapping[int, FragmentState], enough: int
) -> int:
    """How many replicas hold the donor's states, or have held them, until enough are known to."""
    asked = [(index, state.version) for index, state in states.items()]
    holders, until = 1, context.clock() + _ASKING_S
    while open_ and holders < enough:
        told = await asyncio.gather(
            *(headers_at(context.transport, m, context.run, asked) for m in open_)
        )
        had = [dict(zip(asked, (h.hash for h in each), strict=False)) for each in told]
        answers = [confirms(each, states) for each in had]
        holders += answers.count(True)
        open_ = [m for m, answer in zip(open_, answers, strict=True) if answer is None]
        if context.clock() >= until:
            break
        await asyncio.sleep(_ASK_AGAIN_S)
    return holders


def assemble(run: Path, out: Path, settings: Iterable[str] = ()) -> tuple[Path, Mapping[int, int]]:
    """Puts the newest checkpoints of all stages below `run` together. Returns the new one, named
    after the least step, and the step of each stage. Args: settings: as `config_of` takes them.
    Raises as that; CheckpointError: not all stages are there, or they are of different runs."""
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


class StageLifecycle:
    """The life of a stage around its training: before, it is rebuilt from its neighbours if nobody
    serves it; after, one replica of stage 0 puts the whole model together. train thread only.
    `io` listens already."""

    def __init__(
        self, task: Task, config: Config, manifest: Manifest, io: IOThread, out: Path, log: Log
    ) -> None:
        assert io.node.stages is not None, "the model is cut"
        self._context = io.node.stages.context
        self._task, self._config, self._manifest = task, config, manifest
        self._io, self._out, self._log = io, out, log

    def rebuild(self, trainer: "Trainer", interrupted: Callable[[], bool]) -> None:
        """Makes this stage from the neighbours that can be fetched; with none it stays as drawn."""
        stage, deadline = self._context.stage, time.monotonic() + _PATIENCE_S
        while not (weights := neighbour_weights(stage, self._members())):
            if interrupted() or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)  # gossip does not know of the neighbours yet
        anchors = self._fetched(weights)
        weights = weights_of(anchors, weights)
        if not weights:
            text = f"stage {stage} begins afresh: its neighbours cannot be fetched"
            self._log(new_event("warning", text=text))
            return
        made = rebuilt_stage(self._task, self._config, stage, anchors, weights)
        for name, parameter in trainer.replica.parameters.items():
            parameter.copy_(made[name])
        for each in trainer.fragments:
            each.commit(anchor=each.local)
        if self._config.plan.payload == "pseudo_gradient":
            # Replicas that average gradients have to take equal steps: there it stays as it is.
            trainer.replica.lr_factor *= _REBUILT_LR
        rounded = {n: round(weight, 3) for n, weight in weights.items()}
        self._log(new_event("rebuilt", stage=stage, **{"from": rounded}))

    def settle(self, trainer: "Trainer", agreed: Callable[[], bool], timeout_s: float) -> None:
        """As the trainer does. A replica of stage 0 that is stopped meanwhile leaves the whole
        model to the next one, and must not look as if it had assembled it and left."""
        trainer.await_others(agreed, timeout_s)
        if trainer.stopped is None or self._context.stage != 0:
            return
        if any(m.live and m.stage == 0 and m.peer != self._context.me for m in self._members()):
            trainer.reporter.phase = Phase.TRAINING
            trainer.publish()

    def end(self, trainer: "Trainer") -> WholeModel | None:
        """The whole model, left as a checkpoint by one worker; None if a stage is missing."""
        if trainer.stopped is None:
            self.settle(trainer, self._is_assembled, _PATIENCE_S)
        if trainer.stopped is not None:
            return None
        assembler = self._assembler()
        if assembler is None or assembler.peer != self._context.me:
            return None
        trainer.report("assembling")
        config = self._config
        anchors = self._fetched(range(1, config.stages.count))
        anchors[0] = [state.anchor for state in trainer.states]
        missing = [stage for stage in range(config.stages.count) if stage not in anchors]
        if missing:
            text = f"no whole model: stage {missing[0]} cannot be fetched from anyone"
            self._log(new_event("warning", text=text))
            return None
        whole, folder = whole_model(self._task, config, anchors), self._out / "assembled"
        checkpoint.set_aside(folder)
        try:
            path = save_whole(folder, trainer.step, self._manifest, whole)
        except OSError as error:
            self._log(new_event("warning", text=f"no whole model in {folder}: {error}"))
            return None
        self._log(new_event("assembled", path=str(path), step=trainer.step))
        return WholeModel(anchors=whole, path=path)

    def _assembler(self) -> Member | None:
        """The first replica of stage 0 that is here, or has assembled the model and left."""
        left = (Health.LEFT, Phase.DONE)
        able = [m for m in self._members() if m.live or (m.health, m.phase) == left]
        return min((m for m in able if m.stage == 0), key=lambda m: m.peer, default=None)

    def _is_assembled(self) -> bool:
        """Says whether nobody else has still to assemble the model, which a result shows."""
        assembler = self._assembler()
        if assembler is None or not assembler.live or assembler.peer == self._context.me:
            return True
        return self._io.ask(lambda: self._io.node.results.has(assembler.peer))

    def _members(self) -> tuple[Member, ...]:
        return self._io.ask(lambda: tuple(self._context.members()))

    def _fetched(self, stages: Iterable[int]) -> dict[int, list[Tensor]]:
        config, context = self._config, self._context
        momenta = config.plan.payload == "pseudo_gradient" and config.plan.exchange != "none"
        parts = {stage: part_of(self._task, config, stage) for stage in stages}
        expected = {
            stage: {f.index: (f.elements, f.elements * momenta) for f in each.fragments(config)}
            for stage, each in parts.items()
        }
        alike = config.plan.exchange == "mean"
        return self._io.do(lambda: fetch_stages(context, expected, _PATIENCE_S, alike=alike))
