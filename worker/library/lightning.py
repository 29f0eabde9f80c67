"""`murmuration.lightning.LightningCallback`: a Lightning `Trainer` as a peer of a swarm."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from worker.errors import UsageError
from worker.library.swarm import Swarm


class LightningCallback(Callback):
    """Enters a `Swarm` when fitting begins, and leaves it when it ends or fails.

        trainer = Trainer(max_steps=1000,
                          callbacks=[murmuration.lightning.LightningCallback(join="one.example:7700")])

    A run that is started here has as many steps as the trainer.

    Args:
        swarm: the arguments of `Swarm`, but `model` and `optimizer`.

    Attributes:
        swarm: while fitting goes on, and afterwards; None before.
    """

    def __init__(self, **swarm: Any) -> None:
        self.swarm: Swarm | None = None
        self._arguments, self._open = swarm, ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins or starts the run. Raises as `Swarm`; UsageError: several optimizers."""
        if len(trainer.optimizers) != 1:
            raise UsageError(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers; a swarm "
                "follows the steps of one"
            )
        given = dict(self._arguments)
        steps = trainer.estimated_stepping_batches
        if not given.get("join") and steps != float("inf"):
            given.setdefault("steps", int(steps))
        self.swarm = self._open.enter_context(Swarm(pl_module, trainer.optimizers[0], **given))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Tells the swarm the loss, and ends fitting with the run."""
        assert self.swarm is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            self.swarm.report(loss)
        if self.swarm.done:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the swarm, with the anchor in the model."""
        self._open.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leaves the swarm at once."""
        self._open.__exit__(type(exception), exception, None)
