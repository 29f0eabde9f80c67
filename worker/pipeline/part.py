"""The part of the model that a process holds: all of it, or one stage."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from algorithms.codecs import codec_by_name
from algorithms.fragments import Fragment, TensorSpec, partition
from worker.config import Config
from worker.errors import ConfigError
from worker.pipeline.config import cut_of
from worker.pipeline.replica import StageReplica
from worker.tasks import Cursor, Staged, StageModule, Task
from worker.training.inbox import Mailbox
from worker.training.replica import InnerReplica


@dataclass(frozen=True)
class Part:
    """Args:
    module: the layers held here.
    stage: which of the stages they are; None where the model is whole.
    whole: what stands for the whole model in the manifest of a staged run, which nobody holds.
    """

    module: nn.Module
    stage: int | None = None
    whole: Sequence[TensorSpec] = ()

    @property
    def schema(self) -> list[TensorSpec]:
        """What is trained of it, in the module's order."""
        return [
            TensorSpec(name, tuple(parameter.shape))
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]

    def replica(self, task: Task, config: Config, cursor: Cursor, mailbox: Mailbox) -> InnerReplica:
        """What trains it."""
        if self.stage is None:
            return InnerReplica(task, self.module, config.inner, cursor, config.run.steps)
        assert isinstance(self.module, StageModule)
        return StageReplica(
            task,
            self.module,
            config.inner,
            cursor,
            config.run.steps,
            codec=codec_by_name(config.stages.activations),
            microbatches=config.stages.microbatches if self.stage == 0 else 0,
            answer=mailbox.post,
            limit_bytes=config.stages.memory_bytes,
        )


def fragments_of(part: Part, config: Config) -> tuple[Fragment, ...]:
    """As the plan has them. Raises ConfigError: fewer layers, or a period too short for them."""
    try:
        fragments = partition(part.schema, config.plan.fragments, config.plan.pattern)
        config.plan.schedule(fragments=len(fragments), steps=config.run.steps)
    except ValueError as error:
        held = "" if part.stage is None else f"stage {part.stage}: "
        where = config.source.of_named("diloco", str(error), otherwise="fragments")
        raise ConfigError(f"{where}: {held}[diloco] {error}") from error
    return fragments


def cut_of_run(task: Staged, config: Config) -> list[tuple[int, int]]:
    """The first and the last layer of each stage. Raises ConfigError: the model has others."""
    try:
        return cut_of(task, config.stages)
    except ValueError as error:
        where = config.source.of("stages", ["layers" if config.stages.layers else "count"])
        raise ConfigError(f"{where}: [stages] count = {config.stages.count}: {error}") from error


def part_of(task: Task, config: Config, stage: int) -> Part:
    """Raises ConfigError: a task that cannot be cut, or not into these stages."""
    count = config.stages.count
    if count == 1:
        return Part(task.model())
    if not isinstance(task, Staged):
        where = config.source.of("stages", ["count"])
        raise ConfigError(
            f"{where}: [stages] count = {count}: the task {config.task.name!r} cannot be cut into "
            "stages; give it layer_sizes, outer_size and stage, or leave [stages] out"
        )
    if not 0 <= stage < count:
        raise ConfigError(f"--stage {stage}: this run has stages 0 to {count - 1}")
    cut = cut_of_run(task, config)
    whole = [TensorSpec(f"layers.{n}", (size,)) for n, size in enumerate(task.layer_sizes())]
    whole.append(TensorSpec("outside the layers", (task.outer_size(),)))
    first, last = cut[stage]
    return Part(task.stage(first, last, outer=stage == 0), stage, whole)
