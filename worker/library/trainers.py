"""The swarm of a trainer's callback: entered when training begins, left when it ends or fails."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from murmuration.worker.library.arguments import check_names
from murmuration.worker.library.steps import follows_position
from murmuration.worker.library.swarm import Swarm
from murmuration.worker.training.optimizers import advance


class TrainersSwarm:
    def __init__(self, arguments: Iterable[str]) -> None:
        """Raises UsageError. Args: arguments: the names of those of `Swarm` that were given."""
        check_names(arguments)
        self.swarm: Swarm | None = None
        self._open, self._ended_with = ExitStack(), ""

    def enter(
        self, swarm: Swarm, schedule: int | None, step: int, saved: Mapping[str, Any] | None
    ) -> None:
        """Joins or starts the run, or goes on with it. Raises as `Swarm`, and `load_state_dict`.
        Args: schedule: optimizer steps of the trainer, where it knows how many; step: where it
        begins; saved: what its checkpoint has of the swarm."""
        self._ended_with = ""
        if saved is not None:
            swarm.load_state_dict(saved)
        self.swarm = self._open.enter_context(swarm)
        if saved is None and step > swarm.step:
            swarm.warn(
                f"the trainer goes on from step {step}, and its checkpoint has no state of a "
                f"swarm: this peer begins at step {swarm.step} of the run"
            )
        if schedule is not None and swarm.steps is not None and schedule != swarm.steps:
            swarm.warn(
                f"the run has {swarm.steps} steps, and this trainer {schedule}: its learning rates "
                "follow its own number; give it that of the run"
            )

    def catch_up(self, step: int, schedulers: Iterable[tuple[Any, int | None]]) -> int:
        """Brings a trainer's schedulers, each given with the optimizer's steps between two of its
        own (None: not known), to where the run is. Returns the steps that the trainer is behind."""
        assert self.swarm is not None
        behind = self.swarm.step - step
        for scheduler, every in schedulers if behind > 0 else ():
            if every and follows_position(scheduler):
                advance(scheduler, self.swarm.step // every - step // every)
                continue
            unknown = "steps once in an epoch, whose length is not known"
            why = unknown if every is None else "does not follow the position in the run"
            name = type(scheduler).__name__
            self.swarm.warn(f"{name} {why}: {behind} steps of the run are left out in it")
        return max(0, behind)

    def leave(self) -> None:
        self._open.close()
        if isinstance(self.swarm, Swarm) and not self._ended_with:
            self._ended_with = self.swarm.model_hash()

    def fail(self, error: BaseException) -> None:
        """Leaves at once, unless it has left. The parameters stay as they are. any thread."""
        self._open.__exit__(type(error), error, None)

    def tell_replaced(self, what: str) -> None:
        """Warns where the model does not hold the anchor any more. Args: what: may have done it."""
        left = self._ended_with  # empty where leaving has failed
        if left and isinstance(self.swarm, Swarm) and self.swarm.model_hash() != left:
            self.swarm.warn(
                f"the model does not hold what the swarm agrees on: {what} has replaced it after "
                "the last step, and has the last word"
            )
