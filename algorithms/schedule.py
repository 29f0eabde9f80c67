"""When each fragment is sent and applied: exact offsets, period H, overlap tau.

Steps count from 1: after inner step t, a fragment with offset t_p is sent when t >= t_p and
(t - t_p) mod H == 0, and its reduction is applied tau steps later. Offsets are spread evenly and
exactly over the period, so every fragment syncs every H steps whatever the number of fragments.
The last step closes: what is in flight is applied, and fragments with unsent steps sync once more.

Ref: arXiv:2501.18512 algorithm 2.
"""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Due:
    """Round `round` (from 0) of fragment `fragment`."""

    fragment: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The rounds of a run of `steps` inner steps. Raises ValueError, with reason and fix."""

    fragments: int  # at most `inner_steps` where they are not due together
    inner_steps: int  # H, inner steps between two syncs of one fragment
    overlap_steps: int  # tau in 0..H, inner steps between sending and applying
    steps: int
    together: bool = False  # every fragment is due after the same step, at the end of the period

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise ValueError(f"inner_steps (H) is {self.inner_steps}; it must be at least 1")
        if self.fragments < 1 or (self.fragments > self.inner_steps and not self.together):
            raise ValueError(
                f"{self.fragments} fragments do not fit into inner_steps = {self.inner_steps}; "
                "use fewer fragments or a longer period"
            )
        if not 0 <= self.overlap_steps <= self.inner_steps:
            raise ValueError(
                f"overlap_steps (tau) is {self.overlap_steps}; it must be 0 to inner_steps = "
                f"{self.inner_steps}"
            )
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")

    def offset(self, fragment: int) -> int:
        """t_p, the step of a fragment's first sync, in 1..H."""
        place = self.fragments if self.together else fragment + 1
        return place * self.inner_steps // self.fragments

    def rounds(self, fragment: int) -> int:
        """The number of rounds that a fragment has in the whole run, the closing one included."""
        beyond = max(0, self.steps - self.offset(fragment))
        return 1 + -(-beyond // self.inner_steps)

    def send_step(self, due: Due) -> int:
        """The step after which a round is sent."""
        return min(self.steps, self.offset(due.fragment) + due.round * self.inner_steps)

    def next_round(self, fragment: int, step: int) -> int:
        """The first round of a fragment that is sent after `step`, which is before the last."""
        regular = (step - self.offset(fragment)) // self.inner_steps + 1
        return min(max(0, regular), self.rounds(fragment) - 1)

    def sends(self, step: int) -> tuple[Due, ...]:
        """The rounds that start after inner step `step`."""
        return tuple(due for f in range(self.fragments) if (due := self._sent(f, step)) is not None)

    def applies_at_once(self, step: int) -> bool:
        """Tells whether the rounds sent after `step` are applied before the next step."""
        return self.overlap_steps == 0 or step == self.steps

    def _sent(self, fragment: int, step: int) -> Due | None:
        beyond = step - self.offset(fragment)
        if 0 < step <= self.steps and beyond >= 0 and beyond % self.inner_steps == 0:
            return Due(fragment, beyond // self.inner_steps)
        return Due(fragment, self.rounds(fragment) - 1) if step == self.steps else None
