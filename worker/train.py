"""The train thread: inner steps, and outer rounds between two of them.

Nothing here awaits and no coroutine touches a parameter. An outer update computes fresh tensors and
commits by copy, so that an error commits nothing. When a round fails, the local parameters are kept
and the anchor waits for another peer's state; when a round closed without this peer, what it has
learned is carried over into the next.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from algorithms.fragments import Fragment
from algorithms.plan import Plan
from algorithms.pseudogradient import pseudo_gradient
from worker.inner import Replica
from worker.mailbox import (
    Adopt,
    AllStarted,
    Begin,
    FragmentState,
    Iterating,
    IterationOver,
    Mailbox,
    Move,
    Paced,
    Progress,
    Published,
    RoundDone,
    RoundFailed,
    Skip,
    StageWork,
    Started,
    Stop,
    ToTrain,
)
from worker.membership import Phase
from worker.pace import Pace
from worker.slot import Sent, Slot
from worker.stages.replica import StageReplica
from worker.tally import Stall, Tally
from worker.turns import Turns
from worker.wire import is_finite

T = TypeVar("T")

_PROGRESS_S = 0.5
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
        replica: Replica,
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
        self.slots = [Slot(f, plan, state) for f, state in zip(fragments, states, strict=True)]
        self.tally = Tally()
        self.stopped: Stop | None = None
        self.moves_to: Move | None = None
        self._plan, self._steps = plan, steps
        self._schedule = plan.schedule(fragments=len(fragments), steps=steps)
        self._turns = Turns(self.slots, plan, self._schedule)
        self._mailbox, self._checkpoint, self._clock = mailbox, checkpoint, clock
        self._phase = Phase.READY
        self._exchanges, self._pairs = plan.exchange != "none", plan.exchange == "pairs"
        self._gradients = plan.payload == "gradient"
        self.pace = Pace(plan.inner_steps, unequal=plan.dylu)
        self._progress_at = -math.inf
        self._served = 0  # the latest iteration whose visits this replica has counted
        self._moved = False  # in the schedule, by another peer's word, since the step began

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
        self._event("progress", state="ready")
        self._await_start()
        while self.step < self._steps and self.stopped is None:
            self._one_step()
        self.tally.trained()
        if self.stopped is not None and self.stopped.error is not None:
            raise self.stopped.error
        if not self._exchanges:
            self._commit_parameters()
        if self._plan.consensus and self.stopped is None:
            self._agree()
        self._phase = Phase.DONE
        self._publish()

    def settle(self, agreed: Callable[[], bool], timeout_s: float) -> None:
        """After the last step: stays until the others are done too, and takes over what the last
        of them has; a Stop or the time-out ends it."""
        deadline = self._clock() + timeout_s
        while self.stopped is None and self._clock() < deadline and not agreed():
            self._take(self._mailbox.wait(_SETTLE_POLL_S))

    def _await_start(self) -> None:
        started = self._await(Started)
        group = started.group if started is not None else ()
        for slot in self.slots if group else ():
            slot.commit(group=group)
        if started is not None:
            self._event("started", group=list(self.states[0].group), step=self.step)
        self._phase = Phase.TRAINING
        self._publish()
        if self._pairs and group:
            self._await(AllStarted)

    def _await(self, kind: type[T]) -> T | None:
        """The next message of that kind; None when the run is stopping."""
        while self.stopped is None:
            message = self._mailbox.wait()
            if isinstance(message, kind):
                return message
            self._take(message)
        return None

    def _one_step(self) -> None:
        before, self.step = self.step, min(self._steps, self.step + self.pace.stride())
        started = self._clock()
        if self.tally.first_step_at is None:
            self.tally.first_step_at = started
        in_flight = any(slot.sent is not None and slot.arrived is None for slot in self.slots)
        self._moved = False
        waited_s = self._serve(self.replica) if isinstance(self.replica, StageReplica) else 0.0
        if self.stopped is not None:
            self.step = before
            return
        if self._moved:
            return
        self._served = max(self._served, self.step)
        gradients = dict(self.replica.backward(self.step))
        backward_s = self._clock() - started - waited_s
        if isinstance(self.replica, StageReplica):
            self._event(
                "iteration", iteration=self.step, visits=self.replica.visits, loss=self._loss
            )
        if self._gradients and self._exchanges:
            self._average(gradients)
        resumed = self._clock()
        self.replica.inner_step(self.step, gradients)
        self.tally.last_step_at = self._clock()
        inner_s = self.tally.last_step_at - resumed
        self.tally.stepped(backward_s + inner_s, in_flight=in_flight)
        self.pace.stepped(backward_s + inner_s)
        for slot in self.slots:
            slot.work_steps += 1
        self.tally.learned(self.replica.loss, before, self.step, self._steps)
        if self._gradients:
            self._commit_parameters()
        elif self._exchanges:
            self._rounds(before)
        while (message := self._mailbox.poll()) is not None:
            self._take(message)
        if isinstance(self.replica, StageReplica):
            self._publish()  # other stages wait for those that are not done with an iteration
        self._report()
        self._checkpoint(self)

    def _serve(self, stage: StageReplica) -> float:
        """Computes for visits until every microbatch of the iteration has come back, or another
        peer's state was taken over, in which the iteration is done; returns how long there was
        nothing to compute (s)."""
        waited_s = 0.0
        if self.step <= self._served:  # back in the schedule: its visits are in a step taken here
            stage.begin(self.step)
            return waited_s
        while not (stage.iteration == self.step and stage.over) and self.stopped is None:
            while (message := self._mailbox.poll()) is not None:
                self._take(message)
            if self._moved:
                break
            if stage.iteration != self.step:
                stage.begin(self.step)
                self._mailbox.post(Iterating(self.step, stage.gradient_norm))
            elif not stage.over and not stage.work():
                started = self._clock()
                self._take(self._mailbox.wait())
                waited_s += self._clock() - started
        return waited_s

    # ------------------------------------------------------------------- rounds of pseudo-gradients

    def _rounds(self, before: int) -> None:
        """Applies what is due, then sends what is due since step `before`."""
        for slot in self._turns.to_apply(self.step):
            self._apply(slot)
        for slot, round_ in self._turns.to_send(range(before + 1, self.step + 1)):
            if self._pairs:  # a round is the schedule's: others do not wait for it
                self._apply(slot)
                slot.enter(round_)
            self._send(slot)
        if self._schedule.applies_at_once(self.step):
            for slot in self._turns.waiting():
                self._apply(slot)

    def _send(self, slot: Slot) -> None:
        anchor = slot.state.anchor
        g = pseudo_gradient(anchor, self._local(slot))
        if not is_finite(g):
            # Others wait for this peer: no movement is a better answer than none.
            self._event("warning", text="parameters are not finite: going on from the anchor")
            self._write(slot, anchor)
            self.replica.reset_moments()
            g = torch.zeros_like(anchor)
        sent = self._begin(slot, g)
        if sent.guess is not None:
            self._write(slot, sent.guess)

    def _begin(self, slot: Slot, g: Tensor) -> Sent:
        sent, state = slot.send(g, self.step), slot.state
        self._publish()
        anchor = state.anchor if self._pairs else None
        weight = min(sent.work_steps, self._plan.inner_steps)
        index, values = slot.fragment.index, sent.values
        self._mailbox.post(
            Begin(index, state.version, state.group, values, anchor, weight=max(1, weight))
        )
        return sent

    def _agree(self) -> None:
        """After the last step of a run in pairs: one anchor for all, the mean of everyone's."""
        rounds = [self._schedule.rounds(slot.fragment.index) for slot in self.slots]
        # What was taken over from peers that had agreed is the mean already.
        slots = [s for s, last in zip(self.slots, rounds, strict=True) if s.state.version <= last]
        for slot in slots:
            slot.send_anchor(rounds[slot.fragment.index], self.step)
        self._publish()
        for slot in slots:
            index, state = slot.fragment.index, slot.state
            self._mailbox.post(Begin(index, state.version, (), state.anchor, everyone=True))
        for slot in slots:
            _, result = self._await_round(slot)
            if result is not None:
                self._write(slot, slot.agree(result))
                self._publish()

    def _apply(self, slot: Slot) -> None:
        """Waits for a round that was sent, and applies its mean."""
        sent, result = self._await_round(slot)
        if sent is not None and result is not None:
            self._write(slot, slot.apply(sent, result, self._local(slot)))
            self._publish()

    def _await_round(self, slot: Slot) -> tuple[Sent | None, RoundDone | None]:
        """The result of a slot's round in flight; None when it failed or came to nothing."""
        sent, index = slot.sent, slot.fragment.index
        if sent is None:
            return None, None
        started = self._clock()
        if slot.arrived is None:
            self._report(state="waiting")
        while self._on_its_way(slot, sent) and slot.arrived is None and self.stopped is None:
            self._take(self._mailbox.wait())
        stall_s = self._clock() - started
        result = slot.arrived
        if not self._on_its_way(slot, sent) or result is None:
            # Another peer's state took its place, or the run is stopping.
            self.tally.stalled(Stall(stall_s, index, sent.round, "?"))
            return sent, None
        assert slot.sent is not None
        sent, slot.sent, slot.arrived = (
            slot.sent,
            None,
            None,
        )  # an adoption may have moved its guess
        if isinstance(result, RoundFailed):
            waited_for = ",".join(result.waiting_for) or "?"
            self.tally.stalled(Stall(stall_s, index, sent.round, waited_for))
            self._fail(slot, sent, result)
            return sent, None
        self.tally.stalled(Stall(stall_s, index, sent.round, result.waited_for))
        self.tally.rounds_completed += 1
        self._event(
            "round",
            fragment=index,
            round=sent.round,
            contributors=result.contributors,
            missed=bool(result.missed),
            stall_s=round(stall_s, 4),
            exchange_s=round(result.exchange_s, 4),
            waited_for=result.waited_for,
        )
        return sent, result

    @staticmethod
    def _on_its_way(slot: Slot, sent: Sent) -> bool:
        return slot.sent is not None and slot.sent.round == sent.round

    def _fail(self, slot: Slot, sent: Sent, result: RoundFailed) -> None:
        """A round of this peer's has come to nothing: local parameters are kept."""
        local = slot.fail(sent, result, self._local(slot))
        if local is not None and not self._gradients:
            self._write(slot, local)
        self.tally.rounds_failed += 1
        self._event(
            "round_failed",
            fragment=slot.fragment.index,
            round=sent.round,
            reason=result.reason,
            waiting_for=list(result.waiting_for),
        )
        self._publish()

    # -------------------------------------------------------------------- data-parallel gradients

    def _average(self, gradients: dict[str, Tensor]) -> None:
        """Replaces the gradients by their mean over the group; keeps them where a round fails."""
        for slot in self.slots:
            self._begin(slot, slot.fragment.flatten(gradients))
        for slot in self.slots:
            sent, result = self._await_round(slot)
            if sent is not None and result is not None:
                slot.settle(result)
                gradients.update(slot.fragment.views(result.mean))
                # The parameters that come of it are committed after the inner step.
                slot.state = replace(
                    slot.state,
                    version=result.round + 1,
                    contributors=result.contributors,
                    group=result.next_group,
                )

    def _commit_parameters(self) -> None:
        """Without an outer optimizer the anchor is the local model."""
        for slot in self.slots:
            slot.commit(anchor=self._local(slot))
        self._publish()

    # --------------------------------------------------------------------------- from the mailbox

    def _take(self, message: ToTrain | None) -> None:
        match message:
            case RoundDone() | RoundFailed():
                self.slots[message.fragment].take(message)
            case Adopt():
                self._adopt(message)
            case Paced(fastest_s):
                self.pace.told(fastest_s)
            case Skip(step):
                self._skip(step)
            case StageWork() | IterationOver():
                if isinstance(self.replica, StageReplica):
                    self.replica.take(message)
            case Move(stage):
                self.moves_to, self.stopped = message, Stop(f"moves to stage {stage}")
            case Stop():
                self.stopped = message
            case Started() | AllStarted() | None:
                pass

    def _adopt(self, adopt: Adopt) -> None:
        """Takes over another peer's committed states; own progress against the anchor is kept."""
        taken = []
        for index, theirs in sorted(adopt.states.items()):
            slot = self.slots[index]
            mine = slot.state
            ranks = [(s.version, s.contributors, s.hash) for s in (mine, theirs)]
            # Before the start the others' group wins: theirs is the run under way.
            joining = self._phase is Phase.READY and theirs.version >= mine.version
            if ranks[1] > ranks[0] or joining:
                local = slot.give_up(theirs.version, self._local(slot))
                progress = not (self._gradients or torch.equal(local, mine.anchor))
                self._write(slot, slot.adopt(theirs, local, keep=progress))
                taken.append(index)
        if not taken:
            return
        self.tally.adoptions += 1
        if len(adopt.states) == len(self.states):
            # All of the other's state belongs to a step of its schedule, even an earlier one than
            # this peer's: else the two would wait for each other's rounds crosswise from now on.
            self.step = adopt.step if self._phase is not Phase.DONE else self.step
            self._moved = True
            for slot in self.slots:
                slot.rebase(self.step)
        self._event(
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
        self.step, self._moved = min(step, self._steps - 1), True
        for slot in self.slots:
            slot.enter(self._schedule.next_round(slot.fragment.index, self.step))
        self._publish()
        self._event("skipped", step=self.step, reason="the others had gone on")

    # ---------------------------------------------------------------------------------- helpers

    def _local(self, slot: Slot) -> Tensor:
        """A copy of the slot's local parameters, 1-D."""
        return slot.fragment.flatten(self.replica.parameters)

    def _write(self, slot: Slot, values: Tensor) -> None:
        for name, value in slot.fragment.views(values).items():
            self.replica.parameters[name].copy_(value)

    def _publish(self) -> None:
        in_flight = (slot.sent for slot in self.slots if slot.sent is not None)
        entry = min((s.step - 1 for s in in_flight if not s.everyone), default=self.step)
        done = self._phase is Phase.DONE
        failed = frozenset(slot.fragment.index for slot in self.slots if done or slot.failed)
        states, step_s = tuple(self.states), self.pace.step_s
        self._mailbox.post(Published(self._phase, self.step, entry, states, failed, step_s))

    @property
    def _loss(self) -> float | None:
        """None on a stage without a loss of its own."""
        return None if math.isnan(self.replica.loss) else self.replica.loss

    def _event(self, kind: str, **fields: object) -> None:
        self._mailbox.post(Progress({"event": kind, **fields}))

    def _report(self, state: str = "training") -> None:
        now = self._clock()
        if now < self._progress_at and state == "training" and self.step < self._steps:
            return
        self._progress_at = now + _PROGRESS_S
        self._event(
            "progress",
            step=self.step,
            steps=self._steps,
            loss=self._loss,
            round=self.states[0].version,
            state=state,
        )
        if state == "training":
            self._publish()
