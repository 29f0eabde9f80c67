"""The evidence against a peer: others' word, its lost probes here, rounds that waited in vain.

Ref: local health aware suspicion (Lifeguard, arXiv:1707.00788, section IV-B). Difference: each
accuser has failed to reach the accused itself (docs/adr/0018), and the time counts from the first.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from murmuration.worker.membership import MAX_UNREACHABLE, Member

CONFIRMATIONS = 3  # accusers beyond the first that shorten the time all the way
_MOST_ACCUSERS = 16  # that are kept by name
_NEVER = -math.inf


@dataclass
class Case:
    life: tuple[int, int]  # its start and incarnation
    since: float  # when it was first accused (s)
    accusers: set[str] = field(default_factory=set)  # this peer too, once its probes have failed
    left: bool = False  # the accusers say that it has left, and not that it is dead
    failed: bool = False  # this peer's own probes have all failed
    ended: bool = False  # its time was up


class Suspicions:
    """Args: pause_s: after an answer of the accused, before hearsay makes this peer probe again."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self.cases: dict[str, Case] = {}  # in the order in which they were accused
        self.answered_at: dict[str, float] = {}
        self.words: dict[str, Counter[str]] = {}  # by peer, how often each accuser has said so

    def accuse(self, peer: str, life: tuple[int, int], accuser: str | None, now: float) -> Case:
        """Somebody, who may be this peer, says that this life of a peer has ended."""
        if (case := self.cases.get(peer)) is None or case.life < life:
            case = self.cases[peer] = Case(life, now)
        if accuser is not None and len(case.accusers) < _MOST_ACCUSERS:
            case.accusers.add(accuser)
        return case

    def count(self, peer: str, accuser: str) -> None:
        words = self.words.setdefault(peer, Counter())
        if accuser in words or len(words) < _MOST_ACCUSERS:
            words[accuser] += 1

    def rests(self, peer: str, now: float) -> bool:
        return now < self.answered_at.get(peer, _NEVER) + self._pause_s

    def answered(self, peer: str, now: float) -> None:
        if self.cases.pop(peer, None) is not None:
            self.answered_at[peer] = now

    def end_due(self, now: float, least_s: float, most_s: float) -> list[str]:
        """Ends the cases whose time is up, after this peer's own probes have failed."""
        due = []
        for peer, case in self.cases.items():
            further = min(CONFIRMATIONS, max(0, len(case.accusers) - 1))
            share = math.log(further + 1) / math.log(CONFIRMATIONS + 1)
            time_s = max(least_s, most_s - share * (most_s - least_s))
            if case.failed and not case.ended and now >= case.since + time_s:
                case.ended = True
                due.append(peer)
        return due


_MISSED = 3  # probes running; fewer are chance on a link that loses messages
_MOST_FLAPS = 4  # after which a mark stays no longer than after as many


@dataclass
class _PeerLink:
    missed_since: float
    missed: int = 0
    unreachable: bool = False
    flaps: int = 0  # how often it was unreachable and then reachable again
    answers_since: float | None = None


class Reachability:
    """Judges by the probes of this peer. Args: brief_s: shorter cuts are ignored. An unreachable
    peer stays so until it has answered for twice that long, or 4 s, which doubles each time."""

    def __init__(self, brief_s: float) -> None:
        self._brief_s = brief_s
        self.links: dict[str, _PeerLink] = {}  # of peers that live on

    def answered(self, peer: str, now: float) -> None:
        if (link := self.links.get(peer)) is None:
            return
        link.missed = 0
        link.answers_since = now if link.answers_since is None else link.answers_since
        steady_s = 2 * max(self._brief_s, _STANDS_S) * 2 ** min(link.flaps, _MOST_FLAPS)
        if link.unreachable and now - link.answers_since >= steady_s:
            link.unreachable, link.flaps = False, link.flaps + 1

    def missed(self, peer: str, probes: int, now: float) -> None:
        """It lives, though it has answered none of these."""
        link = self.links.setdefault(peer, _PeerLink(now))
        link.missed_since = link.missed_since if link.missed else now
        link.missed, link.answers_since = link.missed + probes, None
        if link.missed >= _MISSED and now - link.missed_since >= self._brief_s:
            link.unreachable = True

    @property
    def in_question(self) -> list[str]:
        """Peers to probe again soon: they may be unreachable, or no longer so."""
        return [
            peer
            for peer, link in self.links.items()
            if (link.answers_since is not None if link.unreachable else link.missed > 0)
        ]

    @property
    def unreachable(self) -> tuple[str, ...]:
        found = sorted(peer for peer, link in self.links.items() if link.unreachable)
        return tuple(found[:MAX_UNREACHABLE])


_MARKED_S = 60.0  # doubles each time
_MOST_DOUBLINGS = 3
_OWN_DOUBLINGS = 2
_FORGIVEN_S = 600.0  # after a mark has ended, the next one is a first one
_REMEMBERED = 8  # rounds of a fragment
STRIKES = 3
_STANDS_S = 2.0  # a word of a link stands twice as long, and doubles likewise (`Reachability`)
_IDLE_STANDS_S = 15.0  # a word of an idle peer stands four times as long (`_MARKED_S`)
_MOST_WORDS = 4096
_LIVES_S = 30.0  # in which a peer that has begun again so often does it again and again


@dataclass
class _Mark:
    until: float
    times: int
    stands: bool = True


class IdlePeers:
    """The peers that this one has waited for in vain, not long ago; itself (`me`) where others wait
    for it, and then for longer at once, since nothing is lost by it."""

    def __init__(self, me: str = "") -> None:
        self._me = me
        self._marks: dict[str, _Mark] = {}
        self._begun: dict[str, deque[float]] = {}
        self._words: dict[tuple[str, int, str, str], tuple[float, int]] = {}  # since; taken back
        self._late: dict[int | str, deque[Counter[str]]] = {}

    def round_ended(self, series: int | str, late: Sequence[str], now: float) -> None:
        """A round is over. Args: series: whose last eight rounds count: a fragment or a partner;
        late: the peers that it has waited for in vain, once for each part of theirs."""
        recent = self._late.setdefault(series, deque(maxlen=_REMEMBERED))
        recent.append(Counter(late))
        for peer in set(late):
            times = sum(each[peer] for each in recent)
            # One that has been marked not long ago is waited for once more.
            if peer in self._marks or times >= STRIKES:
                self.waited_for(peer, now)

    def hear(self, known: Member, heard: Member, now: float) -> None:
        """Where a peer has another life, those have waited that were about to hear from it. Where
        it takes back too soon whom it does without, shards of others have moved there and back. In
        an earlier phase it is waited for once more. A full list leaves out its last ones."""
        peer, life = heard.peer, heard.start_ms
        back = life != known.start_ms or heard.phase < known.phase
        for kind in ("unreachable", "idle"):
            before, after = ({*getattr(member, kind)} for member in (known, heard))
            for of in before ^ after:
                at, times = self._words.pop((peer, life, kind, of), (_NEVER, 0))
                stands_s = _IDLE_STANDS_S if kind == "idle" else _STANDS_S * 2**times
                full = len(after) == MAX_UNREACHABLE and of > max(after)
                back |= of in before and now < at + stands_s and not full
                self._words[peer, life, kind, of] = now, min(times + (of in before), _MOST_FLAPS)
        if not back:
            return
        begun = self._begun.setdefault(peer, deque(maxlen=STRIKES))
        begun.append(now)
        if len(begun) == STRIKES and now - begun[0] <= _LIVES_S:
            self.waited_for(peer, now)

    def waited_for(self, peer: str, now: float) -> None:
        """For a while no round waits for the peer. A new start ends that no sooner: else a peer
        could make every round wait."""
        if (mark := self._marks.get(peer)) is None or not mark.stands:
            times = (_OWN_DOUBLINGS if peer == self._me else 0) if mark is None else mark.times
            self._marks[peer] = _Mark(now + _MARKED_S * 2 ** min(times, _MOST_DOUBLINGS), times + 1)

    def gone(self, peer: str) -> None:
        """Its links are judged afresh, once it lives again, and words of them stand briefly."""
        self._words = {word: at for word, at in self._words.items() if word[-1] != peer}

    def tick(self, now: float) -> None:
        for peer, mark in [*self._marks.items()]:
            mark.stands = now < mark.until
            if now > mark.until + _FORGIVEN_S:
                del self._marks[peer]
        self._begun = {p: at for p, at in self._begun.items() if now - at[-1] <= _LIVES_S}
        while len(self._words) > _MOST_WORDS:
            del self._words[next(iter(self._words))]

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(sorted(p for p, mark in self._marks.items() if mark.stands))[:MAX_UNREACHABLE]


_VERSIONS = 64  # of a late partner, which skips those that it comes too late for
_MOST_SAID = 8  # late partners of each member


class Waits:
    """Who was late for rounds in pairs, by what each member says of itself, and whether by itself.

    A peer meets another only now and then. So all say whom they have waited for too long, and at
    which version that one was when their round began. A peer that stands still once keeps several
    waiting: at one version, that is once. Each other's word counts once.

    A peer that was kept waiting comes late itself. So nobody is late by itself while another was
    late as often for which it has waited, or for which that one has. Args: me: this peer."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._members: Mapping[str, Member] = {}
        self._said: dict[str, deque[tuple[str, int]]] = {}

    def on_members(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._said = {who: said for who, said in self._said.items() if who in members}
        for who, member in members.items():
            if member.waited_for and who != self._me:
                self.says(who, member.waited_for, member.waited_at)

    def says(self, who: str, peer: str, at: int) -> bool:
        """This member has waited for that peer, then at that version. Returns whether it is new."""
        said = self._said.setdefault(who, deque(maxlen=_MOST_SAID))
        if new := (peer, at) not in said:
            said.append((peer, at))
        return new

    def known_late(self, peer: str) -> bool:
        """Tells whether others say that it was late in recent rounds."""
        return any(self._at(who, peer) for who in self._said if who != self._me)

    def often_late(self) -> list[str]:
        """The peers that were late three times, by themselves, and for this one too; but none that
        it does without already."""
        me = self._members.get(self._me)
        waited_for = {peer for peer, _ in self._said.get(self._me, ()) if self._at(self._me, peer)}
        new = sorted(waited_for.difference(me.idle if me else ()))
        return [peer for peer in new if self._times(peer) >= STRIKES and self.by_itself(peer)]

    def by_itself(self, peer: str) -> bool:
        others = self._kept_by(peer) - {peer, self._me}
        return all(self._much(each) < self._much(peer) for each in others)

    def _times(self, peer: str) -> int:
        """In how many of its last rounds the peer was late."""
        own, found = self._at(self._me, peer), set[int]()
        for who in self._said.keys() - {self._me, peer}:
            found |= {*sorted(self._at(who, peer) - found - own)[:1]}
        return len(found | own)

    def _much(self, peer: str) -> int:
        """How often members have waited for the peer, each three times at most."""
        return sum(min(STRIKES, len(self._at(who, peer, 2 * _VERSIONS))) for who in self._said)

    def _kept_by(self, peer: str) -> set[str]:
        """For whom the peer has waited, and those for whom they have, and so on."""
        found, new = set[str](), {peer}
        while new:
            said = {(who, each) for who in new for each, _ in self._said.get(who, ())}
            new = {each for who, each in said if self._at(who, each, 2 * _VERSIONS)} - found
            found |= new
        return found

    def _at(self, who: str, peer: str, lately: int = _VERSIONS) -> set[int]:
        """The versions at which this member has waited for that peer."""
        said = self._said.get(who, ())
        last = self._members[peer].version if peer in self._members else 0
        return {at for each, at in said if each == peer and last - lately < at <= last + 1}
