"""The train thread: inner steps, with the outer loop between two of them.

Nothing here awaits and no coroutine touches a parameter. An outer update computes fresh tensors and
commits by copy, so that an error commits nothing.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from algorithms.fragment_state import FragmentState
from algorithms.fragments import Fragment
from algorithms.plan import Plan
from worker.membership import Phase
from worker.pipeline.replica import Iterations, StageReplica
from worker.training.inbox import AllStarted, Mailbox, StageMove, Started, Stop
from worker.training.outer import OuterLoop
from worker.training.replica import InnerReplica

T = TypeVar("T")

_POLL_S = 0.1


class Trainer:
    """One worker's training loop. train thread only.

    Args:
        replica: model, inner optimizer and samples.
        fragments, plan, steps: what is exchanged, how, and until when.
        step: position in the schedule to go on from.
        mailbox: the way to the I/O thread.
        checkpoint: called now and then between two steps, with this trainer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        replica: InnerReplica,
        fragments: Sequence[Fragment],
        plan: Plan,
        steps: int,
        step: int,
        mailbox: Mailbox,
        checkpoint: Callable[["Trainer"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica = replica
        self.outer = OuterLoop(
            replica=replica,
            fragments=fragments,
            plan=plan,
            steps=steps,
            step=step,
            mailbox=mailbox,
            clock=clock,
        )
        self.fragments, self.metrics = self.outer.fragments, self.outer.metrics
        self._pace, self._reporter = self.outer.pace, self.outer.reporter
        self._plan, self._steps = plan, steps
        self._mailbox, self._checkpoint, self._clock = mailbox, checkpoint, clock
        self._iterations: Iterations | None = None
        if isinstance(replica, StageReplica):
            self._iterations = Iterations(replica, mailbox, clock)

    @property
    def step(self) -> int:
        """Position in the schedule."""
        return self.outer.step

    @property
    def stopped(self) -> Stop | None:
        """Why the run ends before the schedule does."""
        return self.outer.stopped

    @property
    def moves_to(self) -> StageMove | None:
        """The stage to serve next, where that is why."""
        return self.outer.moves_to

    @property
    def states(self) -> list[FragmentState]:
        """The committed state of each fragment."""
        return [each.state for each in self.fragments]

    @property
    def spread(self) -> float | None:
        """How far this replica was from its group's mean when they last met, relative to its size:
        root mean square over the fragments; None without pairs."""
        spreads = [each.spread for each in self.fragments if each.spread is not None]
        return math.sqrt(sum(s * s for s in spreads) / len(spreads)) if spreads else None

    def run(self) -> None:
        """Trains until the schedule's last step or a Stop; afterwards `stopped` says which.

        Raises:
            Exception: what ended the I/O thread, if that is why.
        """
        outer = self.outer
        outer.publish()
        self._reporter.event("progress", state="ready")
        self._await_start()
        while outer.step < self._steps and outer.stopped is None:
            self._one_step()
        self.metrics.trained()
        if outer.stopped is not None and outer.stopped.error is not None:
            raise outer.stopped.error
        if self._plan.exchange == "none":
            outer.commit_parameters()
        if self._plan.consensus and outer.stopped is None:
            outer.average_anchors()
        if outer.stopped is None:  # else nobody may take the run for ended
            self._reporter.phase = Phase.DONE
        outer.publish()

    def await_others(self, done: Callable[[], bool], timeout_s: float) -> None:
        """After the last step: stays until the others are done too, and takes over what the last
        of them has; a Stop or the time-out ends it."""
        deadline = self._clock() + timeout_s
        self.report("settling")
        while self.stopped is None and self._clock() < deadline and not done():
            self.outer.handle(self._mailbox.wait(_POLL_S))

    def report(self, state: str) -> None:
        """Says what this worker is at after the last step."""
        self._reporter.progress(self.step, state)

    def withdraw_done(self) -> None:
        """Stopped after the last step: nobody may take what is done last for done by this peer."""
        self._reporter.phase = Phase.TRAINING
        self.outer.publish()

    def _await_start(self) -> None:
        started = self._await(Started)
        group = started.group if started is not None else ()
        for each in self.fragments if group else ():
            each.commit(group=group)
        if started is not None:
            self._reporter.event("started", group=list(self.states[0].group), step=self.step)
        self._reporter.phase = Phase.TRAINING
        self.outer.publish()
        if self._plan.exchange == "pairs" and group:
            self._await(AllStarted)

    def _await(self, kind: type[T]) -> T | None:
        """The next message of that kind; None when the run is stopping."""
        while self.stopped is None:
            message = self._mailbox.wait()
            if isinstance(message, kind):
                return message
            self.outer.handle(message)
        return None

    def _one_step(self) -> None:
        outer, metrics = self.outer, self.metrics
        in_flight = any(each.awaits_result for each in self.fragments)
        outer.begin_inner_step()
        started = self._clock()
        if metrics.first_step_at is None:
            metrics.first_step_at = started
        waited_s = self._iterations.serve(outer) if self._iterations is not None else 0.0
        metrics.visits_wait_s += waited_s
        if outer.stopped is not None:
            outer.undo_inner_step()
            return
        if outer.moved:
            return
        gradients = dict(self.replica.backward(outer.step))
        backward_s = self._clock() - started - waited_s
        visits = self._iterations.visits if self._iterations is not None else 1
        if self._iterations is not None:
            self._reporter.iteration(outer.step, visits)
        outer.average_gradients(gradients, visits)
        resumed = self._clock()
        self.replica.inner_step(outer.step, gradients)
        metrics.last_step_at = self._clock()
        seconds = backward_s + (metrics.last_step_at - resumed)
        metrics.stepped(seconds, in_flight=in_flight)
        self._pace.stepped(seconds)
        outer.after_inner_step(self.replica.loss)
        if self._iterations is not None:
            outer.publish()  # other stages wait for those that are not done with an iteration
        self._reporter.progress(outer.step)
        self._checkpoint(self)
