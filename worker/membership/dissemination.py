"""Chooses what to tell whom: an exchange carries only what is new to its receiver.

Messages that carry members are numbered per sender and receiver, and acknowledge the highest number
received. A peer whose exchange failed acknowledges 0, "count on nothing", until a message with
`reset` restarts the numbers. So does a restarted process, which is told of numbers that it never
used.

What goes to whom is in docs/adr/0011.

Ref: rumour mongering with feedback and counters, and anti-entropy behind it (Demers et al. 1987).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership import Health, Member

_TELL_LIFE = 12
_TELL_STATE = 4
_FULL_PEERS = 32
_FIRST_FULL = 3
_UNACKNOWLEDGED = 32  # messages, of which the receiver keeps silent
_MOST_BYTES = 40 * 1024  # of members in one message: a call takes 64 KiB


Said = tuple[tuple[Member, ...], pb.GossipMessage]
"""The members that a message carries, as they are known here, and the rest of it."""


@dataclass
class _Rumour:
    member: Member
    tell: int
    known_to: set[str] = field(default_factory=set)
    under_way: set[str] = field(default_factory=set)
    owed_to: set[str] = field(default_factory=set)  # they are behind

    @property
    def spreads(self) -> bool:
        return len(self.known_to) + len(self.under_way) < self.tell


@dataclass
class _Peering:
    used: int = 0
    received: int = 0
    reset: bool = True  # what was sent may be lost, or nothing was sent yet
    failed: bool = False
    sent: dict[int, tuple[Member, ...]] = field(default_factory=dict)


class Dissemination:
    """Composes what one peer says, and tracks what the others know. Each call takes all `members`,
    this peer included, by name; what changes is in another sequence. Args: full_s: between two full
    exchanges, in swarms of up to 32."""

    def __init__(self, me: str, full_s: float) -> None:
        self._me, self._full_s = me, full_s
        self._full_at, self._first_full = math.inf, _FIRST_FULL
        self._cursor = ""
        self._rumours: dict[str, _Rumour] = {}
        self._taken_up: Sequence[Member] = ()
        self._peerings: dict[str, _Peering] = {}

    def request(self, peer: str, members: Sequence[Member], now: float) -> Said:
        """Opens an exchange at monotonic time `now` (s)."""
        period_s = self._full_s * max(1.0, len(members) / _FULL_PEERS)
        due = now >= self._full_at or self._first_full > 0
        if due:
            self._first_full = max(0, self._first_full - 1)
            self._full_at = now + period_s
        chosen, said = self.say(peer, members, full=due)
        own = self._rumours[self._me]
        if not chosen and peer in own.known_to:  # else it would overtake what it belongs to
            me = own.member
            progress = pb.MemberProgress(start_ms=me.start_ms, heartbeat=me.heartbeat, step=me.step)
            said.progress.CopyFrom(progress)
        return chosen, said

    def heard(self, peer: str, came: Said, members: Sequence[Member]) -> None:
        """A message of `peer` has arrived, and was merged into `members`."""
        told, said = came
        self._refresh(members)
        if peer == self._me or peer not in self._rumours:
            return
        peering = self._peerings.setdefault(peer, _Peering())
        if 0 < said.acknowledged <= peering.used:
            for number in [n for n in peering.sent if n <= said.acknowledged]:
                self._delivered(peer, peering.sent.pop(number), arrived=True)
        else:
            self._lose(peer, peering)
            for known in self._rumours.values():
                known.known_to.discard(peer)
        for member in told:
            if (rumour := self._rumours.get(member.peer)) is None:  # one too many
                continue
            if _news(member) == _news(rumour.member):
                rumour.known_to.add(peer)
            elif peer not in rumour.under_way:
                rumour.owed_to.add(peer)
        if said.reset:
            peering.received = said.number
        elif peering.received:
            peering.received = max(peering.received, said.number)

    def failed(self, peer: str) -> None:
        """An exchange with `peer` failed: what was under way to and fro may be lost."""
        if peering := self._peerings.get(peer):
            self._lose(peer, peering)
            peering.received, peering.failed = 0, True

    def part(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """As many as a message holds: this peer, then in turn from where the last part ended."""
        queue = sorted(members, key=lambda c: (c.peer != self._me, c.peer <= self._cursor, c.peer))
        total_bytes = 0
        for index, member in enumerate(queue):
            total_bytes += _most_bytes(member)
            if total_bytes > _MOST_BYTES and index > 1:
                self._cursor = queue[index - 1].peer
                return tuple(queue[:index])
        return tuple(queue)

    def say(self, peer: str, members: Sequence[Member], *, full: bool) -> Said:
        self._refresh(members)
        if peer not in self._rumours:  # a stranger: nothing is tracked
            return self.part(members), pb.GossipMessage()
        peering = self._peerings.setdefault(peer, _Peering())
        if len(peering.sent) >= _UNACKNOWLEDGED:
            self._lose(peer, peering)
        reset, full = peering.reset, full or peering.failed
        peering.reset = peering.failed = False
        chosen = self.part(members if full else self._news_for(peer, reset))
        if chosen:
            peering.used += 1
            peering.sent[peering.used] = chosen
            for member in chosen:
                rumour = self._rumours[member.peer]
                rumour.under_way.add(peer)
                rumour.owed_to.discard(peer)
        said = pb.GossipMessage(acknowledged=peering.received, reset=reset, full=full)
        said.number = peering.used if chosen else 0
        return chosen, said

    def _news_for(self, peer: str, reset: bool) -> list[Member]:
        news = []
        for name, rumour in self._rumours.items():
            if name == self._me and reset:
                news.append(rumour.member)
                continue
            if peer in rumour.known_to or peer in rumour.under_way:
                continue
            if name == peer:  # knows itself best, except that it is held to be gone
                wanted = rumour.member.health is not Health.ALIVE
            else:
                wanted = name == self._me or rumour.spreads or peer in rumour.owed_to
            if wanted:
                news.append(rumour.member)
        return news

    def _refresh(self, members: Sequence[Member]) -> None:
        """Takes up what has changed: nobody is known to know it."""
        if members is self._taken_up:
            return
        self._taken_up = members
        if len(self._rumours) > len(members):  # one has given way to another
            for gone in self._rumours.keys() - {member.peer for member in members}:
                del self._rumours[gone]
                self._peerings.pop(gone, None)
        for member in members:
            if (rumour := self._rumours.get(member.peer)) is None:
                self._rumours[member.peer] = _Rumour(member, _TELL_LIFE)
            elif rumour.member is not member:
                if _news(rumour.member) != _news(member):
                    still = rumour.spreads and rumour.tell == _TELL_LIFE
                    life = still or _life(rumour.member) != _life(member)
                    rumour = _Rumour(member, _TELL_LIFE if life else _TELL_STATE)
                    self._rumours[member.peer] = rumour
                rumour.member = member

    def _delivered(self, peer: str, members: Iterable[Member], arrived: bool) -> None:
        for member in members:
            rumour = self._rumours.get(member.peer)
            if rumour is not None and _news(member) == _news(rumour.member):
                rumour.under_way.discard(peer)
                if arrived:
                    rumour.known_to.add(peer)

    def _lose(self, peer: str, peering: _Peering) -> None:
        for members in peering.sent.values():
            self._delivered(peer, members, arrived=False)
        peering.sent.clear()
        peering.reset = True


def with_progress(came: Said, sender: str, members: Iterable[Member]) -> tuple[Member, ...]:
    """The members in a message, and its sender's with the progress that it reports."""
    told, said = came
    known = next((member for member in members if member.peer == sender), None)
    if known is None or not said.HasField("progress") or known.start_ms != said.progress.start_ms:
        return told
    return (*told, replace(known, heartbeat=said.progress.heartbeat, step=said.progress.step))


_LIFE = ("start_ms", "incarnation", "health", "phase", "address", "unreachable", "idle")
_life = attrgetter(*_LIFE)
_news = attrgetter(*_LIFE, "digests", "step_s", "profile", "waited_for", "waited_at")


def _most_bytes(member: Member) -> int:
    """A bound of the member's size on the wire."""
    if (signed := member.signed) is not None:
        return 16 + len(member.peer.encode()) + len(signed.words) + len(signed.signature)
    names = (member.peer, member.address, member.waited_for, *member.unreachable, *member.idle)
    names_bytes = sum(len(name.encode()) + 3 for name in names)
    return 64 + names_bytes + len(member.profile) + 30 * len(member.digests)
