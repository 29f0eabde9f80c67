"""What the parts of a training loop ask of the whole."""

from typing import Protocol

from worker.training.inbox import Stop, ToTrain


class Loop(Protocol):
    """`worker.training.loop.Trainer`, as seen by what waits on its behalf. train thread only."""

    @property
    def step(self) -> int:
        """Position in the schedule; another peer's word may move it."""

    @property
    def moved(self) -> bool:
        """Whether that has happened since the step began."""

    @property
    def stopped(self) -> Stop | None:
        """Why the run ends before the schedule does."""

    def take(self, message: ToTrain | None) -> None:
        """Acts on a message of the I/O thread."""
