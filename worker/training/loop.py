"""The train thread: inner steps, with the outer loop between two of them.

Nothing here awaits and no coroutine touches a parameter. An outer update computes fresh tensors and
commits by copy, so that an error commits nothing.
"""

import math
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.worker.membership import Phase
from murmuration.worker.pipeline.stage_replica import StageReplica
from murmuration.worker.training.mailbox import AllStarted, Started
from murmuration.worker.training.model import buffers_left_out
from murmuration.worker.training.outer import OuterLoop
from murmuration.worker.training.replica import InnerReplica, RunIsOver

T = TypeVar("T")

_POLL_S = 0.1
_USUAL_PERIODS, _LEAST_S = 2, 5.0  # that loops may end apart


class TrainingLoop(OuterLoop):
    """A training loop's way through a run, whoever writes the loop. train thread only.

    `begin`; then for each step `begin_step`, `average_gradients`, the optimizer's step, `end_step`;
    after the last one `end`. `Trainer` goes through it with a task, `murmuration.Swarm` with the
    user's own loop. `in_step` is whether a step has begun that has not ended."""

    in_step = _in_flight = False
    _started_s = 0.0
    _stage: StageReplica | None = None

    @property
    def states(self) -> list[FragmentState]:
        return [each.state for each in self.fragments]

    @property
    def spread(self) -> float | None:
        """How far replicas were from their group's mean, relative to its size: root mean square
        over the fragments; None without pairs."""
        spreads = [each.spread for each in self.fragments if each.spread is not None]
        return math.sqrt(sum(s * s for s in spreads) / len(spreads)) if spreads else None

    @property
    def trains(self) -> bool:
        """Tells whether a step is to come: neither the schedule is over nor the run."""
        return self.step < self._steps and self.stopped is None

    @property
    def error(self) -> BaseException | None:
        """The error that ended the I/O thread, if one has."""
        return self.stopped.error if self.stopped is not None else None

    @property
    def exchanges(self) -> bool:
        """Tells whether there are rounds: else the anchors stay as they began, until the end."""
        return self._plan.exchange != "none"

    def begin(self) -> None:
        """Waits until this peer may train; sends again what was on its way."""
        self.publish()
        exchanged = {spec.name for each in self.fragments for spec in each.fragment.specs}
        left = buffers_left_out(self.replica.model, exchanged) if self.exchanges else {}
        if named := ", ".join(f"{name} ({why})" if why else name for name, why in left.items()):
            text = f"buffers that stay here, whatever the other peers hold: {named}"
            self.reporter.event("warning", text=text)
        self.reporter.event("progress", state="ready")
        started = self._await(Started)
        group = started.group if started is not None else ()
        for each in self.fragments if group else ():
            each.commit(group=group)
        if started is not None:
            self.reporter.event("started", group=list(self.states[0].group), step=self.step)
        self.reporter.phase = Phase.TRAINING
        self.publish()
        if self._pairs and group:
            self._await(AllStarted)
        if self.stopped is None:
            if self.step:
                self.pace.resumes()
            for each in self._order.in_flight():
                self._post(each)

    def _await(self, kind: type[T]) -> T | None:
        """The next message of that kind; None when the run is stopping."""
        while self.stopped is None:
            message = self._mailbox.wait()
            if isinstance(message, kind):
                return message
            self.handle(message)
        return None

    def end(self, *, early: bool = False) -> None:
        """Exchanges what is left after the last step, and says that this peer is done. Raises what
        ended the I/O thread. Args: early: all loops have ended before the schedule."""
        self.metrics.trained()
        if self.error is not None:
            raise self.error
        if self._plan.exchange == "none":
            self.commit_parameters()
        if self._plan.consensus and self.stopped is None:
            self.average_replicas(early=early)
        if self.stopped is None:  # else nobody may take the run for ended
            self.reporter.phase = Phase.DONE
        self.publish()

    def leave(self, everybody_leaves: Callable[[], bool], timeout_s: float) -> bool:
        """Stays after the last rounds until all loops have ended, and takes over what the last of
        them has; then comes the mean that ends a run, where the plan has one. Returns whether all
        have; else the others go on without this peer. Two periods of H steps are enough, and some
        seconds at least."""
        self.reporter.phase = Phase.LEAVING
        self.publish()
        usual_s = _USUAL_PERIODS * self._plan.inner_steps * self.pace.step_s
        if not self.await_others(everybody_leaves, min(timeout_s, max(_LEAST_S, usual_s))):
            return False
        if self._plan.consensus:
            self.reporter.phase = Phase.TRAINING
            self.end(early=True)
        return True

    def await_others(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Stays until the others are done, and takes over what the last has; returns whether they
        are."""
        deadline = self._clock() + timeout_s
        self.report("settling")
        while self.stopped is None and self._clock() < deadline:
            if done():
                return True
            self.handle(self._mailbox.wait(_POLL_S))
        return False

    def report(self, state: str) -> None:
        self.reporter.progress(self.step, state)

    def begin_step(self, started_s: float | None = None) -> None:
        self._in_flight = any(f.in_flight is not None and f.arrived is None for f in self.fragments)
        self.in_step = True
        self._before, self._step = self.step, min(self._steps, self.step + next(self._strides))
        self.moved = False
        self._started_s = self._clock() if started_s is None else started_s
        if self.metrics.first_step_at is None:
            self.metrics.first_step_at = self._started_s

    def end_step(self, waited_s: float = 0.0, *, exchange: bool = True) -> None:
        """The inner optimizer has taken its step, after `waited_s` without work. With `exchange`
        False no parameter may move now: the next step makes up for it."""
        metrics, self.in_step = self.metrics, False
        metrics.last_step_at = self._clock()
        seconds = metrics.last_step_at - self._started_s - self._averaging_s - waited_s
        metrics.stepped(seconds, in_flight=self._in_flight)
        self.pace.stepped(seconds)
        self.after_inner_step(self.replica.loss, exchange=exchange)
        if self._stage is not None:
            self.publish()  # other stages wait for those that are not done with an iteration
        self.reporter.progress(self.step)


class Trainer(TrainingLoop):
    """The loop that trains a whole model or a stage with a task. train thread only."""

    replica: InnerReplica

    def run(self) -> None:
        """Trains until the last step or a Stop, then in `stopped`. Raises what ended the I/O
        thread."""
        if isinstance(self.replica, StageReplica):
            self._stage = self.replica
        self.begin()
        while self.trains:
            self._one_step()
        self.end()

    def _one_step(self) -> None:
        self.begin_step()
        stage = self._stage
        waited_s = stage.serve(self, self._mailbox) if stage is not None else 0.0
        self.metrics.visits_wait_s += waited_s
        if self.moved and self.stopped is None:
            return
        gradients: dict[str, Tensor] = {}
        try:
            if self.stopped is None:
                gradients |= self.replica.backward(self.step)
        except RunIsOver:
            while self.stopped is None:
                self.handle(self._mailbox.wait())
        if self.stopped is not None:  # the step is not taken
            self._step = self._before
            return
        visits = stage.visits if stage is not None else 1
        if stage is not None:
            self.reporter.iteration(self.step, visits)
        self.average_gradients(gradients, visits)
        self.replica.inner_step(self.step, gradients)
        gradients.clear()
        self.end_step(waited_s)
        self._between_steps(self)
