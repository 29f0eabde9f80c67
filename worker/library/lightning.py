"""`murmuration.lightning.LightningCallback`: a Lightning `Trainer` as a peer of a swarm."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

from murmuration.worker.library.swarm import Swarm
from murmuration.worker.library.trainers import TrainersSwarm


class LightningCallback(Callback):
    """Enters a `Swarm` when fitting begins, and leaves it when it ends or fails.

    All is as with `SwarmCallback`, but that what the swarm has agreed on is in Lightning's own
    checkpoints. With several optimizers, whose steps only the module knows, a run has no end unless
    `steps` says so. A callback may put averages into the model after `fit`."""

    def __init__(self, **swarm: Any) -> None:
        self._arguments, self._entered = swarm, TrainersSwarm(swarm)
        self._saved: Mapping[str, Any] | None = None

    @property
    def swarm(self) -> Swarm | None:
        return self._entered.swarm

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Goes before other callbacks: it has left when they put averages into the model."""
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins or starts the run, or goes on with it. Raises as `Swarm`."""
        given, steps = dict(self._arguments), trainer.estimated_stepping_batches
        schedule = None if steps == float("inf") or not self._counts(trainer) else int(steps)
        if not given.get("join") and schedule is not None:
            given.setdefault("steps", schedule)
        swarm = Swarm(pl_module, trainer.optimizers, **given)
        step = trainer.global_step if self._counts(trainer) else 0
        saved, self._saved = self._saved, None
        self._entered.enter(swarm, schedule, step, saved)
        self._catch_up(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves before the epoch that Lightning's SWA adds, in which nothing is trained."""
        swa = (c for c in trainer.callbacks if isinstance(c, StochasticWeightAveraging))
        if any(0 <= each.swa_end < trainer.current_epoch for each in swa):
            self._entered.leave()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tells the swarm the loss, and ends fitting with the run."""
        assert self.swarm is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            self.swarm.report(loss)
        self._catch_up(trainer)
        if self.swarm.done:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._entered.leave()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._entered.tell_replaced("another callback")

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._entered.fail(exception)

    def state_dict(self) -> dict[str, Any]:
        """The state that the swarm agrees on, for Lightning: numbers, lists and tensors."""
        return self.swarm.state_dict() if self.swarm is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def _counts(self, trainer: Trainer) -> bool:
        """Tells whether `global_step` counts the run's steps; of several optimizers, each one's."""
        return trainer.lightning_module.automatic_optimization and len(trainer.optimizers) == 1

    def _catch_up(self, trainer: Trainer) -> None:
        if not self._counts(trainer):
            return
        epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        steps = {"step": 1, "epoch": None if math.isinf(epoch) else math.ceil(epoch)}
        every = [(each, steps[each.interval]) for each in trainer.lr_scheduler_configs]
        schedulers = [(each.scheduler, once and once * each.frequency) for each, once in every]
        behind = self._entered.catch_up(trainer.global_step, schedulers)
        loop = trainer.fit_loop.epoch_loop
        count = loop.automatic_optimization.optim_progress.optimizer.step.total
        count.ready += behind
        count.completed += behind
