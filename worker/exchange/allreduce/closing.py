"""The shards that a peer reduces: whose contributions they wait for, and when their means close.

A shard closes once: when everyone awaited has contributed, or when a quorum has and the grace is
over (`Patience`). A successor takes it over when it sees no peer before itself in the shard's order
that may reduce it, and hands it back as long as it has not closed it.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from statistics import median, quantiles
from typing import TYPE_CHECKING

from murmuration.algorithms import robust
from murmuration.worker.exchange.view import Group, ShardKey, ShardRange, View, alike

if TYPE_CHECKING:
    from murmuration.algorithms.plan import Plan
    from murmuration.worker.exchange.round_context import Context
    from murmuration.worker.wire import Incoming

KEPT_ROUNDS = 1  # closed rounds of a fragment that are kept for late peers
_UNHEARD = 2  # times this round's limit, for that of the round before, if this peer was not in it
_LEFT_ROUNDS = 16  # in which something may be left of a mean: of 4 bits, 0.55 of it a round
_NEARLY = 0.9  # of a factor: others may have announced another norm to its reducer
SILENT_S = 2.0  # that a peer which does not answer is waited for
OVERDUE = 1.5  # times what a reducer waits for late peers
_USUAL_ROUNDS = 3  # that late peers are waited for
_LEAST_GRACE_S = 5.0
_LEAST_AGAIN_S = 1.5  # the same, once `_SPARED` of `_SPARED_OF` rounds have needed more
_SPARED, _SPARED_OF = 2, 32
_REMEMBERED = 8  # rounds
_KNOWN = 4  # rounds, before which nobody is taken to be slow
_PUNCTUAL = 0.25  # of those awaited
_SPREADS = 4.0  # from the first quarter to the quorum, in which all that are as fast have come
_WAITING = 0.05  # of a round's time, for those that are slower
_FEW_JOINERS = 4


class Patience:
    """How long late peers are waited for: as long as three usual rounds take, and briefly where
    inner steps go by speed (docs/adr/0039, 0043).

    Args: most_s: the longest; also of a fragment of which no round is known."""

    def __init__(self, most_s: float, plan: "Plan") -> None:
        self._most_s, self._brief = most_s, plan.waits_for_nobody
        self._share = _WAITING + 0.5 * plan.overlap_steps / plan.inner_steps
        self._ended: dict[int, tuple[int, float]] = {}
        self._took_s: dict[int, deque[float]] = {}
        self._spreads_s: dict[int, deque[float]] = {}
        self._long: dict[int, deque[int]] = {}

    def has_quorum(self, fragment: int, round_: int, now: float, spread_s: float = 0.0) -> None:
        """Most contributions to a shard are here at monotonic time `now` (s); `spread_s` ago the
        first quarter was."""
        ended = self._ended.get(fragment)
        if ended is not None and ended[0] == round_ - 1:
            del self._ended[fragment]
            self._took_s.setdefault(fragment, deque(maxlen=_REMEMBERED)).append(now - ended[1])
            self._spreads_s.setdefault(fragment, deque(maxlen=_REMEMBERED)).append(spread_s)

    def ends(self, fragment: int, round_: int, now: float) -> None:
        ended = self._ended.get(fragment)
        if ended is None or ended[0] != round_:
            self._ended[fragment] = round_, now

    def waited_for_reducers(self, fragment: int, round_: int, now: float, seconds: float) -> None:
        """The last mean of a round is here, this many seconds after half of them."""
        self.waited(fragment, round_, seconds / OVERDUE)
        ended = self._ended.get(fragment)
        if ended is not None and ended[0] == round_ and seconds > 0:
            self._ended[fragment] = round_, min(now, ended[1] + seconds)

    def waited(self, fragment: int, round_: int, seconds: float) -> None:
        """A round has waited this long for late peers, whether they have come or not."""
        long = self._long.setdefault(fragment, deque(maxlen=_SPARED))
        if round_ not in long and seconds > self.habit_s(fragment):
            long.append(round_)

    def usual_s(self, fragment: int, round_: int, peers: int) -> float:
        """Three usual rounds, from the quorum on; of two peers nobody knows which one is slow."""
        long = [at for at in self._long.get(fragment, ()) if at < round_ < at + _SPARED_OF]
        spares = peers <= 2 or len(long) < _SPARED
        return self.habit_s(fragment, _LEAST_GRACE_S if spares else _LEAST_AGAIN_S)

    def habit_s(self, fragment: int, least_s: float = _LEAST_AGAIN_S) -> float:
        """How late a peer may be in each round: three usual ones, where none is spared."""
        if (took_s := self._took_s.get(fragment)) is None:
            return self._most_s
        return min(self._most_s, max(least_s, _USUAL_ROUNDS * median(took_s)))

    def brief_s(self, fragment: int) -> float | None:
        """The same where inner steps go by speed; None elsewhere, and where no round is known."""
        took_s = self._took_s.get(fragment, ())
        if not self._brief or len(took_s) < _KNOWN:
            return None
        spread_s = quantiles(self._spreads_s[fragment], n=4)[2]
        return _SPREADS * spread_s + self._share * median(took_s)


@dataclass(eq=False)
class PeerContribution:
    incoming: "Incoming"
    weight: int
    norm: float
    most: float  # the norm that is announced of this shard
    root: bytes
    stream: object = None  # that it comes on; it is None where that has ended
    whole: bool = False  # its values are here, and verified


@dataclass(frozen=True)
class DueMean:
    """A mean to compute: the contributions in this order, each times its factor."""

    key: ShardKey
    attempt: int  # tells it from others of the same shard
    shard: ShardRange
    contributors: Group
    inputs: tuple["Incoming", ...]
    weights: tuple[int, ...]
    roots: tuple[bytes, ...]
    factors: tuple[float, ...]
    alike: tuple[Group, ...]  # groups that contribute the same, bit for bit
    left_out: Group  # peers in quarantine, whose contributions do not count
    late: Group  # that were waited for in vain, or for longer than one may in each round
    joiners: Group
    last: str  # the peer whose contribution came last


@dataclass(eq=False)
class OpenShard:
    """Times in monotonic seconds."""

    contributions: dict[str, PeerContribution] = field(default_factory=dict)
    contributors: dict[str, float] = field(default_factory=dict)  # by when they came
    begun: bool = False  # a contribution has been whole here
    handed_back: bool = False  # it was another's meanwhile
    quarter_at: float | None = None  # when a quarter of the awaited were here
    quorum_at: float | None = None
    most_at: float | None = None  # when more than half of the awaited were here
    awaited: set[str] = field(default_factory=set)  # that were late when the quorum was here
    computing: int | None = None  # the attempt that is on its way

    def contributed(self, peer: str, now: float) -> None:
        self.begun = True
        self.contributors.pop(peer, None)
        self.contributors[peer] = now


class ReducedShards:
    """The open and the closed shards of a peer, and the state of its own that decides on them."""

    def __init__(self, context: "Context") -> None:
        self._me, self._layout, self._config = context.me, context, context.config
        self.view = View()
        self.closed: set[ShardKey] = set()
        self.given: set[ShardKey] = set()  # of these, to others
        self.versions: dict[int, int] = {}  # by fragment, of this peer's own state
        self._groups: dict[tuple[int, int], Group] = {}
        self.open: dict[ShardKey, OpenShard] = {}
        self._attempts, self.patience = count(1), Patience(self._config.grace_s, context.plan)
        self._passed_over: defaultdict[ShardKey, set[str]] = defaultdict(set)
        self._quarantine = context.quarantine
        self._kept = self._config.norm_limit if context.plan.keeps else 0.0
        self._announced: dict[tuple[int, int], dict[str, tuple[float, int]]] = {}
        self._quorum_at: dict[tuple[int, int], float] = {}  # the first of a round, of any shard
        self._silent_at: dict[str, float] = {}  # since when this peer does not answer, in s
        self._took_s: dict[tuple[int, str], float] = {}  # its last contribution, to come here

    def group(self, key: ShardKey) -> Group | None:
        """The group that lays out the round, as far as this peer knows it."""
        return self._groups.get((key.fragment, key.round))

    def announced(self, key: ShardKey, peer: str, norm: float, work: int) -> None:
        self._announced.setdefault((key.fragment, key.round), {})[peer] = norm, work

    def most_norm(self, key: ShardKey, contributors: Group) -> float:
        """The largest norm that a mean of the shard can have, by what its contributors have
        announced to this peer itself; infinite where too few have."""
        plan, most = self._layout.plan, self._most_norm(key.fragment, key.round, contributors)
        if plan.keeps_reduction_residual:  # of means before: what their encoding has left out
            earlier = range(key.round - _LEFT_ROUNDS, key.round)
            norms = [self._most_norm(key.fragment, at, contributors) for at in earlier]
            if norms[-1] == math.inf:
                norms[-1] = _UNHEARD * most
            most += max((each for each in norms if each < math.inf), default=0.0)
            most = most or math.inf  # what is left after as many rounds of zeros has no limit
        if plan.mean_over == "senders":
            most *= math.sqrt(len(contributors))
        return robust.NORM_SLACK * most

    def _most_norm(self, fragment: int, round_: int, contributors: Group) -> float:
        at = fragment, round_
        group, known = self._groups.get(at, ()), self._announced.get(at)
        if known is None or 2 * len(known) <= len(group):
            return math.inf
        norms, works = zip(*known.values(), strict=True)
        missing, period = len({*contributors} - known.keys()), self._layout.plan.inner_steps
        return robust.most_norm(norms, works, missing, self._config.norm_limit, period)

    def least_factor(self, key: ShardKey, contributors: Group, own: float) -> float:
        """The least that a mean of these counts of this peer's contribution, of norm `own`, by what
        they have announced to it; 0 where too few have."""
        known = self._announced.get((key.fragment, key.round), {}) | {self._me: (own, 1)}
        found = [known[peer][0] for peer in contributors if peer in known]
        missing = len(contributors) - len(found)
        least = robust.least_factor(own, found, missing, self._config.norm_limit)
        return _NEARLY * least if self._me in contributors else 0.0

    def came(self, key: ShardKey, peer: str, seconds: float) -> None:
        """All of a peer's contribution is here, so long after its header."""
        if self.view.live(peer):
            self._took_s[key.fragment, peer] = seconds

    def transfer_s(self, fragment: int, peers: Iterable[str]) -> float:
        """How long both ways to the slowest take, by their last contributions; at most a floor."""
        floor_s, others = self._layout.transfer_s(fragment), {*peers} - {self._me}
        took_s = [2 * self._took_s.get((fragment, peer), floor_s) for peer in others]
        return min(floor_s, max(took_s, default=0.0))

    def awaited(self, key: ShardKey) -> set[str]:
        entry, group = self.open.get(key), self.group(key)
        if entry is None or group is None:
            return set()
        return self._expected(key, group) - entry.contributors.keys()

    def admits(self, peer: str, group: Group) -> bool:
        """Tells whether what a peer gives counts: it is of the group, or none of that is left."""
        return peer in group or self.view.gone(group)

    def peer_to_ask(self, key: ShardKey, order: Sequence[str]) -> str | None:
        """The peer to ask for a shard: the first usable of this order, but in place of this peer
        one that another's mean has brought further."""
        best = self.view.reducer(order)
        return self.further(key, order) or best if best == self._me else best

    def further(self, key: ShardKey, order: Sequence[str]) -> str | None:
        """A peer that has applied the round, where two or more have, and most of the others:
        another has reduced the shard, and nobody else would have this peer's mean of it."""
        if key in self.closed:
            return None
        passed_over = self._passed_over.get(key, ())
        live = [p for p in order if p != self._me and self.view.live(p) and p not in passed_over]
        over = [peer for peer in live if self.view.has_applied(peer, key.fragment, key.round)]
        if not len(over) > max(1, len(live) / 2):
            return None
        return next((peer for peer in over if self.view.usable(peer)), None)

    def above(self, key: ShardKey, group: Group) -> str | None:
        """The peer that is to reduce the shard in place of this one, if any. That somebody does not
        reach this peer moves what has begun here once, and not where all awaited is on its way."""
        view, passed_over = self.view, self._passed_over.get(key, ())
        order = self._layout.orders(key.fragment, group)[key.shard]
        order = tuple(peer for peer in order if peer not in passed_over)
        best = view.reducer(order)
        if best == self._me:
            return self.further(key, order)
        if best is None:
            return None
        if (entry := self.open.get(key)) is not None and entry.begun:
            moves = any(map(view.usable, takewhile(lambda peer: peer != self._me, order)))
            given, expected = entry.contributions, self._expected(key, group)
            come = (p in given and (given[p].whole or given[p].stream) for p in expected)
            if not moves and (entry.handed_back or all(come)):
                return None
        return best

    def on_view(self, view: View) -> None:
        """Hands back what another peer is to reduce."""
        own = view.members.get(self._me)
        avoided = self._quarantine.liars.union(own.idle if own else ()) - {self._me}
        self.view = view = replace(view, avoided=avoided)
        self._took_s = {at: took_s for at, took_s in self._took_s.items() if view.live(at[1])}
        silent, now = (p for p in view.members if not view.answers(p)), self._layout.clock()
        self._silent_at = {peer: self._silent_at.get(peer, now) for peer in silent}
        for key, entry in list(self.open.items()):
            movable = entry.begun and entry.computing is None
            if movable and (group := self.group(key)) is not None and self.above(key, group):
                self.open[key] = OpenShard(handed_back=True)

    def pass_over(self, key: ShardKey, peer: str) -> None:
        self._passed_over[key].add(peer)

    def advanced(self, fragment: int, version: int, group: Group) -> list[ShardKey]:
        """This peer's state is at `version`, and `group` lays out that round. Where it was further,
        it has gone back: what it has given of the rounds to come stays. Returns what to forget."""
        afresh = self._groups.get((fragment, version), group) != group
        back, oldest = version < self.versions.get(fragment, version), version - KEPT_ROUNDS
        known = (key for key in (*self.open, *self.closed) if key.fragment == fragment)
        forgotten = [
            key
            for key in known
            if key.round < oldest
            or (afresh and key.round == version)
            or (back and key.round >= version and key not in self.given)
        ]
        for key in forgotten:
            self.open.pop(key, None)
            self.closed.discard(key)
            self.given.discard(key)
        for key in [k for k in self._passed_over if k.fragment == fragment and k.round < version]:
            del self._passed_over[key]
        self.versions[fragment] = version
        self._groups[fragment, version] = group
        for of_rounds in (self._groups, self._announced, self._quorum_at):
            for at in list(of_rounds):
                undone = back and at[1] >= version and of_rounds is not self._groups
                if at[0] == fragment and (undone or at[1] < oldest - _LEFT_ROUNDS):
                    del of_rounds[at]
        return forgotten

    def learned(self, key: ShardKey) -> bool:
        """A reduction is known. Returns whether to keep it: others may have an earlier one."""
        if key in self.closed:
            return False
        self.closed.add(key)
        if entry := self.open.pop(key, None):  # what counted needs no memory any more
            entry.contributions = {p: c for p, c in entry.contributions.items() if not c.whole}
        return True

    def computed(self, key: ShardKey, attempt: int, *, failed: bool = False) -> bool:
        """A mean that was due is done, or has failed. Returns whether to keep it."""
        entry = self.open.get(key)
        if key in self.closed or entry is None or entry.computing != attempt:
            return False  # learned meanwhile, laid out afresh, or handed back
        if not failed:
            return self.learned(key)
        del self.open[key]  # it must not stay closed to peers that try again
        return False

    def close(self, now: float) -> list[DueMean]:
        """Returns the means that are due at monotonic time `now` (s)."""
        return [
            self._compute(key, entry, group, now)
            for key, entry in sorted(self.open.items(), key=lambda item: item[0])
            if (group := self.group(key)) is not None and self._is_due(key, entry, group, now)
        ]

    def _is_due(self, key: ShardKey, entry: OpenShard, group: Group, now: float) -> bool:
        if entry.computing is not None or not entry.contributors:
            return False
        expected = self._expected(key, group)
        # One that leaves has contributed early: it does not say how far the others are.
        here = {p for p in entry.contributors if self.view.live(p) and p not in self.view.late}
        count, awaited = len(here), len(expected | here)
        if entry.quarter_at is None and count >= _PUNCTUAL * awaited:
            entry.quarter_at = now
        entry.most_at = (entry.most_at or now) if 2 * count > awaited else None
        if count < math.ceil(self._config.quorum * awaited):
            entry.quorum_at = None
            return False
        if entry.quorum_at is None:
            entry.quorum_at = now
            self._quorum_at.setdefault((key.fragment, key.round), now)
            spread_s = now - (now if entry.quarter_at is None else entry.quarter_at)
            self.patience.has_quorum(key.fragment, key.round, now, spread_s)
        late = self._late(key, entry, expected, now)
        entry.awaited |= late
        ends = entry.quorum_at + self.wait_s(key, late)
        brief_s = self.patience.brief_s(key.fragment)
        # Of two halves nobody knows which is the slow one: each would go on without the other.
        if brief_s is not None and entry.most_at is not None and len(group) > 2:
            ends = min(ends, max(entry.quorum_at, entry.most_at) + brief_s)
        return not late or now >= ends

    def _compute(self, key: ShardKey, entry: OpenShard, group: Group, now: float) -> DueMean:
        self.patience.ends(key.fragment, key.round, now)
        expected = self._expected(key, group)
        late = self._late(key, entry, expected, now)
        if entry.quorum_at is not None:
            out = entry.awaited & self.view.members.keys() - entry.contributors.keys()
            late |= {p for p in out if self.view.took_back(p, key.fragment, key.round)}
            last = late or {next(reversed(entry.contributors))}
            waited_s = now - entry.quorum_at - self.transfer_s(key.fragment, last)
            self.patience.waited(key.fragment, key.round, waited_s)
            if len(group) > 2:  # of two nobody knows which is the slow one
                came_s = self.patience.habit_s(key.fragment) + entry.quorum_at
                for peer in expected.intersection(entry.contributors):
                    if entry.contributors[peer] > came_s + self.transfer_s(key.fragment, [peer]):
                        late.add(peer)
        entry.computing = next(self._attempts)
        contributors, factors, left_out = self._held_to_norms(key, entry)
        given = entry.contributions
        return DueMean(
            key=key,
            attempt=entry.computing,
            shard=self._layout.shards(key.fragment, group)[key.shard],
            contributors=contributors,
            inputs=tuple(given[peer].incoming for peer in contributors),
            weights=tuple(given[peer].weight for peer in contributors),
            roots=tuple(filter(None, (given[peer].root for peer in contributors))),
            factors=factors,
            # By the shard and the whole: a shard that no sample has touched may well be equal.
            alike=alike({p: (given[p].incoming.hash, given[p].norm) for p in contributors}),
            left_out=left_out,
            late=tuple(sorted(late)),
            joiners=self._joiners(key, group, contributors),
            last=next(peer for peer in reversed(entry.contributors) if peer in contributors),
        )

    def _joiners(self, key: ShardKey, group: Group, contributors: Group) -> Group:
        """The peers to lay out the next round over too, late ones of this group first. A peer that
        says that it trains and answers nobody is none: it has to contribute first. Nor is one that
        has yet to get this state: its donor may be slow on purpose, and rounds would wait."""
        shards = len(self._layout.orders(key.fragment, group))
        if key.shard != joiners_shard(key.round, shards):
            return ()
        found = self.view.joinable() - self.view.unmet - {*contributors}
        found -= self.view.fetching(key.fragment, key.round)
        first = sorted(found, key=lambda peer: (peer not in group, peer))
        return tuple(sorted(first[: most_joiners(group)]))

    def _held_to_norms(
        self, key: ShardKey, entry: OpenShard
    ) -> tuple[Group, tuple[float, ...], Group]:
        """(the contributors that count, the factor of each, those in quarantine). Where most have
        nothing left for the mean that ends a run, no limit is known: nobody moves the model."""
        peers = tuple(sorted(entry.contributors))
        given, limit = [entry.contributions[peer] for peer in peers], self._config.norm_limit
        norms = [each.norm or each.most for each in given]
        known = self._announced.get((key.fragment, key.round), {})
        works = [known[peer][1] if peer in known else 1 for peer in peers]
        if self._layout.ends_run and 2 * norms.count(0.0) > len(peers):
            peers = tuple(peer for peer, norm in zip(peers, norms, strict=True) if not norm)
            norms, works = [0.0] * len(peers), []
        ratios = robust.norm_ratios(norms, works)
        by_peer = dict(zip(peers, ratios, strict=True))
        self._quarantine.saw(key.fragment, key.round, by_peer, self._kept)
        out = self._quarantine.peers.intersection(peers)
        if len(out) == len(peers):
            out = frozenset()
        counted = [i for i, peer in enumerate(peers) if peer not in out]
        factors = robust.norm_factors([ratios[i] for i in counted], limit)
        if limit and not self._layout.plan.compares_norms:  # one step's gradients differ far more
            factors = tuple(robust.FAR / max(robust.FAR, ratios[i]) for i in counted)
        return tuple(peers[i] for i in counted), factors, tuple(sorted(out))

    def _expected(self, key: ShardKey, group: Sequence[str]) -> set[str]:
        expected = (p for p in group if self.view.will_contribute(p, key.fragment, key.round))
        out = self._passed_over.get(key, ())
        parted = self.view.parted(self._me, key.fragment, key.round)
        if self._layout.ends_run:  # models of each peer's own
            parted = frozenset()
        return {*expected}.difference(out, parted)

    def _late(self, key: ShardKey, entry: OpenShard, expected: set[str], now: float) -> set[str]:
        """The peers to wait for. Where most have contributed, one that has not begun to and does
        not answer is none: 2 s after that, or after this round's first quorum here."""
        late = expected - entry.contributors.keys()
        if entry.quorum_at is not None and len(entry.contributors) > len(late):
            first_at = self._quorum_at.get((key.fragment, key.round), entry.quorum_at)
            silent = {p for p, at in self._silent_at.items() if now >= min(at, first_at) + SILENT_S}
            late -= silent - entry.contributions.keys()
        return late

    def wait_s(self, key: ShardKey, late: Collection[str]) -> float:
        """How long these late peers are waited for. What has begun to come may take as long as on
        the slowest link that is planned for."""
        fragment, entry = key.fragment, self.open.get(key)
        usual_s = self.patience.usual_s(fragment, key.round, len(self.group(key) or ()))
        if entry is not None and not entry.contributions.keys().isdisjoint(late):
            return usual_s + self._layout.transfer_s(fragment)
        return usual_s + self.transfer_s(fragment, late)

    def overdue_s(self, key: ShardKey, order: Sequence[str], reducer: str) -> float:
        """How long a reducer is waited for: longer than it waits for others itself. Where most have
        its answer it is no longer than this peer is waited for; briefly where it has not begun."""
        most_s = OVERDUE * self.wait_s(key, self._expected(key, order))
        if self.further(key, order):
            most_s = min(most_s, self.patience.habit_s(key.fragment) / OVERDUE)
        most_s += self.transfer_s(key.fragment, [reducer])
        brief_s = self.patience.brief_s(key.fragment)
        begun = self._announced.get((key.fragment, key.round), {})  # none, if this reduces nothing
        if brief_s is None or len(order) <= 2 or reducer in begun or not begun:
            return most_s
        return min(most_s, OVERDUE * brief_s + self.transfer_s(key.fragment, order))


def next_group(
    group: Sequence[str], contributors: Sequence[Sequence[str]], joiners: Sequence[str]
) -> tuple[str, ...]:
    """The peers that lay out the round after this one, sorted.

    A peer of the group stays if at least half of the shards count it: no single reducer can leave
    one out, or keep one that others do not see. Joiners count for one round, and stay by what they
    contribute in it. `contributors` are of each shard, `joiners` of the shard that names them."""
    counted = Counter(peer for peers in contributors for peer in set(peers))
    stay = {peer for peer, count in counted.items() if 2 * count >= len(contributors)}
    # Where none of the group is left, those that hold the round in its place lay out the next.
    return tuple(sorted((stay.intersection(group) or stay).union(joiners)))


def joiners_shard(round_: int, shards: int) -> int:
    """The shard whose reduction names the round's joiners: in each round another reducer's."""
    return round_ % shards


def most_joiners(group: Sequence[str]) -> int:
    """How many joiners one reduction may name: a group at most doubles in a round."""
    return max(_FEW_JOINERS, len(group))
