"""`murmuration.hf.SwarmCallback`: a `transformers.Trainer`, and TRL's, as a peer of a swarm."""

import atexit
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from worker.library.swarm import Swarm


class SwarmCallback(TrainerCallback):
    """Enters a `Swarm` when training begins, and leaves it when training ends.

        trainer = Trainer(model, arguments, train_dataset=data,
                          callbacks=[murmuration.hf.SwarmCallback(join="one.example:7700")])

    Accumulation, clipping, schedulers and mixed precision stay the trainer's. After `train()` the
    model holds the anchor, so `trainer.save_model()` writes what the swarm agrees on. A run that is
    started here has as many steps as the trainer.

    Args:
        swarm: the arguments of `Swarm`, but `model` and `optimizer`.

    Attributes:
        swarm: while training goes on, and afterwards; None before.
    """

    def __init__(self, **swarm: Any) -> None:
        self.swarm: Swarm | None = None
        self._arguments, self._open = swarm, ExitStack()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        **_others: Any,
    ) -> None:
        """Joins or starts the run. Raises as `Swarm`."""
        given = dict(self._arguments)
        if not given.get("join"):
            given.setdefault("steps", state.max_steps)
        self.swarm = self._open.enter_context(Swarm(model, optimizer, **given))
        atexit.register(self._abandon)  # the trainer does not tell of what it raises

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_others: Any,
    ) -> None:
        """Tells the swarm the loss."""
        if self.swarm is not None and logs and "loss" in logs:
            self.swarm.report(logs["loss"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any
    ) -> None:
        """Ends training with the run."""
        if self.swarm is not None and self.swarm.done:
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any
    ) -> None:
        """Leaves the swarm, with the anchor in the model."""
        self._open.close()
        atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        error = RuntimeError("training has failed")
        self._open.__exit__(type(error), error, None)
