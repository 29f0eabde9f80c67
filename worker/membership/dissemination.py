"""What to tell whom: an exchange carries only what the other side is not known to know.

Three kinds of news, by how they travel:

- Health, incarnation, epoch, address and phase of a peer, whom it does not reach, and the digests
  of its state: at once, with every exchange, whoever's they are, until `_TELL_LIFE` others, of
  digests `_TELL_STATE`, are known to have them: who said the same counts too. So much spreads
  through a swarm by itself, and one of up to 13 is told of life to the last peer; whom a rumour
  misses has it from its subject, which tells everyone itself, or from a full exchange. Whoever is
  suspected or worse hears it in any case, for only that peer can refute; and whoever says what is
  outdated is set right.
- Step and heartbeat change with every step of everyone, and nothing decides by the step of others:
  whoever takes part in a round, joins or repairs goes by phases and digests. They are no news, and
  nobody relays them for their own sake: a request says those of its sender in a few bytes, and each
  card that travels for another reason holds the newest.
- All that is known, both ways: in the first `_FIRST_FULL` exchanges of a life, after an exchange
  that failed, and once per `full_s` with somebody; this repairs whatever was lost. Of more than
  `_MOST_BYTES` the next part each time, and in swarms above `_FULL_PEERS` in proportion less often,
  so that this takes no more than a constant rate.

What has arrived is known by numbers. A message that carries cards has the next number of its
sender for that receiver, and every message acknowledges the highest number received: all up to it
have arrived, and what is under way is not said twice. An answer's fate is known only to the
asker. If that one did not get it, its exchange has failed, and from then on it acknowledges 0,
which means "count on nothing", until a message begins the account anew. A restarted process
acknowledges 0 too, and knows by numbers it has never used that it is taken for its former life.

Ref: rumour mongering with feedback and counters, and anti-entropy behind it (Demers et al. 1987).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from worker.membership.member import Health, Member

_TELL_LIFE = 12
_TELL_STATE = 4
_FULL_PEERS = 32
_FIRST_FULL = 3
_MOST_BYTES = 40 * 1024  # of cards in one message: a call takes 64 KiB


@dataclass(frozen=True)
class Progress:
    """The sender's own heartbeat and step; the rest of its card is as the receiver has it."""

    epoch: int
    heartbeat: int
    step: int


@dataclass(frozen=True)
class GossipMessage:
    """One message of an exchange.

    `number` is 0 when there are no cards; `acknowledged` is 0 when the receiver is to count on
    nothing; `anew`: nor does the sender, and its numbers count from this one on. `full` asks for a
    full answer.
    """

    members: tuple[Member, ...] = ()
    progress: Progress | None = None
    number: int = 0
    acknowledged: int = 0
    anew: bool = False
    full: bool = False


@dataclass
class _Rumour:
    """The newest of one card: who has it for sure, to whom it is under way, who is behind."""

    member: Member
    tell: int
    known_to: set[str] = field(default_factory=set)
    under_way: set[str] = field(default_factory=set)
    owed_to: set[str] = field(default_factory=set)

    @property
    def hot(self) -> bool:
        return len(self.known_to) + len(self.under_way) < self.tell


@dataclass
class _Peering:
    """With one peer: numbers used and received, and the cards of each number under way."""

    used: int = 0
    received: int = 0
    anew: bool = True  # what was sent may be lost, or nothing was sent yet
    failed: bool = False
    sent: dict[int, tuple[Member, ...]] = field(default_factory=dict)


class Dissemination:
    """Composes what one peer says, and keeps account of what the others know.

    Every call takes `members`, everyone known, this peer's own among them, by name.

    Args:
        me: this peer.
        full_s: between two full exchanges, in swarms of up to 32.
    """

    def __init__(self, me: str, full_s: float) -> None:
        self._me, self._full_s = me, full_s
        self._full_at = math.inf
        self._first_full = _FIRST_FULL
        self._cursor = ""
        self._rumours: dict[str, _Rumour] = {}
        self._links: dict[str, _Peering] = {}

    def request(self, peer: str, members: Sequence[Member], now: float) -> GossipMessage:
        """Opens an exchange at monotonic time `now` (s)."""
        period_s = self._full_s * max(1.0, len(members) / _FULL_PEERS)
        due = now >= self._full_at or self._first_full > 0
        if due:
            self._first_full = max(0, self._first_full - 1)
            self._full_at = now + period_s
        said = self._say(peer, members, full=due)
        own = self._rumours[self._me]
        if said.members or peer not in own.known_to:
            return said  # a heartbeat must not overtake the card that it belongs to
        me = own.member
        return replace(said, progress=Progress(me.epoch, me.heartbeat, me.step))

    def answer(self, peer: str, asked: GossipMessage, members: Sequence[Member]) -> GossipMessage:
        """Answers a request that was `heard`."""
        return self._say(peer, members, full=asked.full)

    def heard(self, peer: str, said: GossipMessage, members: Sequence[Member]) -> None:
        """A message of `peer` has arrived, and was merged into `members`."""
        self._refresh(members)
        if peer == self._me or peer not in self._rumours:
            return
        link = self._links.setdefault(peer, _Peering())
        if 0 < said.acknowledged <= link.used:
            for number in [n for n in link.sent if n <= said.acknowledged]:
                self._settle(peer, link.sent.pop(number), arrived=True)
        else:
            self._forget(peer)
        for member in said.members:
            rumour = self._rumours[member.peer]
            if _news(member) == _news(rumour.member):
                rumour.known_to.add(peer)
            elif peer not in rumour.under_way:
                rumour.owed_to.add(peer)
        if said.anew:
            link.received = said.number
        elif link.received:
            link.received = max(link.received, said.number)

    def failed(self, peer: str) -> None:
        """An exchange with `peer` failed: what was under way to and fro may be lost."""
        if link := self._links.get(peer):
            self._lose(peer, link)
            link.received, link.failed = 0, True

    def part(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """As many as a message holds: one's own, then in turn from where the last part ended."""
        ordered = sorted(
            members, key=lambda c: (c.peer != self._me, c.peer <= self._cursor, c.peer)
        )
        total_bytes = 0
        for index, member in enumerate(ordered):
            total_bytes += _most_bytes(member)
            if total_bytes > _MOST_BYTES and index > 1:
                self._cursor = ordered[index - 1].peer
                return tuple(ordered[:index])
        return tuple(ordered)

    # --------------------------------------------------------------------------------- inside

    def _say(self, peer: str, members: Sequence[Member], full: bool) -> GossipMessage:
        self._refresh(members)
        if peer not in self._rumours:  # a stranger: no account is kept
            return GossipMessage(self.part(members))
        link = self._links.setdefault(peer, _Peering())
        anew, full = link.anew, full or link.failed
        link.anew = link.failed = False
        chosen = self.part(members if full else self._news_for(peer, anew))
        if chosen:
            link.used += 1
            link.sent[link.used] = chosen
            for member in chosen:
                rumour = self._rumours[member.peer]
                rumour.under_way.add(peer)
                rumour.owed_to.discard(peer)
        return GossipMessage(
            members=chosen,
            number=link.used if chosen else 0,
            acknowledged=link.received,
            anew=anew,
            full=full,
        )

    def _news_for(self, peer: str, anew: bool) -> list[Member]:
        news = []
        for name, rumour in self._rumours.items():
            if name == self._me and anew:
                news.append(rumour.member)
                continue
            if peer in rumour.known_to or peer in rumour.under_way:
                continue
            if name == peer:  # knows itself best, except that it is held to be gone
                wanted = rumour.member.health is not Health.ALIVE
            else:
                wanted = name == self._me or rumour.hot or peer in rumour.owed_to
            if wanted:
                news.append(rumour.member)
        return news

    def _refresh(self, members: Iterable[Member]) -> None:
        """Takes up what has changed since: nobody is known to know it."""
        for member in members:
            rumour = self._rumours.get(member.peer)
            if rumour is None:
                self._rumours[member.peer] = _Rumour(member, _TELL_LIFE)
            elif rumour.member is not member:
                if _news(rumour.member) != _news(member):
                    still = rumour.hot and rumour.tell == _TELL_LIFE
                    life = still or _life(rumour.member) != _life(member)
                    rumour = _Rumour(member, _TELL_LIFE if life else _TELL_STATE)
                    self._rumours[member.peer] = rumour
                rumour.member = member

    def _settle(self, peer: str, members: Iterable[Member], arrived: bool) -> None:
        for member in members:
            rumour = self._rumours[member.peer]
            if _news(member) == _news(rumour.member):
                rumour.under_way.discard(peer)
                if arrived:
                    rumour.known_to.add(peer)

    def _lose(self, peer: str, link: _Peering) -> None:
        for members in link.sent.values():
            self._settle(peer, members, arrived=False)
        link.sent.clear()
        link.anew = True

    def _forget(self, peer: str) -> None:
        self._lose(peer, self._links[peer])
        for rumour in self._rumours.values():
            rumour.known_to.discard(peer)


def with_progress(
    said: GossipMessage, sender: str, members: Iterable[Member]
) -> tuple[Member, ...]:
    """The cards that a message amounts to: its own, and its sender's brought forward."""
    if (progress := said.progress) is not None:
        for member in members:
            if member.peer == sender and member.epoch == progress.epoch:
                return (
                    *said.members,
                    replace(member, heartbeat=progress.heartbeat, step=progress.step),
                )
    return said.members


def _life(member: Member) -> tuple[object, ...]:
    return (
        member.epoch,
        member.incarnation,
        member.health,
        member.phase,
        member.address,
        member.unreachable,
    )


def _news(member: Member) -> tuple[object, ...]:
    return (*_life(member), member.digests, member.step_s, member.profile)


def _most_bytes(member: Member) -> int:
    """A bound of the card's size on the wire."""
    names = sum(
        len(name.encode()) + 3 for name in (member.peer, member.address, *member.unreachable)
    )
    return 64 + names + len(member.profile) + 30 * len(member.digests)
