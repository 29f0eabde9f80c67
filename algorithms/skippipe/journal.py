"""What a search has spent, and why it has rejected each candidate that it did not follow."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rejection:
    """Args: phase: `stages`, `memory`, `collisions` or `trades`. reason: in words."""

    phase: str
    reason: str


@dataclass
class Journal:
    """Effort is counted from operations and not by a clock: all machines stop at the same place.

    Args:
        effort_s: what may be spent, in seconds of one usual core, about.
        spent_s: what was spent.
        rejections: in order.
    """

    effort_s: float
    spent_s: float = 0.0
    rejections: list[Rejection] = field(default_factory=list)

    def reject(self, phase: str, reason: str) -> None:
        self.rejections.append(Rejection(phase, reason))

    def spend(self, effort_s: float) -> None:
        self.spent_s += effort_s

    def has_left(self, share: float = 1.0) -> bool:
        """Whether less than this share of the effort is spent."""
        return self.spent_s < share * self.effort_s
