"""Decides who holds which block of samples: pure rules, whose effects are callables of their owner.

No peer leads. A peer says which free blocks it asks for to all that are alive, and has them when
all have answered and nothing stands against it:

- An answer holds what the other one has or asks for itself, what it knows to be used, and who else,
  as far as it knows, has a block that was asked for.
- Of two that ask for one block the heavier by rendezvous hashing gets it: the other withdraws as it
  answers. A block that somebody has is never given away.

So of two peers that know each other, or a third one, at most one has a block. A suspected peer is
not asked; it asks this one before it has anything, unless each suspects the other. The blocks of a
peer that died or left are free, from where it was known to be in them. One that lives and does not
answer is not waited for until it has answered again and again; what it holds counts.

How far a peer is in its blocks goes to all in the same messages. `UseKnown` says what has arrived,
and the train thread goes no further than a block beyond: that is all that a crash repeats.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from zlib import crc32

from murmuration.algorithms.draws import weight
from murmuration.worker.exchange.view import View
from murmuration.worker.leases import ledger as ledgers
from murmuration.worker.leases.ledger import EPOCH_BLOCKS, Block, Holding, LeaseNews
from murmuration.worker.membership import Health
from murmuration.worker.membership.swim import MAX_MEMBERS

_MOST_TOLD = 64  # streams that others are told of
_PATIENCE_S = 6.0  # for a peer that does not answer
_ANSWERS_OWED = 8  # by one that was passed over, before it is waited for
_MOST_STRANGERS = 16  # that others say hold blocks
_CHOICES_PER_PEER = 5  # to choose from, of the free blocks that stand first; alone: the first


@dataclass
class _Opened:
    stream: ledgers.SampleStream
    opening: int
    ahead: int
    epoch: int  # the earliest
    again: bool
    first: int = 0
    stop: int | None = None  # blocks up to it are given; None until all have answered once
    total: int = 0
    known: int = 0
    begun: set[Block] = field(default_factory=set)
    starved: bool = False
    ended: bool = False


@dataclass
class _Announcement:
    """On its way to all that are alive."""

    number: int
    news: LeaseNews
    asked: tuple[Block, ...]
    totals: dict[int, int]
    nothing_free: set[int]  # streams of which no block could be asked for
    answered: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)


class LeaseTable:
    """One peer's part. Args: ledger: what is used already, from a checkpoint; announce: begins to
    tell a peer; then `answered` or `unanswered`; silent: has membership probe a peer that has not
    answered, which nobody waits for from now on if True; differs: says once that a peer draws from
    other samples where this one draws from the stream; post: to the train thread."""

    def __init__(
        self,
        me: str,
        ledger: ledgers.Ledger,
        announce: Callable[[str, int, LeaseNews], None],
        silent: Callable[[str, bool], None],
        differs: Callable[[str, ledgers.SampleStream, ledgers.OpenedStream], None],
        post: Callable[[ledgers.LeaseMessage], None],
    ) -> None:
        self.ledger = ledger
        self._announce, self._silent, self._differs, self._post = announce, silent, differs, post
        self._me, self._start_ms, self._view = me, 0, View()
        self._said = self._announced = 0
        self._used_here: set[Block] = set()
        self._past: dict[int, int] = {}  # by stream: the epoch after the one that was exhausted
        self._others: dict[str, Holding] = {}
        self._opened: dict[int, _Opened] = {}
        self._drawn: dict[ledgers.OpenedStream, ledgers.SampleStream] = {}
        self._told: set[tuple[str, int]] = set()
        self._asked: dict[Block, None] = {}
        self._held: dict[Block, None] = {}
        self._announcement: _Announcement | None = None
        self._calling: set[str] = set()
        self._silent_since: dict[str, float] = {}
        self._owed: dict[str, int] = {}  # answers, of peers that are passed over
        self._news_to_tell = False

    @property
    def idle(self) -> bool:
        """Tells whether all that are alive know what this peer knows."""
        return self._announcement is None and not self._news_to_tell

    def tick(self, now: float) -> None:
        late = [each for each, since in self._silent_since.items() if now - since >= _PATIENCE_S]
        silent = {p: p not in self._owed for p in late if self._owed.get(p) != _ANSWERS_OWED}
        self._owed |= dict.fromkeys(silent, _ANSWERS_OWED)
        self._look_for_free()
        self._go_on()
        for each, passed_over in silent.items():  # at last: membership may change at once
            self._silent(each, passed_over)

    def on_view(self, view: View, start_ms: int) -> None:
        """Membership has changed. Args: start_ms: this peer's own."""
        self._view, self._start_ms = view, start_ms
        self._go_on()

    def answered(self, peer: str, number: int, news: LeaseNews) -> None:
        self._calling.discard(peer)
        self._silent_since.pop(peer, None)
        if (owed := self._owed.pop(peer, 0)) > 1:
            self._owed[peer] = owed - 1
        self._merge(news, peer)
        if self._announcement is not None and self._announcement.number == number:
            self._announcement.answered.add(peer)
        self._go_on()

    def unanswered(self, peer: str, now: float) -> None:
        """Has the peer told again at the next tick."""
        self._calling.discard(peer)
        self._silent_since.setdefault(peer, now)
        self._silent(peer, False)

    def answer(self, news: LeaseNews) -> LeaseNews:
        """Returns what to say to a peer that announces this."""
        asker, *_ = news.holdings
        for block in [block for block in asker.blocks if block in self._asked]:
            if _weight(block, asker.peer) > _weight(block, self._me):
                del self._asked[block]
        self._merge(news, asker.peer)
        wanted = set(asker.blocks)
        against = (each for each in self._live_holdings() if not wanted.isdisjoint(each.blocks))
        known = [each for each in against if each.peer != asker.peer]
        self._go_on()
        return self._news(known, wanted)

    def close(self) -> None:
        """Nothing more is drawn here: gives back what is held."""
        for stream in list(self._opened):
            self.close_stream(stream)
        if not self.idle:  # to all at once: earlier calls may wait for a silent peer
            self._announcement, self._news_to_tell = None, True
            self._calling.clear()
        self._go_on()

    def heard(self, message: ledgers.ShareMessage) -> None:
        """The train thread says something, by one of the methods below."""
        message.tell(self)
        self._look_for_free()
        self._go_on()

    def open_stream(
        self, stream: ledgers.SampleStream, opening: int, ahead: int, again: bool, first: int
    ) -> None:
        """Blocks are wanted of the epoch that the others are in.

        Args: opening: tells this time from those before; all answers have it. ahead: blocks beyond
        the one that is drawn from. again: of the epoch that was exhausted last. first: the block
        to begin with, if it is of that epoch."""
        self.close_stream(stream.id)
        self.ledger.done.setdefault(stream.id, ())  # whatever others have said of how many
        epoch = max(0, self._past.get(stream.id, 0) - again)
        self._opened[stream.id] = _Opened(stream, opening, ahead, epoch, again, first)
        self._tell_drawn(stream.id, stream.name, stream)

    def begin_with(self, stream: ledgers.SampleStream, epoch: int, item: int) -> None:
        """Compares what an epoch begins with, a hash, where it is read from the front. Others are
        told as of a stream."""
        items = [each for each, of in self._drawn.items() if each.id != of.id == stream.id]
        for each in items:
            del self._drawn[each]
        self._tell_drawn(item, f"{stream.name}\0{epoch}", stream)

    def _tell_drawn(self, number: int, name: str, stream: ledgers.SampleStream) -> None:
        self._drawn[ledgers.OpenedStream(number, crc32(name.encode()), stream.length or 0)] = stream
        self._news_to_tell = True
        for holding in self._live_holdings():
            self._compare(holding)

    def begin_block(self, block: Block) -> None:
        if opened := self._opened.get(block.stream):
            opened.begun.add(block)
            opened.starved = False

    def starve(self, stream: int) -> None:
        if opened := self._opened.get(stream):
            opened.starved = True

    def use(
        self, stream: int, total: int, cursors: Mapping[Block, int], done: Sequence[Block]
    ) -> None:
        """So many positions were used of the stream, so many of each block, and all of some."""
        self.ledger.merge({}, cursors)
        self._used_here |= cursors.keys()
        for block in done:
            self.ledger.finish(block.stream, block.number, block.number + 1)
        self._drop(done)
        if opened := self._opened.get(stream):
            opened.total = total
        self._news_to_tell = True

    def end_epoch(self, block: Block) -> None:
        """This block and those after it in its epoch do not exist."""
        end = (block.epoch + 1) * EPOCH_BLOCKS
        self.ledger.finish(block.stream, block.number, end)
        own = (b for b in (*self._asked, *self._held) if b.stream == block.stream)
        self._drop(b for b in own if block.number <= b.number < end)
        self._news_to_tell = True

    def close_stream(self, stream: int) -> None:
        """No more is drawn: what is held goes back."""
        if self._opened.pop(stream, None) is not None:
            self._drop(b for b in (*self._asked, *self._held) if b.stream == stream)
            self._news_to_tell = True

    def _drop(self, blocks: Iterable[Block]) -> None:
        for block in list(blocks):
            self._asked.pop(block, None)
            self._held.pop(block, None)
            if opened := self._opened.get(block.stream):
                opened.begun.discard(block)

    def _merge(self, news: LeaseNews, sender: str) -> None:
        """Each that is waited for speaks for itself: what others say of it counts for nothing."""
        self.ledger.merge(news.done, news.cursors)
        asked, members = {self._me, *self._awaited()} - self._owed.keys(), self._view.members
        for told in news.holdings:
            known, itself = self._others.get(told.peer), told.peer == sender
            if known is None:
                strangers = () if itself or told.peer in members else self._others.keys() - members
                new = len(self._others) < MAX_MEMBERS and len(strangers) < _MOST_STRANGERS
            else:
                new = (told.start_ms, told.sequence) > (known.start_ms, known.sequence) or itself
            if new and (itself or told.peer not in asked):
                held, wanted = (
                    tuple(each for each in blocks if each.number < self.ledger.horizon(each.stream))
                    for blocks in (told.held, told.asked)  # that there may be by now
                )
                self._others[told.peer] = holding = replace(told, held=held, asked=wanted)
                self._compare(holding)
        for block in list(self._held):
            mine = _weight(block, self._me)
            holders = (each.peer for each in self._live_holdings() if block in each.held)
            # Another that took it has held this peer for dead.
            if self.ledger.is_done(block) or any(_weight(block, each) > mine for each in holders):
                self._drop([block])
                opening = self._opened[block.stream].opening
                self._post(ledgers.LeaseRevoked(opening, block))
                self._news_to_tell = True

    def _compare(self, holding: Holding) -> None:
        """Tells of a peer that has other samples, under the name of a stream here."""
        shared = {each.id for each in holding.streams} & {each.id for each in self._drawn}
        # Streams that are told apart anyway begin as they like.
        drawn = [each for each, of in self._drawn.items() if each.id == of.id or of.id in shared]
        for theirs in holding.streams:
            alike = [each for each in drawn if each.name == theirs.name]
            as_long = [each for each in alike if each.length == theirs.length]
            for mine in (alike, as_long):
                told = {(holding.peer, self._drawn[each].id) for each in mine}
                apart = shared.isdisjoint(each.id for each in mine)
                if mine and apart and not self._told & told:
                    self._told |= told
                    self._differs(holding.peer, self._drawn[mine[-1]], theirs)

    def _live_holdings(self) -> list[Holding]:
        """The holdings of others that are not gone. An unknown peer counts: it may be new."""
        members = self._view.members
        return [
            each
            for each in self._others.values()
            if (member := members.get(each.peer)) is None
            or (member.live and member.start_ms <= each.start_ms)
        ]

    def _taken(self, stream: int) -> set[int]:
        own = (*self._asked, *self._held)
        others = (block for each in self._live_holdings() for block in each.blocks)
        return {block.number for block in (*own, *others) if block.stream == stream}

    def _awaited(self) -> list[str]:
        """The others that are asked: alive beyond doubt, and not out of reach of this one."""
        members, me = self._view.members, self._me
        out = {me, *(members[me].unreachable if me in members else ())}
        alive = (m for peer, m in members.items() if m.health is Health.ALIVE and peer not in out)
        return [member.peer for member in alive if me not in member.unreachable]

    def _lacks(self, opened: _Opened) -> int:
        mine = [b for b in (*self._asked, *self._held) if b.stream == opened.stream.id]
        return opened.ahead - sum(block not in opened.begun for block in mine)

    def _free(self, opened: _Opened, first: int) -> list[int]:
        if opened.stop is None:
            return []
        stream, taken = opened.stream, self._taken(opened.stream.id)
        found = self.ledger.free(stream.id, first, opened.stop, stream.blocks, taken)
        most = max(1, self._lacks(opened), _CHOICES_PER_PEER * len(self._awaited()))
        return list(islice(found, most))

    def _look_for_free(self) -> None:
        """Asks where there is something to ask for, or to tell that there is nothing."""
        for opened in self._opened.values():
            if opened.stop is None or opened.ended or (lacks := self._lacks(opened)) <= 0:
                continue
            in_vain = opened.starved and lacks == opened.ahead
            if in_vain or self._free(opened, opened.first):
                self._news_to_tell = True

    def _go_on(self) -> None:
        while True:
            if self._announcement is None and self._news_to_tell:
                self._begin()
            if (current := self._announcement) is None:
                return
            awaited = set(self._awaited()) - current.answered
            told = current.called & self._owed.keys()  # once; who is waited for, until it answers
            for peer in sorted(awaited - self._calling - told):
                self._calling.add(peer)
                current.called.add(peer)
                self._announce(peer, current.number, current.news)
            if awaited - self._owed.keys():
                return
            self._complete(current)

    def _begin(self) -> None:
        self._news_to_tell = False
        nothing_free = set()
        for opened in self._opened.values():
            if opened.stop is None or opened.ended:
                continue
            stream, lacks = opened.stream, self._lacks(opened)
            free = [Block(stream.id, number) for number in self._free(opened, opened.first)]
            if not stream.in_order:  # those that are this peer's by weight
                free.sort(key=lambda block: -_weight(block, self._me))
            chosen = sorted(free[: max(0, lacks)])
            if stream.in_order and chosen:
                opened.first = chosen[-1].number + 1
            if not chosen and lacks > 0:
                nothing_free.add(stream.id)
            self._asked |= dict.fromkeys(chosen)
        self._announced += 1
        totals = {stream: opened.total for stream, opened in self._opened.items()}
        news, asked = self._news((), ()), tuple(self._asked)
        self._announcement = _Announcement(self._announced, news, asked, totals, nothing_free)

    def _complete(self, done: _Announcement) -> None:
        self._announcement = None
        others = {block for each in self._live_holdings() for block in each.blocks}
        for block in done.asked:
            if block not in self._asked:
                continue
            del self._asked[block]
            if block not in others and not self.ledger.is_done(block):
                self._held[block] = None
                its, begin = self._opened[block.stream], self.ledger.cursors.get(block, 0)
                begin *= begin < its.stream.size(block)  # else it is not that of a block
                self._post(ledgers.BlockLeased(its.opening, block, begin))
            else:
                self._news_to_tell = True
        for stream, total in done.totals.items():
            if (opened := self._opened.get(stream)) is None:
                continue
            if total > opened.known:
                opened.known = total
                self._post(ledgers.UseKnown(opened.opening, stream, total))
            waits = opened.starved and not opened.ended and self._lacks(opened) == opened.ahead
            if opened.stop is None:
                self._set_epoch(opened)
                self._news_to_tell = True
            elif stream in done.nothing_free and waits and not self._free(opened, opened.first):
                opened.ended = True
                self._past[stream] = opened.epoch + 1
                start = opened.epoch * EPOCH_BLOCKS
                behind = opened.stream.in_order and self._free(opened, start)
                self._post(ledgers.Exhausted(opened.opening, stream, bool(behind)))
        self._look_for_free()

    def _set_epoch(self, opened: _Opened) -> None:
        """The latest that anybody is in, or the next where nothing is left in it."""
        stream = opened.stream
        taken = self._taken(stream.id)
        epoch = max(opened.epoch, self.ledger.last_epoch(stream.id, taken))
        start, stop = epoch * EPOCH_BLOCKS, (epoch + 1) * EPOCH_BLOCKS
        left = self.ledger.free(stream.id, start, stop, stream.blocks, taken)
        if not opened.again and next(left, None) is None:
            epoch, start, stop = epoch + 1, stop, stop + EPOCH_BLOCKS
        opened.epoch, opened.stop = epoch, stop
        if stream.in_order:
            opened.first = max(start, opened.first) if opened.first < stop else start
        if stream.blocks is not None:
            self.ledger.finish(stream.id, start + stream.blocks, stop)

    def _news(self, others: Iterable[Holding], wanted: Iterable[Block]) -> LeaseNews:
        """This peer's own, with these holdings, and the cursors of wanted blocks."""
        self._said += 1
        drawn = tuple(self._drawn)[-_MOST_TOLD:]
        held, asked = tuple(self._held), tuple(self._asked)
        mine = Holding(self._me, self._start_ms, self._said, held, asked, drawn)
        cursors = self.ledger.cursors
        self._used_here &= cursors.keys()
        known = {block: cursors[block] for block in cursors if block in self._used_here}
        known |= {block: cursors[block] for block in wanted if block in cursors}
        return LeaseNews((mine, *others), self.ledger.told({each.id for each in drawn}), known)


def _weight(block: Block, peer: str) -> int:
    return weight(f"block {block.stream} {block.number}".encode(), peer)
