"""`murmuration.hf.SwarmCallback`: a `transformers.Trainer`, and TRL's, as a peer of a swarm."""

import atexit
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from worker.library.state import load_state, save_state
from worker.library.swarm import Swarm, log

_SWARM = "swarm"


class SwarmCallback(TrainerCallback):
    """Enters a `Swarm` when training begins, and leaves it when training ends.

        trainer = Trainer(model, arguments, train_dataset=data,
                          callbacks=[murmuration.hf.SwarmCallback(join="one.example:7700")])

    Accumulation, clipping, schedulers and mixed precision stay the trainer's. After `train()` the
    model holds the anchor, so `trainer.save_model()` writes what the swarm agrees on. A run that is
    started here has as many steps as the trainer.

    The folder `swarm` in each checkpoint of the trainer's has what the swarm has agreed on:
    anchors, momenta, the round. A trainer that resumes from a checkpoint in its output folder, or
    from `TrainingArguments(resume_from_checkpoint=...)`, goes on with that too.

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
        """Joins or starts the run, or goes on with it.

        Raises:
            UsageError: the checkpoint is of another run.
            CheckpointError: what the swarm has agreed on is damaged there.
            as `Swarm`.
        """
        given = dict(self._arguments)
        if not given.get("join"):
            given.setdefault("steps", state.max_steps)
        swarm = Swarm(model, optimizer, **given)
        if state.global_step > 0 and (saved := _saved_with(args, state)) is not None:
            swarm.load_state_dict(load_state(saved))
        self.swarm = self._open.enter_context(swarm)
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

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any
    ) -> None:
        """Writes beside the trainer's checkpoint what the swarm has agreed on. Raises OSError."""
        if self.swarm is not None and (outer := self.swarm.state_dict()):
            save_state(_folder_of(args, state) / _SWARM, outer)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any
    ) -> None:
        """Leaves the swarm, with the anchor in the model."""
        self._open.close()
        atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        error = RuntimeError("training has failed")
        self._open.__exit__(type(error), error, None)


def _folder_of(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _saved_with(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Where the checkpoint that the trainer resumes from has a swarm's state; None without one."""
    named = args.resume_from_checkpoint
    folders = [Path(named)] if named and Path(named).is_dir() else []
    folders.append(_folder_of(args, state))
    for folder in folders:
        if (folder / _SWARM).is_dir():
            return folder / _SWARM
    log.warning("%s is of no swarm: what is agreed on begins with its values", folders[0])
    return None
