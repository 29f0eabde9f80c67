"""One round in a small group: everyone's values to every partner, applied by all or by none.

Between every two peers of the group there is one stream, opened by the one whose name comes first.
A peer that holds the values of all its partners is prepared, and says so. The round is committed by
it when all of them have said so too. A stream that breaks is opened again and goes on where it was;
a peer for which the round has succeeded repeats what it sent.

A peer that has said so no longer knows whether the others have applied the round. How long it then
waits for whom, and what stays unsettled, is in docs/adr/0010.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from murmuration.worker.exchange.view import View

if TYPE_CHECKING:
    from torch import Tensor

    from murmuration.worker import wire
    from murmuration.worker.exchange.pairwise.partner import PartnerStream
    from murmuration.worker.exchange.round_context import RoundConfig

ANCHOR, CONTRIBUTION = PARTS = (0, 1)  # on the wire: PartHeader.part


@dataclass(frozen=True, eq=False)
class OwnPart:
    """An anchor or a contribution of this peer's; `left_out` is what its encoding has not got."""

    payload: "wire.Payload"
    left_out: "Tensor | None" = None
    size: float = 0.0  # the norm of a contribution
    weight: int = 1


@dataclass(eq=False)
class TheirPart:
    """As much of a partner's anchor or contribution as is here; `checked`: all, and it is valid."""

    payload: "wire.Incoming"
    weight: int = 1
    size: float = 0.0  # the norm of a contribution, or of the way to an anchor
    factor: float | None = None  # how much of it counts, once that is decided
    checked: bool = False


@dataclass(eq=False)
class Partner:
    """A partner as it is known; times and calls from the beginning of the round, in s."""

    parts: dict[int, TheirPart] = field(default_factory=dict)
    prepared: bool = False  # it says that it holds everything
    declined: str | None = None  # why it has given up, if it says so
    met_at: float = math.inf
    heard_at: float = -math.inf
    broken_at: float = math.inf  # when its stream broke; nothing has come since
    gone_at: float = math.inf  # when membership has found it gone; likewise
    open: bool = False  # a call is on its way, or it is to call
    attempt: int = 0  # the number of the call
    retry_at: float = 0.0
    reason: str = ""

    @property
    def received(self) -> bool:
        return all(part in self.parts and self.parts[part].checked for part in PARTS)

    @property
    def met(self) -> bool:
        return self.met_at < math.inf


class PairRound:
    """A round at this peer. io thread only. What happens is a method; `decide` says what comes of
    it. Nothing does before the round has begun here, or once it has ended.

    A partner that has not come is waited for until `patience_until`, and longer while it is heard
    of. From `deadline` on nobody prepares; a peer that is not prepared by then gives up. Args:
    group: the peers of the round, this one included; key: (fragment, round); own: by part, what
    this peer gives; the contribution comes when the round begins; laid: when (s) it was."""

    def __init__(
        self,
        me: str,
        group: Sequence[str],
        key: tuple[int, int],
        own: Mapping[int, OwnPart],
        laid: float,
        view: View,
        config: "RoundConfig",
    ) -> None:
        self.me, self.group, self.own, self.laid = me, tuple(group), dict(own), laid
        self.fragment, self.round = self.key = key
        self.view, self._config = view, config
        self.partners = {peer: Partner() for peer in self.group if peer != me}
        self.streams: dict[str, PartnerStream] = {}
        # When to call a partner again that may not know of the end, and which attempt it is.
        self.recalls: dict[str, tuple[float, int]] = {}
        self.begun = self.reported = False  # its end is known to others here
        self.complete = False  # everything is here, and the partners are told so
        self.succeeded = False  # everything that the round needs is here: apply
        self.failed = ""  # why nothing may be applied
        self.last = ""  # whose values came last
        self.began = self.deadline = self.patience_until = 0.0
        self.late_at = math.inf  # from when on a partner that has not come is late
        self.versions: dict[str, int] = {}  # of the partners, when the round began
        self.leave_at = 0.0  # when a round that is given up is left
        self.heard = 0.0  # when bytes of a partner came last
        self.told = False  # the train side has the anchors' mean, or is about to
        self.let_go = False  # it need not wait for it
        self.useless = set[str]()  # partners whose values do not fit
        self._round_s = self._patience_s = self._lead_s = self._transfer_s = 0.0

    def __str__(self) -> str:
        return f"round {self.round} of fragment {self.fragment}"

    @property
    def ended(self) -> bool:
        return self.succeeded or bool(self.failed)

    @property
    def running(self) -> bool:
        return self.begun and not self.ended

    @property
    def weight(self) -> int:
        contribution = self.own.get(CONTRIBUTION)
        return contribution.weight if contribution else 1

    @property
    def waiting_for(self) -> tuple[str, ...]:
        return tuple(sorted(p for p, partner in self.partners.items() if not partner.prepared))

    def waited_s(self, peer: str, now: float) -> float:
        """How long the partner has let this peer wait, beyond what its link may take."""
        partner = self.partners[peer]
        if not partner.met:
            return now - self.began - self._lead_s
        end = now - self._transfer_s if self.failed else -math.inf
        return max(partner.met_at, end) - self.began - self._lead_s

    def parts(self, part: int) -> list[OwnPart | TheirPart]:
        """A part of every peer, in the order of the group, which is sorted."""
        of = {peer: partner.parts[part] for peer, partner in self.partners.items()}
        return [self.own[part] if peer == self.me else of[peer] for peer in self.group]

    def begin(
        self, now: float, payload_bytes: int, lead_s: float = 0.0, patience_s: float = math.inf
    ) -> None:
        """This peer has come to the round, at monotonic time `now` (s), here and below. Args:
        lead_s: how far it may be ahead of its partners; patience_s: how long a late one is waited
        for besides."""
        config, members = self._config, self.view.members
        self.versions = {p: members[p].version for p in self.partners if p in members}
        self.begun, self.began = True, now
        self._transfer_s = config.transfer_s(payload_bytes)
        self._round_s = config.patience_s + self._transfer_s + config.slack_s
        self.deadline, self._lead_s = now + self._round_s, lead_s
        self._patience_s = min(config.patience_s, patience_s) + lead_s
        self.patience_until = min(now + self._patience_s, self.deadline)

    def hurry(self) -> None:
        """A partner is known to be late again and again."""
        self.patience_until = min(self.patience_until, self.late_at)
        self._patience_s = min(self._patience_s, self.late_at - self.began)

    def heard_of(self, peer: str, now: float) -> None:
        """Something of the partner's arrives: it is not late, its link is slow."""
        self.heard = now
        self._show_life(peer, now)

    def came(self, peer: str, now: float) -> None:
        """The partner has come to this round: what it contributes is on its way, or here."""
        if self.running:
            self._show_life(peer, now)
            self.partners[peer].met_at = min(self.partners[peer].met_at, now)

    def _show_life(self, peer: str, now: float) -> None:
        if self.running:
            partner = self.partners[peer]
            partner.heard_at, partner.broken_at, partner.gone_at = now, math.inf, math.inf

    def lost(self, peer: str, attempt: int, reason: str, now: float) -> bool:
        """The stream to the partner has ended too early. Returns whether it was the latest."""
        partner = self.partners[peer]
        if not self.running or attempt != partner.attempt:
            return False
        partner.open, partner.reason = False, reason
        partner.broken_at = min(partner.broken_at, now)
        partner.retry_at = now + self._config.retry_s
        return True

    def declines(self, peer: str, reason: str) -> None:
        """Gives up, unless that peer is prepared: others may have applied the round already."""
        if not (self.complete and self.partners[peer].prepared):
            self.give_up(f"{peer} declines: {reason}")

    def give_up(self, reason: str) -> None:
        if self.running:
            self.failed = reason

    def decide(self, now: float) -> list[str]:
        """Returns the partners to call; their `attempt` is the number of the call."""
        if not self.running:
            return []
        partners = self.partners.values()
        for peer, partner in self.partners.items():
            partner.gone_at = math.inf if self.view.live(peer) else min(partner.gone_at, now)
        if all(partner.received for partner in partners) and not self.complete:
            # Nobody can have applied it yet: one that is gone ends it.
            gone = any(partner.gone_at < math.inf and not partner.prepared for partner in partners)
            self.complete = not gone and (now < self.deadline or not partners)
        if self.complete and not self.waiting_for:
            self.succeeded = True
            # Some may still miss this peer's word, and would wait for a stream in vain.
            return self._to_call(math.inf)
        self.failed = self._hopeless(now)
        return [] if self.failed else self._to_call(now)

    def due_at(self, now: float) -> float:
        """When time alone may change something next, after `now`; infinite if never."""
        if not self.running:
            return math.inf
        times = [self._limit(), self.late_at]
        for peer, partner in self.partners.items():
            if peer > self.me and not partner.open:
                times.append(partner.retry_at)
            if partner.prepared:
                continue
            times.append(partner.gone_at + (self._config.patience_s if self.complete else 0.0))
            times += (self._cut_off_at(peer), self._frozen_at(peer))
            if not partner.met:
                times.append(self._given_up_at(peer))
        return min((time_s for time_s in times if time_s > now), default=math.inf)

    def _not_expected(self, peer: str, now: float) -> str | None:
        """Why the partner is not expected back, if it is not.

        One that is cut off is waited for as long as one that has not come; half as long if it is
        suspected too, so that the peer that waits next does not wait in vain. Once this peer is
        prepared, the partner may have applied the round: then a suspicion alone is not enough."""
        partner, patience_s = self.partners[peer], self._config.patience_s
        if partner.prepared:
            return None
        if now >= partner.gone_at + (patience_s if self.complete else 0.0):
            return f"{peer} is gone"
        silent = not partner.met or partner.broken_at < math.inf
        if not self.complete and silent and not self.view.reach(self.me, peer):
            return f"the link to {peer} is cut"
        if now >= self._cut_off_at(peer):
            return f"{partner.reason}, and it has not come back"
        return f"{peer} does not answer any more" if now >= self._frozen_at(peer) else None

    def _cut_off_s(self, peer: str) -> float:
        if not self.view.usable(peer):
            return self._config.patience_s / 2
        return self._config.patience_s * (2 if self.complete else 1)

    def _cut_off_at(self, peer: str) -> float:
        partner = self.partners[peer]
        return partner.broken_at + self._cut_off_s(peer) if partner.met else math.inf

    def _frozen_at(self, peer: str) -> float:
        partner = self.partners[peer]
        frozen = partner.met and not self.view.usable(peer) and partner.broken_at == math.inf
        return math.inf if not frozen or self.complete else partner.heard_at + self._cut_off_s(peer)

    def _given_up_at(self, peer: str) -> float:
        return max(self.patience_until, self.partners[peer].heard_at + self._patience_s)

    def _hopeless(self, now: float) -> str:
        for peer, partner in sorted(self.partners.items()):
            if lost := self._not_expected(peer, now):
                return lost
            if partner.met:
                continue
            if not self.view.usable(peer):
                return f"{peer} does not answer"
            if not self.view.will_contribute(peer, self.fragment, self.round):
                return f"{peer} is past this round"
            if now >= self._given_up_at(peer):
                return f"{peer} has not come to the round in time"
        if now < self._limit():
            return ""
        reasons = {p.reason for p in self.partners.values() if not p.prepared and p.reason}
        return "; ".join(["the round's deadline has passed", *sorted(reasons)])

    def _limit(self) -> float:
        """When the round is given up: once prepared, when no partner can prepare any more."""
        if not self.complete:
            return self.deadline
        came_at = max(partner.met_at for partner in self.partners.values())
        return max(self.patience_until, came_at) + self._round_s + self._config.retry_s

    def _to_call(self, now: float) -> list[str]:
        found = []
        for peer, partner in sorted(self.partners.items()):
            # One that has said everything may still miss this peer's word.
            if peer > self.me and not partner.open and now >= partner.retry_at:
                partner.open, partner.attempt = True, partner.attempt + 1
                found.append(peer)
        return found
