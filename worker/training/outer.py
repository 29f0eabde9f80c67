"""The outer rounds of one peer: what it sends, what it waits for, and what becomes of it.

When a round fails, the local parameters are kept and the anchor waits for another peer's state;
when a round closed without this peer, what it has learned is carried over into the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from algorithms.diloco import pseudo_gradient
from algorithms.plan import Plan
from algorithms.schedule import Schedule
from worker.training.fragment import FragmentReplica, Sent
from worker.training.inbox import Begin, Mailbox, RoundDone, RoundFailed
from worker.training.loop_protocol import Loop
from worker.training.metrics import Metrics, Stall
from worker.training.replica import InnerReplica
from worker.training.reporter import Reporter
from worker.training.turns import Turns
from worker.wire import is_finite


class OuterRounds:
    """train thread only. The `loop` that methods take is the one that waits with them.

    Args:
        replica, slots: the local parameters and, for each fragment, what is committed of them.
        plan, schedule: of the run.
        mailbox: where rounds are begun; tell: where they are told of.
        tally: counts them, and how long they were waited for.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        replica: InnerReplica,
        slots: Sequence[FragmentReplica],
        plan: Plan,
        schedule: Schedule,
        mailbox: Mailbox,
        tell: Reporter,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._replica, self._slots, self._plan, self._schedule = replica, slots, plan, schedule
        self._turns = Turns(slots, plan, schedule)
        self._mailbox, self._tell, self._metrics, self._clock = mailbox, tell, metrics, clock
        self._pairs, self._gradients = plan.exchange == "pairs", plan.payload == "gradient"

    @property
    def in_flight(self) -> bool:
        """Whether a round is on its way whose end is not here yet."""
        return any(slot.sent is not None and slot.arrived is None for slot in self._slots)

    # --------------------------------------------------------------------------- local parameters

    def local(self, slot: FragmentReplica) -> Tensor:
        """A copy of the slot's local parameters, 1-D."""
        return slot.fragment.flatten(self._replica.parameters)

    def write(self, slot: FragmentReplica, values: Tensor) -> None:
        """Makes these (1-D) the slot's local parameters."""
        for name, value in slot.fragment.views(values).items():
            self._replica.parameters[name].copy_(value)

    # ----------------------------------------------------------------- rounds of pseudo-gradients

    def exchange(self, loop: Loop, before: int) -> None:
        """Applies what is due, then sends what is due since step `before`."""
        for slot in self._turns.to_apply(loop.step):
            self._apply(loop, slot)
        for slot, round_ in self._turns.to_send(range(before + 1, loop.step + 1)):
            if self._pairs:  # a round is the schedule's: others do not wait for it
                self._apply(loop, slot)
                slot.enter(round_)
            self._send(slot, loop.step)
        if self._schedule.applies_at_once(loop.step):
            applied = self._turns.waiting()
            for slot in applied:
                self._apply(loop, slot)
            for slot in applied:  # anchors go ahead when no round is on its way any more
                self._await_anchors(loop, slot)

    def _await_anchors(self, loop: Loop, slot: FragmentReplica) -> None:
        """In pairs: for those of the next round's group, as soon as they can come. Steps that
        undo what a replica is apart by would undo it twice with a head start after them."""
        index, round_ = slot.fragment.index, slot.state.version
        if not self._plan.shared_momentum or round_ >= self._schedule.rounds(index):
            return
        started = self._clock()
        while not slot.knows_ahead and slot.state.version == round_ and loop.stopped is None:
            loop.take(self._mailbox.wait())
        self._metrics.stalled(Stall(self._clock() - started, index, round_, "anchors"))

    def go_on_from_groups(self, step: int) -> None:
        """In pairs: a head start where all anchors of the next round's group are here."""
        for slot in (each for each in self._slots if each.knows_ahead):
            moved = slot.go_on_from_group(self.local(slot))
            if moved is not None:
                self.write(slot, moved)
                index, round_ = slot.fragment.index, slot.state.version
                self._tell.event("head_start", fragment=index, round=round_, step=step)

    def agree(self, loop: Loop) -> None:
        """After the last step of a run in pairs: one anchor for all, the mean of everyone's."""
        rounds = [self._schedule.rounds(slot.fragment.index) for slot in self._slots]
        # What was taken over from peers that had agreed is the mean already.
        slots = [s for s, last in zip(self._slots, rounds, strict=True) if s.state.version <= last]
        for slot in slots:
            slot.send_anchor(rounds[slot.fragment.index], loop.step)
        self._tell.publish(loop.step)
        for slot in slots:
            index, state = slot.fragment.index, slot.state
            self._mailbox.post(Begin(index, state.version, (), state.anchor, everyone=True))
        for slot in slots:
            _, result = self._await_round(loop, slot)
            if result is not None:
                self.write(slot, slot.agree(result))
                self._tell.publish(loop.step)

    def _send(self, slot: FragmentReplica, step: int) -> None:
        start = slot.start
        g = pseudo_gradient(start, self.local(slot))
        if not is_finite(g):
            # Others wait for this peer: no movement is a better answer than none.
            self._tell.event("warning", text="parameters are not finite: going on from the anchor")
            self.write(slot, start)
            self._replica.reset_moments()
            g = torch.zeros_like(start)
        work_steps = min(slot.work_steps, self._plan.inner_steps)
        sent = self._begin(slot, g, step, max(1, work_steps))
        if sent.guess is not None:
            self.write(slot, sent.guess)

    def _apply(self, loop: Loop, slot: FragmentReplica) -> None:
        """Waits for a round that was sent, and applies its mean."""
        sent, result = self._await_round(loop, slot)
        if sent is not None and result is not None:
            self.write(slot, slot.apply(sent, result, self.local(slot)))
            self._tell.publish(loop.step)

    # -------------------------------------------------------------------- data-parallel gradients

    def average(self, loop: Loop, gradients: dict[str, Tensor], visits: int) -> None:
        """Replaces the gradients, means over so many visits of a stage (1 of a whole model), by
        their mean over the group; keeps them where a round fails."""
        for slot in self._slots:
            self._begin(slot, slot.fragment.flatten(gradients), loop.step, visits)
        for slot in self._slots:
            sent, result = self._await_round(loop, slot)
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

    # ------------------------------------------------------------------------------ there and back

    def _begin(self, slot: FragmentReplica, g: Tensor, step: int, weight: int) -> Sent:
        sent, state = slot.send(g, step), slot.state
        self._tell.publish(step)
        anchor = state.anchor if self._pairs else None
        index, values = slot.fragment.index, sent.values
        self._mailbox.post(Begin(index, state.version, state.group, values, anchor, weight=weight))
        return sent

    def _await_round(
        self, loop: Loop, slot: FragmentReplica
    ) -> tuple[Sent | None, RoundDone | None]:
        """The result of a slot's round in flight; None when it failed or came to nothing."""
        sent, index = slot.sent, slot.fragment.index
        if sent is None:
            return None, None
        started = self._clock()
        if slot.arrived is None:
            self._tell.progress(loop.step, state="waiting")
        while _on_its_way(slot, sent) and slot.arrived is None and loop.stopped is None:
            loop.take(self._mailbox.wait())
        stall_s = self._clock() - started
        now, result = slot.sent, slot.arrived
        if now is None or now.round != sent.round or result is None:
            # Another peer's state took its place, or the run is stopping.
            self._metrics.stalled(Stall(stall_s, index, sent.round, "?"))
            return sent, None
        sent = now  # an adoption may have moved its guess
        slot.sent = slot.arrived = None
        if isinstance(result, RoundFailed):
            waited_for = ",".join(result.waiting_for) or "?"
            self._metrics.stalled(Stall(stall_s, index, sent.round, waited_for))
            self._fail(slot, sent, result, loop.step)
            return sent, None
        self._metrics.stalled(Stall(stall_s, index, sent.round, result.waited_for))
        self._metrics.rounds_completed += 1
        self._tell.round_done(slot, result, stall_s)
        return sent, result

    def _fail(self, slot: FragmentReplica, sent: Sent, result: RoundFailed, step: int) -> None:
        """A round of this peer's has come to nothing: local parameters are kept."""
        local = slot.fail(sent, result, self.local(slot))
        if local is not None and not self._gradients:
            self.write(slot, local)
        self._metrics.rounds_failed += 1
        self._tell.round_failed(slot, sent, result)
        self._tell.publish(step)


def _on_its_way(slot: FragmentReplica, sent: Sent) -> bool:
    return slot.sent is not None and slot.sent.round == sent.round
