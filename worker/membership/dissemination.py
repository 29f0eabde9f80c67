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

from worker.membership.member import Card, Health

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
class Said:
    """One message of an exchange.

    `number` is 0 when there are no cards; `acknowledged` is 0 when the receiver is to count on
    nothing; `anew`: nor does the sender, and its numbers count from this one on. `full` asks for a
    full answer.
    """

    cards: tuple[Card, ...] = ()
    progress: Progress | None = None
    number: int = 0
    acknowledged: int = 0
    anew: bool = False
    full: bool = False


@dataclass
class _Rumour:
    """The newest of one card: who has it for sure, to whom it is under way, who is behind."""

    card: Card
    tell: int
    known_to: set[str] = field(default_factory=set)
    under_way: set[str] = field(default_factory=set)
    owed_to: set[str] = field(default_factory=set)

    @property
    def hot(self) -> bool:
        return len(self.known_to) + len(self.under_way) < self.tell


@dataclass
class _Link:
    """With one peer: numbers used and received, and the cards of each number under way."""

    used: int = 0
    received: int = 0
    anew: bool = True  # what was sent may be lost, or nothing was sent yet
    failed: bool = False
    sent: dict[int, tuple[Card, ...]] = field(default_factory=dict)


class Deltas:
    """Composes what one peer says, and keeps account of what the others know.

    Every call takes `cards`, everyone known, this peer's own among them, by name.

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
        self._links: dict[str, _Link] = {}

    def request(self, peer: str, cards: Sequence[Card], now: float) -> Said:
        """Opens an exchange at monotonic time `now` (s)."""
        period_s = self._full_s * max(1.0, len(cards) / _FULL_PEERS)
        due = now >= self._full_at or self._first_full > 0
        if due:
            self._first_full = max(0, self._first_full - 1)
            self._full_at = now + period_s
        said = self._say(peer, cards, full=due)
        own = self._rumours[self._me]
        if said.cards or peer not in own.known_to:
            return said  # a heartbeat must not overtake the card that it belongs to
        me = own.card
        return replace(said, progress=Progress(me.epoch, me.heartbeat, me.step))

    def answer(self, peer: str, asked: Said, cards: Sequence[Card]) -> Said:
        """Answers a request that was `heard`."""
        return self._say(peer, cards, full=asked.full)

    def heard(self, peer: str, said: Said, cards: Sequence[Card]) -> None:
        """A message of `peer` has arrived, and was merged into `cards`."""
        self._refresh(cards)
        if peer == self._me or peer not in self._rumours:
            return
        link = self._links.setdefault(peer, _Link())
        if 0 < said.acknowledged <= link.used:
            for number in [n for n in link.sent if n <= said.acknowledged]:
                self._settle(peer, link.sent.pop(number), arrived=True)
        else:
            self._forget(peer)
        for card in said.cards:
            rumour = self._rumours[card.peer]
            if _news(card) == _news(rumour.card):
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

    def part(self, cards: Iterable[Card]) -> tuple[Card, ...]:
        """As many as a message holds: one's own, then in turn from where the last part ended."""
        ordered = sorted(cards, key=lambda c: (c.peer != self._me, c.peer <= self._cursor, c.peer))
        total_bytes = 0
        for index, card in enumerate(ordered):
            total_bytes += _most_bytes(card)
            if total_bytes > _MOST_BYTES and index > 1:
                self._cursor = ordered[index - 1].peer
                return tuple(ordered[:index])
        return tuple(ordered)

    # --------------------------------------------------------------------------------- inside

    def _say(self, peer: str, cards: Sequence[Card], full: bool) -> Said:
        self._refresh(cards)
        if peer not in self._rumours:  # a stranger: no account is kept
            return Said(self.part(cards))
        link = self._links.setdefault(peer, _Link())
        anew, full = link.anew, full or link.failed
        link.anew = link.failed = False
        chosen = self.part(cards if full else self._news_for(peer, anew))
        if chosen:
            link.used += 1
            link.sent[link.used] = chosen
            for card in chosen:
                rumour = self._rumours[card.peer]
                rumour.under_way.add(peer)
                rumour.owed_to.discard(peer)
        return Said(
            cards=chosen,
            number=link.used if chosen else 0,
            acknowledged=link.received,
            anew=anew,
            full=full,
        )

    def _news_for(self, peer: str, anew: bool) -> list[Card]:
        news = []
        for name, rumour in self._rumours.items():
            if name == self._me and anew:
                news.append(rumour.card)
                continue
            if peer in rumour.known_to or peer in rumour.under_way:
                continue
            if name == peer:  # knows itself best, except that it is held to be gone
                wanted = rumour.card.health is not Health.ALIVE
            else:
                wanted = name == self._me or rumour.hot or peer in rumour.owed_to
            if wanted:
                news.append(rumour.card)
        return news

    def _refresh(self, cards: Iterable[Card]) -> None:
        """Takes up what has changed since: nobody is known to know it."""
        for card in cards:
            rumour = self._rumours.get(card.peer)
            if rumour is None:
                self._rumours[card.peer] = _Rumour(card, _TELL_LIFE)
            elif rumour.card is not card:
                if _news(rumour.card) != _news(card):
                    still = rumour.hot and rumour.tell == _TELL_LIFE
                    life = still or _life(rumour.card) != _life(card)
                    rumour = _Rumour(card, _TELL_LIFE if life else _TELL_STATE)
                    self._rumours[card.peer] = rumour
                rumour.card = card

    def _settle(self, peer: str, cards: Iterable[Card], arrived: bool) -> None:
        for card in cards:
            rumour = self._rumours[card.peer]
            if _news(card) == _news(rumour.card):
                rumour.under_way.discard(peer)
                if arrived:
                    rumour.known_to.add(peer)

    def _lose(self, peer: str, link: _Link) -> None:
        for cards in link.sent.values():
            self._settle(peer, cards, arrived=False)
        link.sent.clear()
        link.anew = True

    def _forget(self, peer: str) -> None:
        self._lose(peer, self._links[peer])
        for rumour in self._rumours.values():
            rumour.known_to.discard(peer)


def with_progress(said: Said, sender: str, cards: Iterable[Card]) -> tuple[Card, ...]:
    """The cards that a message amounts to: its own, and its sender's brought forward."""
    if (progress := said.progress) is not None:
        for card in cards:
            if card.peer == sender and card.epoch == progress.epoch:
                return (
                    *said.cards,
                    replace(card, heartbeat=progress.heartbeat, step=progress.step),
                )
    return said.cards


def _life(card: Card) -> tuple[object, ...]:
    return (card.epoch, card.incarnation, card.health, card.phase, card.address, card.apart)


def _news(card: Card) -> tuple[object, ...]:
    return (*_life(card), card.digests, card.step_s, card.profile)


def _most_bytes(card: Card) -> int:
    """A bound of the card's size on the wire."""
    names = sum(len(name.encode()) + 3 for name in (card.peer, card.address, *card.apart))
    return 64 + names + len(card.profile) + 30 * len(card.digests)
