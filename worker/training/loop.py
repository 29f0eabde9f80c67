"""The train thread: inner steps, and outer rounds between two of them.

Nothing here awaits and no coroutine touches a parameter. An outer update computes fresh tensors and
commits by copy, so that an error commits nothing.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from algorithms.fragment_state import FragmentState
from algorithms.fragments import Fragment
from algorithms.plan import Plan
from worker.membership import Phase
from worker.pipeline.replica import Iterations, StageReplica
from worker.training.fragment import FragmentReplica
from worker.training.inbox import (
    Adopt,
    AllStarted,
    FastestPace,
    IterationOver,
    Mailbox,
    PrefetchedAnchor,
    RoundDone,
    RoundFailed,
    SkipAhead,
    StageJob,
    StageMove,
    Started,
    Stop,
    ToTrain,
)
from worker.training.metrics import Metrics
from worker.training.outer import OuterRounds
from worker.training.pace import Pace
from worker.training.replica import InnerReplica
from worker.training.reporter import Reporter

T = TypeVar("T")

_SETTLE_POLL_S = 0.1


class Trainer:
    """One worker's training loop. train thread only.

    Args:
        replica: model, inner optimizer and samples.
        fragments, plan, steps: what is exchanged, how, and until when.
        states: the committed state of each fragment, fresh or from a checkpoint.
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
        states: Sequence[FragmentState],
        step: int,
        mailbox: Mailbox,
        checkpoint: Callable[["Trainer"], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica, self.step = replica, step
        self.slots = [
            FragmentReplica(f, plan, state) for f, state in zip(fragments, states, strict=True)
        ]
        self.metrics = Metrics()
        self.pace = Pace(plan.inner_steps, unequal=plan.dylu)
        self.stopped: Stop | None = None
        self.moves_to: StageMove | None = None
        self.moved = False  # in the schedule, by another peer's word, since the step began
        self._plan, self._steps = plan, steps
        self._schedule = plan.schedule(fragments=len(fragments), steps=steps)
        self._mailbox, self._checkpoint, self._clock = mailbox, checkpoint, clock
        self._exchanges, self._gradients = plan.exchange != "none", plan.payload == "gradient"
        self._tell = Reporter(mailbox, replica, self.slots, self.pace, steps, clock)
        self._rounds = OuterRounds(
            replica=replica,
            slots=self.slots,
            plan=plan,
            schedule=self._schedule,
            mailbox=mailbox,
            tell=self._tell,
            metrics=self.metrics,
            clock=clock,
        )
        self._iterations: Iterations | None = None
        if isinstance(replica, StageReplica):
            self._iterations = Iterations(replica, mailbox, clock)

    @property
    def states(self) -> list[FragmentState]:
        """The committed state of each fragment."""
        return [slot.state for slot in self.slots]

    @property
    def spread(self) -> float | None:
        """How far this replica was from its group's mean when they last met, relative to its size:
        root mean square over the fragments; None without pairs."""
        spreads = [slot.spread for slot in self.slots if slot.spread is not None]
        return math.sqrt(sum(s * s for s in spreads) / len(spreads)) if spreads else None

    # ----------------------------------------------------------------------------------- the run

    def run(self) -> None:
        """Trains until the schedule's last step or a Stop; afterwards `stopped` says which.

        Raises:
            Exception: what ended the I/O thread, if that is why.
        """
        self._publish()
        self._tell.event("progress", state="ready")
        self._await_start()
        while self.step < self._steps and self.stopped is None:
            self._one_step()
        self.metrics.trained()
        if self.stopped is not None and self.stopped.error is not None:
            raise self.stopped.error
        if not self._exchanges:
            self._commit_parameters()
        if self._plan.consensus and self.stopped is None:
            self._rounds.agree(self)
        if self.stopped is None:  # else nobody may take the run for ended
            self._tell.phase = Phase.DONE
        self._publish()

    def settle(self, agreed: Callable[[], bool], timeout_s: float) -> None:
        """After the last step: stays until the others are done too, and takes over what the last
        of them has; a Stop or the time-out ends it."""
        deadline = self._clock() + timeout_s
        self.tells("settling")
        while self.stopped is None and self._clock() < deadline and not agreed():
            self.take(self._mailbox.wait(_SETTLE_POLL_S))

    def tells(self, state: str) -> None:
        """Reports what this worker is at after the last step."""
        self._tell.progress(self.step, state)

    def leave_undone(self) -> None:
        """Stopped after the last step: nobody may take what is done last for done by this peer."""
        self._tell.phase = Phase.TRAINING
        self._publish()

    def _await_start(self) -> None:
        started = self._await(Started)
        group = started.group if started is not None else ()
        for slot in self.slots if group else ():
            slot.commit(group=group)
        if started is not None:
            self._tell.event("started", group=list(self.states[0].group), step=self.step)
        self._tell.phase = Phase.TRAINING
        self._publish()
        if self._plan.exchange == "pairs" and group:
            self._await(AllStarted)

    def _await(self, kind: type[T]) -> T | None:
        """The next message of that kind; None when the run is stopping."""
        while self.stopped is None:
            message = self._mailbox.wait()
            if isinstance(message, kind):
                return message
            self.take(message)
        return None

    def _one_step(self) -> None:
        before, self.step = self.step, min(self._steps, self.step + self.pace.stride())
        started = self._clock()
        if self.metrics.first_step_at is None:
            self.metrics.first_step_at = started
        in_flight = self._rounds.in_flight
        self.moved = False
        waited_s = self._iterations.serve(self) if self._iterations is not None else 0.0
        self.metrics.visits_wait_s += waited_s
        if self.stopped is not None:
            self.step = before
            return
        if self.moved:
            return
        gradients = dict(self.replica.backward(self.step))
        backward_s = self._clock() - started - waited_s
        if self._iterations is not None:
            self._tell.iteration(self.step, self._iterations.visits)
        if self._gradients and self._exchanges:
            visits = self._iterations.visits if self._iterations is not None else 1
            self._rounds.average(self, gradients, visits)
        resumed = self._clock()
        self.replica.inner_step(self.step, gradients)
        self.metrics.last_step_at = self._clock()
        inner_s = self.metrics.last_step_at - resumed
        self.metrics.stepped(backward_s + inner_s, in_flight=in_flight)
        self.pace.stepped(backward_s + inner_s)
        for slot in self.slots:
            slot.work_steps += 1
        self.metrics.learned(self.replica.loss, before, self.step, self._steps)
        if self._gradients:
            self._commit_parameters()
        elif self._exchanges:
            self._rounds.exchange(self, before)
        while (message := self._mailbox.poll()) is not None:
            self.take(message)
        self._rounds.go_on_from_groups(self.step)
        if self._iterations is not None:
            self._publish()  # other stages wait for those that are not done with an iteration
        self._tell.progress(self.step)
        self._checkpoint(self)

    def _commit_parameters(self) -> None:
        """Without an outer optimizer the anchor is the local model."""
        for slot in self.slots:
            slot.commit(anchor=self._rounds.local(slot))
        self._publish()

    def _publish(self) -> None:
        self._tell.publish(self.step)

    # --------------------------------------------------------------------------- from the mailbox

    def take(self, message: ToTrain | None) -> None:
        """Acts on a message of the I/O thread."""
        match message:
            case RoundDone() | RoundFailed() | PrefetchedAnchor():
                self.slots[message.fragment].take(message)
            case Adopt():
                self._adopt(message)
            case FastestPace(fastest_s):
                self.pace.told(fastest_s)
            case SkipAhead(step):
                self._skip(step)
            case StageJob() | IterationOver():
                if self._iterations is not None:
                    self._iterations.handle(message)
            case StageMove(stage):
                self.moves_to, self.stopped = message, Stop(f"moves to stage {stage}")
            case Stop():
                self.stopped = message
            case Started() | AllStarted() | None:
                pass

    def _adopt(self, adopt: Adopt) -> None:
        """Takes over another peer's committed states; own progress against the anchor is kept."""
        taken, phase = [], self._tell.phase
        for index, theirs in sorted(adopt.states.items()):
            slot = self.slots[index]
            mine = slot.state
            ranks = [(s.version, s.contributors, s.hash) for s in (mine, theirs)]
            # Before the start the others' group wins: theirs is the run under way.
            joining = phase is Phase.READY and theirs.version >= mine.version
            if ranks[1] > ranks[0] or joining:
                local = slot.give_up(theirs.version, self._rounds.local(slot))
                progress = not (self._gradients or torch.equal(local, mine.anchor))
                self._rounds.write(slot, slot.adopt(theirs, local, keep=progress))
                taken.append(index)
        if not taken:
            return
        self.metrics.adoptions += 1
        if len(adopt.states) == len(self.states):
            # All of the other's state belongs to a step of its schedule, even an earlier one than
            # this peer's: else the two would wait for each other's rounds crosswise from now on.
            self.step = adopt.step if phase is not Phase.DONE else self.step
            self.moved = True
            for slot in self.slots:
                slot.rebase(self.step)
        self._tell.event(
            "adopted",
            donor=adopt.donor,
            fragments=taken,
            step=self.step,
            reason=adopt.reason,
        )
        self._publish()

    def _skip(self, step: int) -> None:
        """Goes on where the others are in the schedule; rounds on their way are over for them."""
        if step <= self.step:
            return
        self.step, self.moved = min(step, self._steps - 1), True
        for slot in self.slots:
            slot.enter(self._schedule.next_round(slot.fragment.index, self.step))
        self._publish()
        self._tell.event("skipped", step=self.step, reason="the others had gone on")
