"""One round in a small group: everyone's values to every partner, applied by all or by none.

Between every two peers of the group there is one stream, opened by the one whose name comes first.
What arrives on it is staged. A peer that holds the values of all its partners says so, and the
round succeeds for it when all of them have said so too. A stream that breaks is opened again and
goes on where it was; a peer for which the round has succeeded keeps what it sent, and repeats it.

What no protocol between two can settle remains: a peer that said it holds everything, and hears
nothing more until the limit, cannot know whether its partner has applied the round. It gives the
round up and keeps its local parameters. The partner may have moved; then the two are a little
further apart than they would be, which later rounds make good. Nobody else waits for either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worker.rounds.types import RoundConfig, View

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Tick:
    """Time passes."""


@dataclass(frozen=True)
class Viewed:
    """Membership has changed."""

    view: View


@dataclass(frozen=True)
class Met:
    """The partner has come to this round: what it contributes is on its way."""

    peer: str


@dataclass(frozen=True)
class Heard:
    """Something of the partner's is arriving: it is not late, its link is slow."""

    peer: str


@dataclass(frozen=True)
class Received:
    """All values of the partner are here, verified."""

    peer: str


@dataclass(frozen=True)
class PartnerStaged:
    """The partner holds the values of all its partners."""

    peer: str


@dataclass(frozen=True)
class Broken:
    """The stream to the partner has ended too early."""

    peer: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class Declined:
    """The partner will not hold this round with this peer."""

    peer: str
    reason: str


@dataclass(frozen=True)
class GivenUp:
    """This peer goes on without the round."""

    reason: str


Event = Tick | Viewed | Met | Heard | Received | PartnerStaged | Broken | Declined | GivenUp

# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True)
class Open:
    """Open the stream to the partner."""

    peer: str
    attempt: int


@dataclass(frozen=True)
class Stage:
    """Tell every partner that the values of all are here, on its stream of now or of later."""


@dataclass(frozen=True)
class Doubt:
    """A stream to the peer broke: membership should probe it."""

    peer: str


@dataclass(frozen=True)
class Succeeded:
    """All partners hold everything: apply."""


@dataclass(frozen=True)
class Failed:
    """The round is given up; nothing may be applied."""

    reason: str
    waiting_for: tuple[str, ...]


Action = Open | Stage | Doubt | Succeeded | Failed


@dataclass
class _Partner:
    met: bool = False
    received: bool = False
    staged: bool = False
    open: bool = False
    broken_at: float = math.inf  # and nothing has come since
    attempt: int = 0
    retry_at: float = 0.0
    heard_at: float = -math.inf
    reason: str = ""


class Meeting:
    """A round at this peer.

    Args:
        me: this peer.
        group: the peers of the round, this one included; alone it succeeds at once.
        patience_until: monotonic time (s) until which a partner that has not come is waited for,
            and longer while it is heard of.
        deadline: monotonic time (s) at which the round is given up.
        fragment, round_: which round it is.
    """

    def __init__(
        self,
        me: str,
        group: Sequence[str],
        view: View,
        config: RoundConfig,
        *,
        patience_until: float,
        deadline: float,
        fragment: int = 0,
        round_: int = 0,
    ) -> None:
        self.me, self.group = me, tuple(group)
        self.fragment, self.round = fragment, round_
        self._view, self._config = view, config
        self._patience_until, self._deadline = patience_until, deadline
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
            case Viewed(view):
                self._view = view
            case Met(peer):
                self._heard(peer)
            case Heard(peer):
                self._partners[peer].heard_at, self._partners[peer].broken_at = now, math.inf
            case Received(peer):
                self._heard(peer).received = True
            case PartnerStaged(peer):
                self._heard(peer).staged = True
            case Broken(peer, attempt, reason):
                partner = self._partners[peer]
                if attempt == partner.attempt:
                    partner.open, partner.reason = False, reason
                    partner.broken_at = min(partner.broken_at, now)
                    partner.retry_at = now + self._config.retry_s
                    actions.append(Doubt(peer))
            case Declined(peer, reason):
                return [self._fail(f"{peer} declines: {reason}")]
            case GivenUp(reason):
                return [self._fail(reason)]
            case Tick():
                pass
        if not self._staged and all(p.received for p in self._partners.values()):
            self._staged = True
            if self._partners:
                actions.append(Stage())
        if self._staged and not self.waiting_for:
            self._ended = True
            return [*actions, Succeeded()]
        if hopeless := self._hopeless(now):
            return [*actions, self._fail(hopeless)]
        return actions + self._open_streams(now)

    # --------------------------------------------------------------------------------- inside

    def _heard(self, peer: str) -> _Partner:
        partner = self._partners[peer]
        partner.met, partner.broken_at = True, math.inf
        return partner

    def _is_cut_off(self, peer: str, now: float) -> bool:
        """Whether the stream has been broken for longer than this peer is patient: for half of that
        if the partner is in doubt as well, so that who waits next does not wait in vain."""
        if self._partners[peer].staged:
            return False
        patience_s = self._config.patience_s
        if not self._view.usable(peer):
            patience_s /= 2
        return now - self._partners[peer].broken_at >= patience_s

    def _hopeless(self, now: float) -> str | None:
        """Why waiting any longer is no use, if it is not."""
        for peer, partner in sorted(self._partners.items()):
            if not partner.staged and not self._view.live(peer):
                return f"{peer} is gone"
            if partner.met and self._is_cut_off(peer, now):
                return f"{partner.reason}, and it has not come back"
            if not partner.met and not self._view.usable(peer):
                return f"{peer} does not answer"
            if not partner.met and not self._view.will_contribute(peer, self.fragment, self.round):
                return f"{peer} is past this round"
            patient_until = max(self._patience_until, partner.heard_at + self._config.patience_s)
            if not partner.met and now >= patient_until:
                return f"{peer} has not come to the round in time"
        if now < self._deadline:
            return None
        reasons = {p.reason for p in self._partners.values() if not p.staged and p.reason}
        return "; ".join(["the round's deadline has passed", *sorted(reasons)])

    def _open_streams(self, now: float) -> list[Action]:
        """To the partners that it falls to this peer to call."""
        actions: list[Action] = []
        for peer, partner in sorted(self._partners.items()):
            done = partner.received and partner.staged
            if peer > self.me and not partner.open and not done and now >= partner.retry_at:
                partner.open, partner.attempt = True, partner.attempt + 1
                actions.append(Open(peer, partner.attempt))
        return actions

    def _fail(self, reason: str) -> Failed:
        self._ended = True
        return Failed(reason, self.waiting_for)
