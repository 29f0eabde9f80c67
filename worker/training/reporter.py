"""What the train thread tells the I/O thread of itself: its events, and what it has committed."""

import math
from collections.abc import Callable, Sequence

from worker.membership import Phase
from worker.training.fragment import FragmentReplica, Sent
from worker.training.inbox import Mailbox, Published, RoundDone, RoundFailed, TrainingEvent
from worker.training.pace import Pace
from worker.training.replica import InnerReplica

_PROGRESS_S = 0.5


class Reporter:
    """train thread only.

    Args:
        mailbox: the way to the I/O thread.
        replica, slots, pace: what there is to tell of.
        steps: the run's last step.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        replica: InnerReplica,
        slots: Sequence[FragmentReplica],
        pace: Pace,
        steps: int,
        clock: Callable[[], float],
    ) -> None:
        self.phase = Phase.READY
        self._mailbox, self._clock = mailbox, clock
        self._replica, self._slots, self._pace, self._steps = replica, slots, pace, steps
        self._progress_at = -math.inf

    def event(self, kind: str, **fields: object) -> None:
        """Plain values, for the log."""
        self._mailbox.post(TrainingEvent({"event": kind, **fields}))

    def publish(self, step: int) -> None:
        """What is committed at this position in the schedule, for others to see and fetch."""
        in_flight = (slot.sent for slot in self._slots if slot.sent is not None)
        entry = min((s.step - 1 for s in in_flight if not s.everyone), default=step)
        done = self.phase is Phase.DONE
        failed = frozenset(slot.fragment.index for slot in self._slots if done or slot.failed)
        states = tuple(slot.state for slot in self._slots)
        self._mailbox.post(Published(self.phase, step, entry, states, failed, self._pace.step_s))

    def progress(self, step: int, state: str = "training") -> None:
        """Reports now and then where the training is, and publishes; other states, always."""
        now = self._clock()
        if now < self._progress_at and state == "training" and step < self._steps:
            return
        self._progress_at = now + _PROGRESS_S
        self.event(
            "progress",
            step=step,
            steps=self._steps,
            loss=self._loss,
            round=self._slots[0].state.version,
            state=state,
        )
        if state == "training":
            self.publish(step)

    def iteration(self, step: int, visits: int) -> None:
        """The gradient of a stage's iteration is there, the mean over so many visits."""
        self.event("iteration", iteration=step, visits=visits, loss=self._loss)

    def round_done(self, slot: FragmentReplica, result: RoundDone, stall_s: float) -> None:
        """A round has come back, for which the training has stood still for so long."""
        self.event(
            "round",
            fragment=slot.fragment.index,
            round=result.round,
            contributors=result.contributors,
            missed=bool(result.missed),
            stall_s=round(stall_s, 4),
            exchange_s=round(result.exchange_s, 4),
            waited_for=result.waited_for,
        )

    def round_failed(self, slot: FragmentReplica, sent: Sent, result: RoundFailed) -> None:
        """A round has come to nothing."""
        self.event(
            "round_failed",
            fragment=slot.fragment.index,
            round=sent.round,
            reason=result.reason,
            waiting_for=list(result.waiting_for),
        )

    @property
    def _loss(self) -> float | None:
        """None on a stage without a loss of its own."""
        return None if math.isnan(self._replica.loss) else self._replica.loss
