"""One round in a small group: everyone's values to every partner, applied by all or by none.

Between every two peers of the group there is one stream, opened by the one whose name comes first.
What arrives on it is staged. A peer that holds the values of all its partners says so, and the
round succeeds for it when all of them have said so too. A stream that breaks is opened again and
goes on where it was; a peer for which the round has succeeded keeps what it sent, and repeats it.

A peer that has said so no longer knows whether the others have applied the round. From then on no
rumour that a partner is gone ends it at once, only one that stands for as long as this peer is
patient. A partner that is cut off and trusted is called for twice that long. Else it waits until no
partner can stage any more: nobody does so at its deadline or later, and a partner's deadline is
later than this peer's by as much as it came later.

What no protocol between two can settle remains: its partner may have heard the last word and have
applied the round. Then the two are a little further apart than they would be, which later rounds
make good. Nobody else waits for either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from murmuration.worker.exchange.view import (
    Failed,
    GivenUp,
    RoundConfig,
    RoundTick,
    Succeeded,
    Suspect,
    View,
    ViewUpdated,
)

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class PartnerCame:
    """The partner has come to this round: what it contributes is on its way."""

    peer: str


@dataclass(frozen=True)
class PartnerHeard:
    """Something of the partner's is arriving: it is not late, its link is slow."""

    peer: str


@dataclass(frozen=True)
class PartnerComplete:
    """All values of the partner are here, verified."""

    peer: str


@dataclass(frozen=True)
class PartnerStaged:
    """The partner holds the values of all its partners."""

    peer: str


@dataclass(frozen=True)
class PartnerLost:
    """The stream to the partner has ended too early."""

    peer: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class PartnerDeclined:
    """The partner will not hold this round with this peer."""

    peer: str
    reason: str


Event = (
    RoundTick
    | ViewUpdated
    | PartnerCame
    | PartnerHeard
    | PartnerComplete
    | PartnerStaged
    | PartnerLost
    | PartnerDeclined
    | GivenUp
)

# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True)
class CallPartner:
    """Call the partner."""

    peer: str
    attempt: int


@dataclass(frozen=True)
class StageRound:
    """Tell every partner that the values of all are here, on its stream of now or of later."""


Action = CallPartner | StageRound | Suspect | Succeeded | Failed


@dataclass
class _Partner:
    met_at: float = math.inf
    received: bool = False
    staged: bool = False
    open: bool = False
    broken_at: float = math.inf  # and nothing has come since
    gone_at: float = math.inf  # by membership; and nothing has come since
    attempt: int = 0
    retry_at: float = 0.0
    heard_at: float = -math.inf
    reason: str = ""

    @property
    def met(self) -> bool:
        return self.met_at < math.inf


class PairRound:
    """A round at this peer.

    Args:
        me: this peer.
        group: the peers of the round, this one included; alone it succeeds at once.
        key: which round it is: (fragment, round).
        began_at: monotonic time (s) at which this peer has come to it.
        payload_bytes: what goes to each partner.
        lead_s: how far this peer may be ahead of its partners (`ArrivalSkew`).

    A partner that has not come is waited for until `patience_until`, and longer while it is heard
    of. From `deadline` on nothing is staged; a peer that has not staged by then gives up.
    """

    def __init__(
        self,
        me: str,
        group: Sequence[str],
        view: View,
        config: RoundConfig,
        *,
        key: tuple[int, int],
        began_at: float,
        payload_bytes: int,
        lead_s: float = 0.0,
    ) -> None:
        self.me, self.group = me, tuple(group)
        self.fragment, self.round = key
        self._view, self._config = view, config
        self._round_s = config.patience_s + config.transfer_s(payload_bytes) + config.slack_s
        self.deadline = began_at + self._round_s
        self._patience_s = config.patience_s + lead_s
        self.patience_until = min(began_at + self._patience_s, self.deadline)
        self._partners = {peer: _Partner() for peer in self.group if peer != me}
        self._staged = self._ended = False

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The partners that have not said that they hold everything."""
        return tuple(sorted(p for p, partner in self._partners.items() if not partner.staged))

    def step(self, event: Event, now: float) -> list[Action]:
        """Takes one event at monotonic time `now` (s) and says what to do."""
        if self._ended:
            return []
        actions: list[Action] = []
        match event:
            case ViewUpdated(view):
                self._view = view
            case PartnerCame(peer):
                self._come(peer, now)
            case PartnerHeard(peer):
                self._heard(peer, now)
            case PartnerComplete(peer):
                self._come(peer, now).received = True
            case PartnerStaged(peer):
                self._come(peer, now).staged = True
            case PartnerLost(peer, attempt, reason):
                partner = self._partners[peer]
                if attempt == partner.attempt:
                    partner.open, partner.reason = False, reason
                    partner.broken_at = min(partner.broken_at, now)
                    partner.retry_at = now + self._config.retry_s
                    actions.append(Suspect(peer))
            case PartnerDeclined(peer, reason):
                # What has staged counts, even if it lost patience then: others may have applied it.
                if not (self._staged and self._partners[peer].staged):
                    return [self._fail(f"{peer} declines: {reason}")]
            case GivenUp(reason):
                return [self._fail(reason)]
            case RoundTick():
                pass
        self._note_gone(now)
        complete = all(p.received for p in self._partners.values())
        if not self._staged and complete and (now < self.deadline or not self._partners):
            self._staged = True
            if self._partners:
                actions.append(StageRound())
        if self._staged and not self.waiting_for:
            self._ended = True
            # Some may still miss this peer's word, and would wait for a stream in vain.
            return [*actions, *self._open_streams(math.inf), Succeeded()]
        if hopeless := self._hopeless(now):
            return [*actions, self._fail(hopeless)]
        return actions + self._open_streams(now)

    def due_at(self, now: float) -> float:
        """When time alone may change something next, after `now`; infinite if never."""
        if self._ended:
            return math.inf
        times = [self._limit()]
        for peer, partner in self._partners.items():
            if peer > self.me and not partner.open:
                times.append(partner.retry_at)
            if partner.staged:
                continue
            times.append(partner.gone_at + (self._config.patience_s if self._staged else 0.0))
            times += (self._cut_off_at(peer), self._frozen_at(peer))
            if not partner.met:
                times.append(self._given_up_at(peer))
        return min((time_s for time_s in times if time_s > now), default=math.inf)

    # --------------------------------------------------------------------------------- inside

    def _heard(self, peer: str, now: float) -> _Partner:
        partner = self._partners[peer]
        partner.heard_at, partner.broken_at, partner.gone_at = now, math.inf, math.inf
        return partner

    def _come(self, peer: str, now: float) -> _Partner:
        partner = self._heard(peer, now)
        partner.met_at = min(partner.met_at, now)
        return partner

    def _note_gone(self, now: float) -> None:
        for peer, partner in self._partners.items():
            partner.gone_at = math.inf if self._view.live(peer) else min(partner.gone_at, now)

    def _lost(self, peer: str, now: float) -> str | None:
        """Why the partner is not expected back, if it is not.

        One that is cut off is waited for as long as one that has not come. It is half as long if
        it is suspected as well, so that the peer that waits next does not wait in vain. So it is if
        a suspected partner sends nothing, for it has frozen. Once this peer has staged, the partner
        may have applied the round: then a suspicion alone is not enough, and one that is not
        suspected is waited for longer.
        """
        partner, patience_s = self._partners[peer], self._config.patience_s
        if partner.staged:
            return None
        if now >= partner.gone_at + (patience_s if self._staged else 0.0):
            return f"{peer} is gone"
        silent = not partner.met or partner.broken_at < math.inf
        if not self._staged and silent and not self._view.reach(self.me, peer):
            return f"the link to {peer} is cut"
        if now >= self._cut_off_at(peer):
            return f"{partner.reason}, and it has not come back"
        if now >= self._frozen_at(peer):
            return f"{peer} does not answer any more"
        return None

    def _cut_off_s(self, peer: str) -> float:
        """How long a partner that is cut off is waited for."""
        if not self._view.usable(peer):
            return self._config.patience_s / 2
        return self._config.patience_s * (2 if self._staged else 1)

    def _cut_off_at(self, peer: str) -> float:
        """When a partner whose stream broke is not expected back any more."""
        partner = self._partners[peer]
        return partner.broken_at + self._cut_off_s(peer) if partner.met else math.inf

    def _frozen_at(self, peer: str) -> float:
        """When a partner in doubt is held for frozen, as nothing comes on its stream."""
        partner = self._partners[peer]
        frozen = partner.met and not self._view.usable(peer) and partner.broken_at == math.inf
        if not frozen or self._staged:
            return math.inf
        return partner.heard_at + self._cut_off_s(peer)

    def _given_up_at(self, peer: str) -> float:
        """When a partner that has not come is not waited for any more."""
        return max(self.patience_until, self._partners[peer].heard_at + self._patience_s)

    def _hopeless(self, now: float) -> str | None:
        """Why waiting any longer is no use, if it is not."""
        for peer, partner in sorted(self._partners.items()):
            if lost := self._lost(peer, now):
                return lost
            if partner.met:
                continue
            if not self._view.usable(peer):
                return f"{peer} does not answer"
            if not self._view.will_contribute(peer, self.fragment, self.round):
                return f"{peer} is past this round"
            if now >= self._given_up_at(peer):
                return f"{peer} has not come to the round in time"
        if now < self._limit():
            return None
        reasons = {p.reason for p in self._partners.values() if not p.staged and p.reason}
        return "; ".join(["the round's deadline has passed", *sorted(reasons)])

    def _limit(self) -> float:
        """When the round is given up. A peer that has staged waits until no partner can stage any
        more, and the partner's word is here."""
        if not self._staged:
            return self.deadline
        came_at = max(partner.met_at for partner in self._partners.values())
        return max(self.patience_until, came_at) + self._round_s + self._config.retry_s

    def _open_streams(self, now: float) -> list[Action]:
        """To the partners that it falls to this peer to call."""
        actions: list[Action] = []
        for peer, partner in sorted(self._partners.items()):
            # One that has said everything may still miss this peer's word.
            if peer > self.me and not partner.open and now >= partner.retry_at:
                partner.open, partner.attempt = True, partner.attempt + 1
                actions.append(CallPartner(peer, partner.attempt))
        return actions

    def _fail(self, reason: str) -> Failed:
        self._ended = True
        return Failed(reason, self.waiting_for)
