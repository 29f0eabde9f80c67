"""When an iteration of a stage is over, and whether what was counted in it can be vouched for.

A peer whose answer got lost on the way has counted a visit that another replica was then asked
for. So each origin says, with its last word, which microbatches came back by way of whom; a stage
that has counted others leaves the whole iteration out, and says so.

An origin that is gone says nothing. Its microbatches are lost, with what stage 0 had of them:
whoever had them straight from it counts them as such. A gradient of them that another stage has
counted stays in its sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.mailbox import IterationOver
from worker.membership import Card, Phase

_PATIENCE_S = 2.0
_MOST_AHEAD = 8  # iterations: who says to be further is not waited for


@dataclass(frozen=True)
class Orphans:
    """What is known here of an iteration's microbatches whose origin is gone: those that it had
    sent here, as the first peer of their routes, and those in this stage's sum."""

    began: frozenset[int]
    counted: frozenset[int]


class Counting:
    """One peer's; sans-I/O. Times are monotonic seconds."""

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self.ended = 0  # the latest iteration that was found to be over
        self._mine: dict[tuple[int, str], set[int]] = {}
        self._began: dict[tuple[int, str], set[int]] = {}
        self._told: dict[tuple[int, str], frozenset[int]] = {}
        self._orphans: dict[tuple[int, str], Orphans] = {}
        self._missed_since: dict[str, float] = {}
        self._heard: dict[str, int] = {}  # the latest iteration that an origin has sent word of
        self._epochs: dict[str, int] = {}

    def begin(self, iteration: int) -> None:
        """This peer goes on to an iteration, or back to one; earlier ones are forgotten."""
        self.iteration, self.ended = iteration, min(self.ended, iteration - 1)
        self._missed_since.clear()
        self._mine = {key: mine for key, mine in self._mine.items() if key[0] >= iteration}
        self._began = {key: began for key, began in self._began.items() if key[0] >= iteration}
        self._told = {key: told for key, told in self._told.items() if key[0] >= iteration}

    def is_over(self, iteration: int) -> bool:
        """Whether this peer's sum of an iteration is complete, or it is at a later one."""
        return self.iteration > iteration or self.ended >= iteration

    def is_far(self, iteration: int) -> bool:
        """Whether this peer has begun, and will not be at that iteration for long."""
        return 0 < self.iteration < iteration - _MOST_AHEAD

    @property
    def orphaned(self) -> int:
        """The microbatches that are lost with their origins, of those that these had sent here."""
        return sum(len(orphans.began) for orphans in self._orphans.values())

    def orphans(self, iteration: int) -> dict[str, Orphans]:
        """By origin, of an iteration that is over."""
        return {key[1]: left for key, left in self._orphans.items() if key[0] == iteration}

    def heard(self, iteration: int, origin: str) -> None:
        """Word of an origin has come that is at this iteration."""
        self._heard[origin] = max(iteration, self._heard.get(origin, 0))

    def began(self, iteration: int, origin: str, microbatch: int) -> None:
        """An origin has sent a microbatch here, before any other peer."""
        self._began.setdefault((iteration, origin), set()).add(microbatch)
        self.heard(iteration, origin)

    def counted(self, iteration: int, origin: str, microbatch: int) -> bool:
        """The gradient of a visit is in this stage's sum, or may be at any moment; whether that is
        new."""
        self.heard(iteration, origin)
        mine = self._mine.setdefault((iteration, origin), set())
        new = microbatch not in mine
        mine.add(microbatch)
        return new

    def failed(self, iteration: int, origin: str, microbatch: int) -> None:
        """It is not, and will not be."""
        self._mine.get((iteration, origin), set()).discard(microbatch)

    def finished(self, iteration: int, origin: str, counted: Iterable[int]) -> None:
        """An origin has said its last word on an iteration; one that was thought to be gone, maybe,
        which tells itself what it has lost."""
        self._orphans.pop((iteration, origin), None)
        self.heard(iteration, origin)
        if not self.iteration:  # not begun yet, at whatever iteration it will be: the latest word
            self._told = {key: told for key, told in self._told.items() if key[1] != origin}
        if iteration >= self.iteration and not self.is_far(iteration):
            self._told[iteration, origin] = frozenset(counted)

    def over(self, origins: Iterable[Card], now: float) -> IterationOver | None:
        """Whether every origin that is still there has finished the iteration.

        Args:
            origins: the cards of all replicas of stage 0, gone or not. Who has left stage 0 amid
                the iteration, for another, is not among them, and gone.
        """
        someone = discard = waits = False
        gone: list[tuple[int, str]] = []
        left = {key for key in (*self._began, *self._mine) if key[0] == self.iteration}
        for card in origins:
            if self._epochs.setdefault(card.peer, card.epoch) != card.epoch:
                self._epochs[card.peer] = card.epoch  # of what an earlier life has said, nothing
                self._heard.pop(card.peer, None)
            key = (self.iteration, card.peer)
            left.discard(key)
            mine, told = self._mine.get(key, set()), self._told.get(key)
            if told is not None:
                someone, discard = True, discard or told != mine
            elif self._has_gone_on(card, bool(mine), now):
                someone, discard = True, discard or bool(mine)
            elif self._has_a_say(card):
                waits = True
            else:
                gone.append(key)
        if waits or not someone:
            return None
        self.ended = self.iteration
        for key in (*gone, *sorted(left)):
            began, mine = self._began.get(key, set()), self._mine.get(key, set())
            if began or mine:
                summed = frozenset() if discard else frozenset(mine)
                self._orphans[key] = Orphans(frozenset(began), summed)
        return IterationOver(self.iteration, discard)

    def _has_a_say(self, card: Card) -> bool:
        """Whether to wait for an origin's last word: it begins microbatches in this iteration, or
        has. A joiner that fetches a state from long ago may take its time; but gossip is slower
        than an iteration, and who has sent word of the last one is no joiner any more."""
        heard = self._heard.get(card.peer, -1)
        if card.phase is Phase.STARTING:
            return card.live and heard + 1 >= self.iteration
        if card.phase is Phase.READY:
            return card.live and max(card.step, heard) + 1 >= self.iteration
        return card.live and card.phase in (Phase.TRAINING, Phase.DONE)

    def _has_gone_on(self, card: Card, counted: bool, now: float) -> bool:
        """Whether the origin is further than this iteration, and its last word on it is lost; or
        of no use, where nothing of it was counted."""
        if any(i > self.iteration and origin == card.peer for i, origin in self._told):
            return True
        if card.step < self.iteration:
            return False
        if not counted:
            return True
        return now - self._missed_since.setdefault(card.peer, now) >= _PATIENCE_S
