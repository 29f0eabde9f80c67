"""When an iteration of a stage is over, and whether what was counted in it can be vouched for.

A peer whose answer got lost on the way has counted a visit that another replica was then asked
for. So each origin says, with its last word, which microbatches came back by way of whom; a stage
that has counted others leaves the whole iteration out, and says so.

An origin that is gone says nothing. Its microbatches are lost, with what stage 0 had of them:
whoever had them straight from it counts them as such. A gradient of them that another stage has
counted stays in its sum. So it is with an earlier life of an origin that has started again: what
the new life begins and says is its own. Word of it may be here before gossip tells of it; but
anybody can send such word, so a life that no card confirms is not waited for for long.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from worker.membership import Member, Phase
from worker.pipeline.stage_call import Incarnation, Key
from worker.training.inbox import IterationOver

_PATIENCE_S = 2.0
_MOST_AHEAD = 8  # iterations: who says to be further is not waited for


@dataclass(frozen=True)
class Orphans:
    """What is known here of an iteration's microbatches whose origin is gone: those that it had
    sent here, as the first peer of their routes, and those in this stage's sum."""

    began: frozenset[int]
    counted: frozenset[int]


class IterationTracker:
    """One peer's; sans-I/O. Times are monotonic seconds."""

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self.ended = 0  # the latest iteration that was found to be over
        self._mine: dict[tuple[int, Incarnation], set[int]] = {}
        self._began: dict[tuple[int, Incarnation], set[int]] = {}
        self._told: dict[tuple[int, Incarnation], frozenset[int]] = {}
        self._orphans: dict[tuple[int, Incarnation], Orphans] = {}
        self._missed_since: dict[Incarnation, float] = {}
        # By origin, the latest iteration that it has sent word of.
        self._heard: dict[Incarnation, int] = {}
        self._unconfirmed_since: dict[Incarnation, float] = {}

    def begin(self, iteration: int) -> None:
        """This peer goes on to an iteration, or back to one; earlier ones are forgotten."""
        self.iteration, self.ended = iteration, min(self.ended, iteration - 1)
        self._missed_since.clear()
        self._mine = {key: mine for key, mine in self._mine.items() if key[0] >= iteration}
        self._began = {key: began for key, began in self._began.items() if key[0] >= iteration}
        near = range(iteration - _MOST_AHEAD, iteration + _MOST_AHEAD + 1)
        self._told = {
            key: told for key, told in self._told.items() if iteration <= key[0] <= near[-1]
        }
        self._heard = {life: at for life, at in self._heard.items() if at in near}
        self._unconfirmed_since = {
            life: since for life, since in self._unconfirmed_since.items() if life in self._heard
        }

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

    def orphans(self, iteration: int) -> dict[Incarnation, Orphans]:
        """By origin, of an iteration that is over."""
        return {key[1]: left for key, left in self._orphans.items() if key[0] == iteration}

    def heard(self, iteration: int, origin: Incarnation) -> None:
        """Word of an origin has come that is at this iteration."""
        if not self.is_far(iteration):
            self._heard[origin] = max(iteration, self._heard.get(origin, 0))

    def began(self, key: Key) -> None:
        """An origin has sent a microbatch here, before any other peer."""
        self._began.setdefault((key.iteration, key.origin), set()).add(key.microbatch)
        self.heard(key.iteration, key.origin)

    def counted(self, key: Key) -> bool:
        """The gradient of a visit is in this stage's sum, or may be at any moment; whether that is
        new."""
        self.heard(key.iteration, key.origin)
        mine = self._mine.setdefault((key.iteration, key.origin), set())
        new = key.microbatch not in mine
        mine.add(key.microbatch)
        return new

    def failed(self, key: Key) -> None:
        """It is not, and will not be."""
        self._mine.get((key.iteration, key.origin), set()).discard(key.microbatch)

    def finished(self, iteration: int, origin: Incarnation, counted: Iterable[int]) -> None:
        """An origin has said its last word on an iteration; one that was thought to be gone, maybe,
        which tells itself what it has lost."""
        self._orphans.pop((iteration, origin), None)
        self.heard(iteration, origin)
        if not self.iteration:  # not begun yet, at whatever iteration it will be: the latest word
            self._told = {
                key: told for key, told in self._told.items() if key[1].peer != origin.peer
            }
        if iteration >= self.iteration and not self.is_far(iteration):
            self._told[iteration, origin] = frozenset(counted)

    def over(self, origins: Iterable[Member], now: float) -> IterationOver | None:
        """Whether every origin that is still there has finished the iteration.

        Args:
            origins: the cards of all replicas of stage 0, gone or not. Who has left stage 0 amid
                the iteration, for another, is not among them, and gone; and so is an earlier life.
        """
        someone = discard = waits = False
        gone: list[tuple[int, Incarnation]] = []
        newest = (self._newest(member, now) for member in origins)
        members = {Incarnation.of(member): member for member in newest}
        left = {life for at, life in (*self._began, *self._mine) if at == self.iteration}
        for life in (*members, *sorted(left - members.keys())):
            key, member = (self.iteration, life), members.get(life)
            mine, told = self._mine.get(key, set()), self._told.get(key)
            if told is not None:
                someone, discard = True, discard or told != mine
            elif member is not None and self._has_gone_on(member, bool(mine), now):
                someone, discard = True, discard or bool(mine)
            elif member is not None and self._has_a_say(member):
                waits = True
            else:
                gone.append(key)
        if waits or not someone:
            return None
        self.ended = self.iteration
        for key in gone:
            began, mine = self._began.get(key, set()), self._mine.get(key, set())
            if began or mine:
                summed = frozenset() if discard else frozenset(mine)
                self._orphans[key] = Orphans(frozenset(began), summed)
        return IterationOver(self.iteration, discard)

    def _newest(self, member: Member, now: float) -> Member:
        """As of the origin's latest life, which may be heard of before gossip tells of it. One that
        gossip does not tell of is forgotten, until it is heard again."""
        since, confirmed = self._unconfirmed_since, Incarnation.of(member)
        ahead = [life for life in self._heard if life.peer == member.peer and life > confirmed]
        for life in ahead:
            if now - since.setdefault(life, now) >= _PATIENCE_S:
                del self._heard[life], since[life]
        latest = max((life for life in ahead if life in self._heard), default=confirmed)
        if latest == confirmed:
            return member
        return replace(member, epoch=latest.epoch, phase=Phase.STARTING, step=0)

    def _has_a_say(self, member: Member) -> bool:
        """Whether to wait for an origin's last word: it begins microbatches in this iteration, or
        has. A joiner that fetches a state from long ago may take its time; but gossip is slower
        than an iteration, and who has sent word of the last one is no joiner any more."""
        heard = self._heard.get(
            Incarnation.of(member), -1
        )  # of what an earlier life has said, nothing
        if member.phase is Phase.STARTING:
            return member.live and heard + 1 >= self.iteration
        if member.phase is Phase.READY:
            return member.live and max(member.step, heard) + 1 >= self.iteration
        return member.live and member.phase in (Phase.TRAINING, Phase.DONE)

    def _has_gone_on(self, member: Member, counted: bool, now: float) -> bool:
        """Whether the origin is further than this iteration, and its last word on it is lost; or
        of no use, where nothing of it was counted."""
        if any(i > self.iteration and origin == Incarnation.of(member) for i, origin in self._told):
            return True
        if member.step < self.iteration:
            return False
        if not counted:
            return True
        return now - self._missed_since.setdefault(Incarnation.of(member), now) >= _PATIENCE_S
