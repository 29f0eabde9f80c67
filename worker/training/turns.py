"""Whose round it is: what to apply and to send after an inner step, and in which order.

The schedule says when and how many. With a mean over all, which round it is follows from the
states' versions, so that a round which came to nothing is made up for at the next occasion; in
pairs it is the schedule's own, for others do not wait. All peers take the rounds in one order,
whatever happened to each: otherwise two could wait for each other's fragments crosswise.
"""

from collections.abc import Sequence

from algorithms.plan import Plan
from algorithms.schedule import Due, Schedule
from worker.training.fragment import FragmentReplica


class Turns:
    """Args: slots: of all fragments; plan, schedule: of the run. train thread only."""

    def __init__(self, slots: Sequence[FragmentReplica], plan: Plan, schedule: Schedule) -> None:
        self._slots, self._plan, self._schedule = slots, plan, schedule

    def to_apply(self, step: int) -> list[FragmentReplica]:
        """The rounds in flight that have been long enough; at the last step all."""
        last = step == self._schedule.steps
        return [slot for slot in self.waiting() if last or self._is_ripe(slot, step)]

    def to_send(self, steps: range) -> list[tuple[FragmentReplica, int]]:
        """(slot, round) of what is due after these steps, which one inner step went over."""
        due = [each for step in steps for each in self._schedule.sends(step)]
        if self._plan.exchange == "pairs":
            latest = {each.fragment: each.round for each in due}
            return [(self._slots[fragment], round_) for fragment, round_ in latest.items()]
        idle = [(slot, slot.state.version) for slot in self._slots if slot.sent is None]
        idle.sort(key=lambda turn: self._place(*turn))
        return idle[: len(due)]

    def waiting(self) -> list[FragmentReplica]:
        """The slots with a round in flight, in the order of the rounds."""
        in_flight = [(slot, slot.sent.round) for slot in self._slots if slot.sent is not None]
        return [slot for slot, _ in sorted(in_flight, key=lambda turn: self._place(*turn))]

    def _is_ripe(self, slot: FragmentReplica, step: int) -> bool:
        return slot.sent is not None and step - slot.sent.step >= self._plan.overlap_steps

    def _place(self, slot: FragmentReplica, round_: int) -> tuple[int, int]:
        """Where a round stands in the order of all rounds: by its step in an undisturbed run."""
        index = slot.fragment.index
        return (self._schedule.send_step(Due(index, round_)), index)
