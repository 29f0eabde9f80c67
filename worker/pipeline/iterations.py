"""The iterations of a stage on the train thread: visits are computed until all have come back."""

from collections.abc import Callable

from worker.pipeline.replica import StageReplica
from worker.training.inbox import IterationOver, IterationStarted, Mailbox, StageJob
from worker.training.loop_protocol import Loop


class Iterations:
    """train thread only.

    Args:
        stage: computes for visits, and sums their gradients up.
        mailbox: where visits come from.
        clock: monotonic seconds.
    """

    def __init__(self, stage: StageReplica, mailbox: Mailbox, clock: Callable[[], float]) -> None:
        self._stage, self._mailbox, self._clock = stage, mailbox, clock
        self._served = 0  # the latest iteration whose visits are counted here

    @property
    def visits(self) -> int:
        """In the gradient of the latest iteration."""
        return self._stage.visits

    def take(self, message: StageJob | IterationOver) -> None:
        """A visit, or word that there will be no more of them."""
        self._stage.take(message)

    def serve(self, loop: Loop) -> float:
        """Computes for visits until every microbatch of the loop's step has come back, or another
        peer's state was taken over, in which the iteration is done; returns how long there was
        nothing to compute (s)."""
        stage, waited_s = self._stage, 0.0
        if loop.step <= self._served:  # back in the schedule: its visits are in a step taken here
            stage.begin(loop.step)
            return waited_s
        while not (stage.iteration == loop.step and stage.over) and loop.stopped is None:
            while (message := self._mailbox.poll()) is not None:
                loop.take(message)
            if loop.moved:
                break
            if stage.iteration != loop.step:
                stage.begin(loop.step)
                self._mailbox.post(IterationStarted(loop.step, stage.gradient_norm))
            elif not stage.over and not stage.work():
                started = self._clock()
                loop.take(self._mailbox.wait())
                waited_s += self._clock() - started
        if loop.stopped is None and not loop.moved:
            self._served = loop.step
        return waited_s
