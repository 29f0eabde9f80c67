"""The swarm of a trainer's callback: entered when training begins, left when it ends or fails."""

from contextlib import ExitStack

from worker.library.swarm import Swarm


class TrainersSwarm:
    """train thread only, but for `fail`.

    Attributes:
        swarm: while training goes on, and afterwards; None before.
    """

    def __init__(self) -> None:
        self.swarm: Swarm | None = None
        self._open, self._ended_with = ExitStack(), ""

    def enter(self, swarm: Swarm, schedule: int | None) -> Swarm:
        """Joins or starts the run. Raises as `Swarm`.

        Args:
            schedule: optimizer steps of the trainer, where it knows how many.
        """
        self._ended_with = ""
        self.swarm = self._open.enter_context(swarm)
        if schedule is not None and swarm.steps is not None and schedule != swarm.steps:
            swarm.warn(
                f"the run has {swarm.steps} steps, and this trainer {schedule}: its learning rates "
                "follow its own number; give it that of the run"
            )
        return self.swarm

    def leave(self) -> None:
        """After the last step, with the anchor in the model; later calls do nothing."""
        self._open.close()
        if isinstance(self.swarm, Swarm) and not self._ended_with:
            self._ended_with = self.swarm.model_hash()

    def fail(self, error: BaseException) -> None:
        """Leaves at once, unless it has left. The parameters stay as they are. any thread."""
        self._open.__exit__(type(error), error, None)

    def tell_replaced(self, what: str) -> None:
        """Warns where the model does not hold the anchor any more. Args: what: may have done it."""
        if isinstance(self.swarm, Swarm) and self.swarm.model_hash() != self._ended_with:
            self.swarm.warn(
                f"the model does not hold what the swarm agrees on: {what} has replaced it after "
                "the last step, and has the last word"
            )
