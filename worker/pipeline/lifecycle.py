"""The life of a stage around its training: before, it is rebuilt from its neighbours if nobody
serves it; after, one replica of stage 0 puts the whole model together."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from murmuration.protos.events import Log, new_event
from murmuration.worker.config import Config
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline import part
from murmuration.worker.tasks import Task
from murmuration.worker.training import checkpoint
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.mailbox import IOThread
from murmuration.worker.training.result import WholeModel

_PATIENCE_S = 30.0
_POLL_S = 0.1
# Of CheckFree (arXiv:2506.15461, algorithm 1): the mean of neighbours has to leave them.
_REBUILT_LR = 1.1


class StageLifecycle:
    """Rebuilds a stage, and assembles the model. train thread only. `io` listens already."""

    def __init__(
        self, task: Task, config: Config, manifest: Manifest, io: IOThread, out: Path, log: Log
    ) -> None:
        assert io.node.stages is not None, "the model is cut"
        self._context = io.node.stages.context
        self._task, self._config, self._manifest = task, config, manifest
        self._io, self._out, self._log = io, out, log

    def rebuild(self, trainer: Trainer, interrupted: Callable[[], bool]) -> None:
        """Makes this stage from the neighbours that can be fetched; with none it stays as drawn."""
        stage, deadline = self._context.stage, time.monotonic() + _PATIENCE_S
        while not (weights := part.neighbour_weights(stage, self._members())):
            if interrupted() or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)  # gossip does not know of the neighbours yet
        anchors = self._fetched(weights)
        weights = part.weights_of(anchors, weights)
        if not weights:
            text = f"stage {stage} begins afresh: its neighbours cannot be fetched"
            self._log(new_event("warning", text=text))
            return
        made = part.rebuilt_stage(self._task, self._config, stage, anchors, weights)
        for name, parameter in trainer.replica.parameters.items():
            parameter.copy_(made[name])
        for each in trainer.fragments:
            each.commit(anchor=each.local)
        if self._config.plan.payload == "pseudo_gradient":
            # Replicas that average gradients have to take equal steps: there it stays as it is.
            trainer.replica.lr_factor *= _REBUILT_LR
        rounded = {n: round(weight, 3) for n, weight in weights.items()}
        self._log(new_event("rebuilt", stage=stage, **{"from": rounded}))

    def settle(self, trainer: Trainer, agreed: Callable[[], bool], timeout_s: float) -> None:
        """As the trainer does. A replica of stage 0 that is stopped meanwhile leaves the whole
        model to the next one, and must not look as if it had assembled it and left."""
        trainer.await_others(agreed, timeout_s)
        if trainer.stopped is None or self._context.stage != 0:
            return
        if any(m.live and m.stage == 0 and m.peer != self._context.me for m in self._members()):
            trainer.reporter.phase = Phase.TRAINING
            trainer.publish()

    def end(self, trainer: Trainer) -> WholeModel | None:
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
        whole, folder = part.whole_model(self._task, config, anchors), self._out / "assembled"
        checkpoint.set_aside(folder)
        try:
            path = part.save_whole(folder, trainer.step, self._manifest, whole)
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
        parts = {stage: part.part_of(self._task, config, stage) for stage in stages}
        expected = {
            stage: {f.index: (f.elements, f.elements * momenta) for f in each.fragments(config)}
            for stage, each in parts.items()
        }
        alike = config.plan.exchange == "mean"
        return self._io.do(lambda: part.fetch_stages(context, expected, _PATIENCE_S, alike=alike))
