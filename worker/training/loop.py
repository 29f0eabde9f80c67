"""The train thread: inner steps, with the outer loop between two of them.

Nothing here awaits and no coroutine touches a parameter. An outer update computes fresh tensors and
commits by copy, so that an error commits nothing.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.fragments import Fragment
from murmuration.algorithms.plan import Plan
from murmuration.worker.membership import Phase
from murmuration.worker.pipeline.stage_replica import Iterations, StageReplica
from murmuration.worker.training.mailbox import AllStarted, Mailbox, Started
from murmuration.worker.training.model import buffers_left_out
from murmuration.worker.training.outer import OuterLoop
from murmuration.worker.training.replica import InnerReplica, RunIsOver

if TYPE_CHECKING:
    from murmuration.worker.training.evaluation import Evaluation

T = TypeVar("T")

_POLL_S = 0.1
_USUAL_PERIODS, _LEAST_S = 2, 5.0  # that loops may end apart


class TrainingLoop(OuterLoop):
    """A training loop's way through a run, whoever writes the loop. train thread only.

    `begin`; then for each step `begin_step`, `average_gradients`, the optimizer's step, `end_step`;
    after the last one `end`. `Trainer` goes through it with a task, `murmuration.Swarm` with the
    user's own loop.

    Attributes:
        in_step: whether a step has begun that has not ended.
    """

    in_step = _in_flight = False
    _started_s = _averaging_s = 0.0
    _iterations: Iterations | None = None

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

    @property
    def trains(self) -> bool:
        """Whether a step is to come: neither the schedule is over nor the run."""
        return self.step < self._steps and self.stopped is None

    @property
    def exchanges(self) -> bool:
        """Whether there are rounds: else the anchors stay as they began, until the end."""
        return self._plan.exchange != "none"

    def begin(self) -> None:
        """Waits until the run starts, or until this peer is where the others are in it."""
        self.publish()
        if self.exchanges and (words := self._words_on_buffers()):
            self.reporter.event("warning", text=words)
        self.reporter.event("progress", state="ready")
        self._await_start()

    def end(self, *, early: bool = False) -> None:
        """After the last step: what is left to exchange, and the word that this peer is done.

        Args: early: all loops have ended before the schedule.

        Raises:
            Exception: what ended the I/O thread, if it has ended.
        """
        self.metrics.trained()
        if self.stopped is not None and self.stopped.error is not None:
            raise self.stopped.error
        if self._plan.exchange == "none":
            self.commit_parameters()
        if self._plan.consensus and self.stopped is None:
            self.average_replicas(early=early)
        if self.stopped is None:  # else nobody may take the run for ended
            self.reporter.phase = Phase.DONE
        self.publish()

    def take_last_rounds(self, *, alone: bool) -> None:
        """The loop ends before the schedule does: what was learned since the last rounds is in one
        more, where that closes. The rest is counted in `unsent_steps`."""
        self.metrics.trained()
        if alone:  # nothing is exchanged, and all stays in the model
            self.apply_in_flight()
        else:
            self.send_last_rounds()

    def leave(self, everybody_leaves: Callable[[], bool], timeout_s: float) -> bool:
        """After the last rounds: stays until all loops have ended, and takes over what the last of
        them has; then comes the mean that ends a run, where the plan has one. Returns whether all
        have; else the others go on without this peer.

        Args: timeout_s: at most; two periods of H steps are enough, and some seconds at least.
        """
        self.reporter.phase = Phase.LEAVING
        self.publish()
        usual_s = _USUAL_PERIODS * self._plan.inner_steps * self.pace.step_s
        if not self.await_others(everybody_leaves, min(timeout_s, max(_LEAST_S, usual_s))):
            return False
        if self._plan.consensus:
            self.reporter.phase = Phase.TRAINING
            self.end(early=True)
        return True

    def begin_with_local(self) -> None:
        """Before `begin`: the values that the model has now are the first ones."""
        for each in self.fragments:
            if each.state.version == 0 and not torch.equal(
                each.state.anchor, first := each.first_values()
            ):
                each.commit(anchor=first)

    def moved_between_steps(self) -> None:
        """Parameters have moved after the end of a step: that counts as the beginning of one."""
        for each in self.fragments:
            each.work_steps = max(1, each.work_steps)

    @property
    def moved_without_steps(self) -> bool:
        """Whether no step was taken here, and the model is another than what was agreed on."""
        return not self.metrics.inner_steps and any(
            not torch.equal(each.as_held(each.state.anchor), each.local) for each in self.fragments
        )

    def hold(self, *, locally: bool) -> None:
        """At the end, makes the anchor the model.

        Args:
            locally: a fragment that has learned what is in no round stays as it is.
        """
        for each in self.fragments:
            if not (locally and each.work_steps):
                each.write(each.state.anchor)

    def await_others(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """After the last step: stays until the others are done too, and takes over what the last
        of them has; a Stop or the time-out ends it. Returns whether they are."""
        deadline = self._clock() + timeout_s
        self.report("settling")
        while self.stopped is None and self._clock() < deadline:
            if done():
                return True
            self.handle(self._mailbox.wait(_POLL_S))
        return False

    def report(self, state: str) -> None:
        """Says what this worker is at after the last step."""
        self.reporter.progress(self.step, state)

    def evaluated(self, found: "Evaluation | None", seconds: float) -> None:
        """What the anchors are worth at this step, None where that was cut short, and how long it
        took to say."""
        if found is not None:
            self.metrics.validated(self.step, found.loss)
            took_s = round(seconds, 3)
            self.reporter.event("validation", step=self.step, seconds=took_s, **found.plain())

    def withdraw_done(self) -> None:
        """Stopped after the last step: nobody may take what is done last for done by this peer."""
        self.reporter.phase = Phase.TRAINING
        self.publish()

    def _words_on_buffers(self) -> str:
        """What there is to say of saved buffers that are not exchanged; empty without any."""
        exchanged = {spec.name for each in self.fragments for spec in each.fragment.specs}
        left = buffers_left_out(self._replica.model, exchanged)
        named = ", ".join(f"{name} ({why})" if why else name for name, why in left.items())
        return named and f"buffers that stay here, whatever the other peers hold: {named}"

    def _await_start(self) -> None:
        started = self._await(Started)
        group = started.group if started is not None else ()
        for each in self.fragments if group else ():
            each.commit(group=group)
        if started is not None:
            self.reporter.event("started", group=list(self.states[0].group), step=self.step)
        self.reporter.phase = Phase.TRAINING
        self.publish()
        if self._plan.exchange == "pairs" and group:
            self._await(AllStarted)
        if self.stopped is None:
            self.begin_again()

    def _await(self, kind: type[T]) -> T | None:
        """The next message of that kind; None when the run is stopping."""
        while self.stopped is None:
            message = self._mailbox.wait()
            if isinstance(message, kind):
                return message
            self.handle(message)
        return None

    # ------------------------------------------------------------------------------ one step

    def begin_step(self, started_s: float | None = None) -> None:
        """A step begins, or has begun at `started_s` by the clock."""
        self._in_flight = any(each.awaits_result for each in self.fragments)
        self.in_step = True
        self.begin_inner_step()
        self._started_s = self._clock() if started_s is None else started_s
        if self.metrics.first_step_at is None:
            self.metrics.first_step_at = self._started_s

    def average_gradients(self, gradients: dict[str, Tensor], weight: int = 1) -> None:
        """After the backward pass, as `OuterLoop.exchange_gradients`."""
        began_s = self._clock()
        self.exchange_gradients(gradients, weight)
        self._averaging_s = self._clock() - began_s

    def end_step(self, waited_s: float = 0.0, *, exchange: bool = True) -> None:
        """The inner optimizer has taken its step, for which nothing was computed in `waited_s`.

        Args:
            exchange: False where no parameter may move now: the next step makes up for what is due.
        """
        metrics, self.in_step = self.metrics, False
        metrics.last_step_at = self._clock()
        seconds = metrics.last_step_at - self._started_s - self._averaging_s - waited_s
        metrics.stepped(seconds, in_flight=self._in_flight)
        self.pace.stepped(seconds)
        self.after_inner_step(self._replica.loss, exchange=exchange)
        if self._iterations is not None:
            self.publish()  # other stages wait for those that are not done with an iteration
        self.reporter.progress(self.step)


class Trainer(TrainingLoop):
    """The loop that trains with a task, of a whole model or of one stage. train thread only.

    Args:
        replica: model, inner optimizer and samples.
        between_steps: called after each step, with this trainer.
        the others: as `TrainingLoop`'s.
    """

    def __init__(
        self,
        *,
        replica: InnerReplica,
        fragments: Sequence[Fragment],
        plan: Plan,
        steps: int,
        mailbox: Mailbox,
        between_steps: Callable[["Trainer"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            replica=replica,
            fragments=fragments,
            plan=plan,
            steps=steps,
            mailbox=mailbox,
            clock=clock,
        )
        self.replica, self._between_steps = replica, between_steps
        if isinstance(replica, StageReplica):
            self._iterations = Iterations(replica, self._mailbox, self._clock)

    def run(self) -> None:
        """Trains until the schedule's last step or a Stop; afterwards `stopped` says which.

        Raises:
            Exception: what ended the I/O thread, if that is why.
        """
        self.begin()
        while self.trains:
            self._one_step()
        self.end()

    def _one_step(self) -> None:
        self.begin_step()
        waited_s = self._iterations.serve(self) if self._iterations is not None else 0.0
        self.metrics.visits_wait_s += waited_s
        if self.stopped is not None:
            self.undo_inner_step()
            return
        if self.moved:
            return
        try:
            gradients = dict(self.replica.backward(self.step))
        except RunIsOver:
            self._await_stop()
            self.undo_inner_step()
            return
        visits = self._iterations.visits if self._iterations is not None else 1
        if self._iterations is not None:
            self.reporter.iteration(self.step, visits)
        self.average_gradients(gradients, visits)
        self.replica.inner_step(self.step, gradients)
        gradients.clear()
        self.end_step(waited_s)
        self._between_steps(self)

    def _await_stop(self) -> None:
        while self.stopped is None:
            self.handle(self._mailbox.wait())
