"""`murmuration.hf.SwarmCallback`: a `transformers.Trainer`, and TRL's, as a peer of a swarm."""

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from murmuration.worker.library.steps import before_entering
from murmuration.worker.library.swarm import Swarm
from murmuration.worker.library.trainers import TrainersSwarm
from murmuration.worker.training.outer_state import load_state, save_state

_SWARM = "swarm"
_LOOP = "_inner_training_loop"  # the trainer's method
_LOOK_S = 0.2


class SwarmCallback(TrainerCallback):
    """Enters a `Swarm` when training begins, and leaves it after the last step, or when it fails.

    A run that is started here has as many steps as the trainer. One that joins under way goes on in
    the run: its scheduler and its count of steps begin where the others are. After `train()` the
    model holds the anchor. The folder `swarm` in each checkpoint has what the swarm has agreed on,
    and a trainer that resumes goes on with it. When `train()` raises, the swarm is left at once.

    Args: swarm: the arguments of `Swarm`, but `model` and `optimizer`. The attribute of that name
    is the `Swarm` while training goes on, and afterwards; None before."""

    def __init__(self, **swarm: Any) -> None:
        self._arguments, self._entered = swarm, TrainersSwarm(swarm)
        self._training: _Training | None = None
        self._scheduler: Any = None

    @property
    def swarm(self) -> Swarm | None:
        return self._entered.swarm

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: Any = None,
        **_others: Any,
    ) -> None:
        """Raises as `Swarm`; also where the checkpoint is of another run, or damaged."""
        given = dict(self._arguments)
        if not given.get("join"):
            given.setdefault("steps", state.max_steps)
        saved = _saved_with(args, state) if state.global_step > 0 else None
        swarm, outer = Swarm(model, optimizer, **given), load_state(saved) if saved else None
        self._entered.enter(swarm, state.max_steps, state.global_step, outer)
        self._training, self._scheduler = _Training(self._entered), lr_scheduler
        self._catch_up(state)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Tells the swarm the loss. It is left before a trainer loads its best model."""
        if self.swarm is not None and logs and "loss" in logs:
            self.swarm.report(logs["loss"])
        if logs and "train_runtime" in logs:
            self._leave()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Ends training with the run, and leaves after the last step: the anchor is saved then."""
        if self.swarm is None or self._training is None:
            return
        self._catch_up(state)
        if self.swarm.done:
            control.should_training_stop = True
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._leave()

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_others: Any) -> None:
        if control.should_training_stop:
            self._leave()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        """Writes beside the trainer's checkpoint what the swarm has agreed on. Raises OSError."""
        if self.swarm is not None and (outer := self.swarm.state_dict()):
            save_state(_folder_of(args, state) / _SWARM, outer)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Tells what the model holds where that is not the anchor."""
        self._leave()
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        what = f"load_best_model_at_end ({best})" if best else "another callback"
        self._entered.tell_replaced(what)

    def _leave(self) -> None:
        if self._training is not None:
            self._training.leave()
            self._training = None

    def _catch_up(self, state: TrainerState) -> None:
        schedulers = [] if self._scheduler is None else [(self._scheduler, 1)]
        state.global_step += self._entered.catch_up(state.global_step, schedulers)


def _leave_failed() -> None:
    """Has each peer leave whose trainer has raised in this thread: the trainer tells nobody."""
    for training in list(_trainings):
        training.leave_if_failed()


class _Training:
    """A trainer's loop, which may raise and tell nobody: whether it is on the stack tells."""

    def __init__(self, entered: TrainersSwarm) -> None:
        self._entered, self._lock, self._over = entered, threading.Lock(), threading.Event()
        self._thread = threading.get_ident()
        loops = (f for f, _ in walk_stack(sys._getframe()) if f.f_code.co_name == _LOOP)
        self._frame = next(loops, None)  # of the trainer's loop, which has led here
        _trainings.add(self)
        atexit.register(self._fail)
        threading.Thread(target=self._watch, name="murmur-trainer", daemon=True).start()

    def leave(self) -> None:
        self._end(self._entered.leave)

    def leave_if_failed(self) -> None:
        """Leaves where the loop is no longer on the stack. any thread."""
        last = sys._current_frames().get(self._thread)
        there = walk_stack(last) if last is not None else ()
        if self._frame is not None and all(frame is not self._frame for frame, _ in there):
            self._fail()

    def _fail(self) -> None:
        def fail() -> None:
            if self._entered.swarm is not None:
                self._entered.swarm.warn("training has failed: this peer leaves the swarm")
            self._entered.fail(RuntimeError("training has failed"))

        self._end(fail)

    def _end(self, end: Callable[[], None]) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            try:
                end()
            finally:
                self._frame = None
                _trainings.discard(self)
                atexit.unregister(self._fail)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.leave_if_failed()


_trainings: WeakSet[_Training] = WeakSet()
before_entering.append(_leave_failed)


def _folder_of(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _saved_with(args: TrainingArguments, state: TrainerState) -> Path | None:
    named = args.resume_from_checkpoint
    folders = [Path(named)] if named and Path(named).is_dir() else []
    found = (each / _SWARM for each in (*folders, _folder_of(args, state)))
    return next((each for each in found if each.is_dir()), None)
