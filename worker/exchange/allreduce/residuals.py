"""What the requantization of this peer's reductions has left out, to be added to its next ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.exchange.types import ShardKey

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Kept:
    """After `round`; `before` is what went into it, for the case that it is done over."""

    round: int
    before: "Tensor | None"
    after: "Tensor"


class Residuals:
    """One for each shard that this peer reduces. io thread only.

    A shard is the same range as long as the group is the same. What belongs to another layout is
    given up: one rounding error of one round.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], _Kept] = {}

    def before(self, key: ShardKey, start: int, stop: int) -> "Tensor | None":
        """What to add to the mean of a round; None for nothing."""
        kept = self._kept.get((key.fragment, start, stop))
        if kept is None:
            return None
        return kept.before if kept.round >= key.round else kept.after

    def keep(
        self, key: ShardKey, start: int, stop: int, before: "Tensor | None", after: "Tensor"
    ) -> None:
        """The round has closed, with `before` in its mean and `after` left out."""
        stale = [
            place
            for place in self._kept
            if place[0] == key.fragment and place[1] < stop and start < place[2]
        ]
        for place in stale:
            del self._kept[place]
        self._kept[key.fragment, start, stop] = _Kept(key.round, before, after)
