"""The pass that ends a run in pairs: one exact mean over everyone's anchors.

Rounds over all agree from one to the next on the peers that take part; pairs have nothing of the
kind. So each peer waits until everyone has come to the end of the schedule, which their digests
tell, or a grace is over, and lays the pass out over those that have. Where others have seen other
peers, all try again. A peer that was too late takes over the state of those that were in it, as any
peer does whose round has failed (`worker.catchup.bootstrap`).
"""

import math
from dataclasses import dataclass

from worker.exchange.allreduce.dialogue import Group
from worker.exchange.types import GivenUp, RoundConfig, RoundTick, View, ViewUpdated
from worker.membership import Member, Phase

_RETRY_S = 0.5


@dataclass(frozen=True)
class MeanEnded:
    """The mean that was laid out has ended."""

    failed: bool


@dataclass(frozen=True)
class LayOut:
    """Hold the mean over this group, then report `MeanEnded`."""

    group: Group


@dataclass(frozen=True)
class GiveUpMean:
    """The mean on its way is no longer wanted: end it as failed."""

    reason: str


@dataclass(frozen=True)
class PassEnded:
    """The pass is over: as the mean was, or without any for this reason."""

    reason: str = ""


FinalAction = LayOut | GiveUpMean | PassEnded


class FinalAverage:
    """The last pass over one fragment. It ends by emitting `PassEnded` once.

    Args:
        me, fragment, round_: this peer, and what is averaged.
        view: what membership says when this peer comes to the end.
        config: of rounds; its grace is how long the others are waited for.
        now: monotonic time (s) at which this peer has come.
        round_s: how long one mean may take.
    """

    def __init__(
        self,
        me: str,
        fragment: int,
        round_: int,
        view: View,
        config: RoundConfig,
        now: float,
        round_s: float,
    ) -> None:
        self._me, self.fragment, self.round = me, fragment, round_
        self._view = view
        self._patient_until = now + config.grace_s
        self._deadline = self._patient_until + round_s
        self._running, self._ended = False, False
        self._retry_at = -math.inf

    def handle(
        self, event: RoundTick | ViewUpdated | GivenUp | MeanEnded, now: float
    ) -> list[FinalAction]:
        """Takes one event at monotonic time `now` (s) and says what to do."""
        if self._ended:
            return []
        match event:
            case ViewUpdated(view):
                self._view = view
            case GivenUp(reason):
                self._deadline = -math.inf
                return [GiveUpMean(reason)] if self._running else self._end(reason)
            case MeanEnded(failed):
                if not failed or now >= self._deadline:
                    return self._end()
                self._running, self._retry_at = False, now + _RETRY_S
                return []
        if self._running or now < self._retry_at:
            return []
        return self._lay_out_if_due(now)

    def _lay_out_if_due(self, now: float) -> list[FinalAction]:
        live = [member for member in self._view.members.values() if member.live]
        if any(self._version(member) > self.round for member in live):
            return self._end("the others have agreed without this peer")
        phases = (Phase.READY, Phase.TRAINING, Phase.LEAVING)
        running = [member for member in live if member.phase in phases]
        here = {member.peer for member in running if self._version(member) == self.round}
        if len(here) < len(running) and now < self._patient_until:
            return []
        self._running = True
        return [LayOut(tuple(sorted({*here, self._me})))]

    def _end(self, reason: str = "") -> list[FinalAction]:
        self._ended = True
        return [PassEnded(reason)]

    def _version(self, member: Member) -> int:
        """Of the peer's state; -1 as long as it has none."""
        digests = member.digests
        return digests[self.fragment].version if self.fragment < len(digests) else -1
