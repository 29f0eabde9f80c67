"""The shards, and the views of the swarm, that all rounds share."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple

from murmuration.algorithms.draws import Pair
from murmuration.worker.membership import Health, Member, Phase

Group = tuple[str, ...]

_MOST_LATE = 1 / 2  # of the live peers; of more the others would not be enough


class ShardKey(NamedTuple):
    """Shard `shard` of a round of a fragment; there are one or more for each peer of the group."""

    fragment: int
    round: int
    shard: int

    def __str__(self) -> str:
        return f"shard {self.shard} of round {self.round} of fragment {self.fragment}"


@dataclass(frozen=True)
class ShardRange:
    """One shard of a fragment: its values from `start` to `stop`, and their encoded sizes."""

    start: int
    stop: int
    contribution_bytes: int
    reduction_bytes: int
    exact: int = 0  # of the last values, limbs of integers

    @property
    def bounds(self) -> tuple[int, int]:
        return self.start, self.stop


@dataclass(frozen=True)
class View:
    """The swarm as membership sees it, for decisions about rounds."""

    members: Mapping[str, Member] = field(default_factory=dict)
    # Live peers that nobody has seen to answer since they began.
    unmet: frozenset[str] = frozenset()
    steps: float = inf  # of the run; the mean that ends it early is the round of this number
    # Peers that this one has caught giving false means, or has waited for in vain again and again:
    # they reduce nothing for it, and it waits for none of them.
    avoided: frozenset[str] = frozenset()
    # To rounds of this peer; nobody else has a say in whom it can do without.
    contributors: frozenset[str] = frozenset()
    _parted: dict[tuple[str, int, int], frozenset[str]] = field(default_factory=dict, compare=False)

    @cached_property
    def _live(self) -> list[Member]:
        return [member for member in self.members.values() if member.live]

    def _in(self, *phases: Phase) -> list[Member]:
        return [member for member in self._live if member.phase in phases]

    def live(self, peer: str) -> bool:
        """Not known to be gone."""
        member = self.members.get(peer)
        return member is not None and member.live

    def answers(self, peer: str) -> bool:
        """Alive beyond doubt."""
        member = self.members.get(peer)
        return member is not None and member.health is Health.ALIVE

    def usable(self, peer: str) -> bool:
        """The same, reached and trusted: worth sending a shard to."""
        return self.answers(peer) and peer not in self.avoided and peer not in self.cut_off

    @cached_property
    def cut_off(self) -> frozenset[str]:
        """Live peers that most of the others do not reach, or have waited for in vain, and late
        ones, where others are left: no round waits for them. What they give in time counts."""
        named = self._named_by_most(lambda member: {*member.unreachable, *member.idle})
        some_left = any(member.peer not in self.late | named for member in self._live)
        return self.late | named if some_left else named

    @cached_property
    def late(self) -> frozenset[str]:
        """Live peers that say that they do not keep up, where these are few."""
        late = frozenset(member.peer for member in self._live if member.peer in member.idle)
        return late if len(late) <= _MOST_LATE * len(self._live) else frozenset()

    @cached_property
    def unreached(self) -> frozenset[str]:
        """Live peers that most of the others do not reach: no round is laid out over them."""
        return self._named_by_most(lambda member: member.unreachable)

    def _named_by_most(self, names: Callable[[Member], Collection[str]]) -> frozenset[str]:
        """By most of the others that train and contribute; where none does, of all that live."""
        speaking = self._in(Phase.READY, Phase.TRAINING)
        training = [m for m in speaking if not self.contributors or m.peer in self.contributors]
        speak = training or self._live
        named = Counter(p for m in speak for p in {*names(m)} - {m.peer} if self.live(p))
        speakers = {member.peer for member in speak}
        found = frozenset(p for p, count in named.items() if 2 * count > len(speakers - {p}))
        return found if len(found) < len(self._live) else frozenset()

    def will_contribute(self, peer: str, fragment: int, round_: int) -> bool:
        """Says whether to wait for a peer: it trains, is reached, and has not applied the round."""
        member = self.members.get(peer)
        if member is None or not member.live or peer in self.cut_off or peer in self.avoided:
            return False
        leaves = member.phase is Phase.LEAVING and round_ >= self.steps
        if not leaves and member.phase not in (Phase.READY, Phase.TRAINING):
            return False
        return not self.has_applied(peer, fragment, round_)

    def took_back(self, peer: str, fragment: int, round_: int) -> bool:
        """Tells whether a known peer says itself that it is not to be waited for."""
        member = self.members[peer]
        trains = member.phase in (Phase.READY, Phase.TRAINING) and peer not in member.idle
        said = not trains or self.has_applied(peer, fragment, round_)
        return member.health is Health.LEFT or (member.live and said)

    def parted(self, me: str, fragment: int, round_: int) -> frozenset[str]:
        """The peers that train from another state before the round than `me`, where more than half
        of those before it share that of `me`."""
        at = me, fragment, round_
        if at not in self._parted:
            begun = [m for m in self._in(Phase.TRAINING) if fragment < len(m.digests)]
            at_it = [m for m in begun if m.digests[fragment].version == round_]
            held = {member.peer: member.digests[fragment].hash for member in at_it}
            out = {peer for peer, hash_ in held.items() if hash_ != held.get(me)}
            self._parted[at] = frozenset(out if me in held and 2 * len(out) < len(held) else ())
        return self._parted[at]

    def has_applied(self, peer: str, fragment: int, round_: int) -> bool:
        digests = self.members[peer].digests
        return fragment < len(digests) and digests[fragment].version > round_

    def in_draw(self, fragment: int) -> frozenset[str]:
        """The peers to draw a fragment's groups from: those that train or are about to, and those
        that have ended the run, as a pair that meets twice running ends it early. One that is only
        suspected stays in: else every suspicion would give every peer another partner."""
        ended = (m for m in self._in(Phase.DONE, Phase.LEAVING) if fragment < len(m.digests))
        found = (*self._in(Phase.READY, Phase.TRAINING), *ended)
        return frozenset(member.peer for member in found) - self.cut_off

    def gone(self, group: Collection[str]) -> bool:
        """Tells whether none of a round's group is left: all are gone, cut off, or avoided here."""
        return not any(self.live(p) and p not in self.cut_off | self.avoided for p in group)

    def has_ended_before(self, peer: str, fragment: int, round_: int) -> bool:
        """Tells whether this peer ended the run with a later round than this, or has left before
        this one. One that ended with this very round may still be asked for its last word."""
        member = self.members.get(peer)
        if member is None or fragment >= len(member.digests):
            return False
        version = member.digests[fragment].version
        if member.phase is Phase.LEAVING:
            return version <= round_
        return member.phase is Phase.DONE and version > round_ + 1

    def reducer(self, order: Sequence[str]) -> str | None:
        """The peer to reduce a shard now: the first usable one of its order that everybody reaches,
        else the first usable. Where the whole order is gone another live peer stands in: else those
        that the group left out would wait for ever."""
        first = next((peer for peer in order if self.usable(peer)), None)
        if self.apart and first is not None:
            reached = _reached(frozenset(order), self.apart)
            first = next((peer for peer in order if peer in reached and self.usable(peer)), first)
        if first is not None or not self.gone(order):
            return first
        return min((peer for peer in self.joinable() if self.usable(peer)), default=None)

    def reach(self, one: str, other: str) -> bool:
        return (min(one, other), max(one, other)) not in self.unreachable

    @cached_property
    def unreachable(self) -> frozenset[Pair]:
        """Pairs of live peers of which one does not reach the other; the first name first."""
        return self._pairs(lambda member: member.unreachable)

    @cached_property
    def apart(self) -> frozenset[Pair]:
        """The same, and those of which one does without the other: neither is to reduce for it."""
        return self.unreachable | self._pairs(lambda member: member.idle)

    def _pairs(self, names: Callable[[Member], Collection[str]]) -> frozenset[Pair]:
        return frozenset(
            (min(member.peer, other), max(member.peer, other))
            for member in self._live
            for other in names(member)
            if other != member.peer and self.live(other)
        )

    def fastest_step_s(self) -> float:
        """The time of an inner step of the fastest peer that trains; 0 when nobody has said. Of
        three or more it is the second: one's word alone would have all others take few steps."""
        told = sorted(m.step_s for m in self._in(Phase.TRAINING) if m.step_s > 0)
        return told[1] if len(told) > 2 else min(told, default=0.0)

    def arrived(self) -> frozenset[str]:
        """The live peers that have a model, or had: those that count for the start of a run."""
        return frozenset(m.peer for m in self._live if m.phase is not Phase.STARTING)

    def joinable(self) -> frozenset[str]:
        return frozenset(m.peer for m in self._in(Phase.READY, Phase.TRAINING)) - self.unreached

    def fetching(self, fragment: int, round_: int) -> frozenset[str]:
        """The peers that have yet to begin, from a state that others have."""
        begin = (m for m in self._in(Phase.READY) if fragment < len(m.digests))
        return frozenset(m.peer for m in begin if m.digests[fragment].version < round_)


def reached_by_all(group: Collection[str], unreachable: Iterable[Pair]) -> frozenset[str]:
    """Those of a group that everybody in it reaches: at least a third of it, as no more than three
    times its share may fall to any peer. If fewer are left, the peer in most pairs is not of them,
    nor do its pairs count: the fault is its own; where no single peer is in most, all are."""
    inside = everybody = frozenset(group)
    pairs = {pair for pair in unreachable if inside.issuperset(pair)}
    while pairs:
        left = inside.difference(*pairs)
        if 3 * len(left) >= len(everybody):
            return left
        named = Counter(peer for pair in pairs for peer in pair)
        (worst, most), *others = named.most_common(2)
        if most == others[0][1]:
            return inside
        inside -= {worst}
        pairs = {pair for pair in pairs if worst not in pair}
    return inside


_reached = lru_cache(maxsize=64)(reached_by_all)  # every shard of a round asks


def alike(marks: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """The peers whose marks are equal, group by group.

    >>> alike({"a": 1, "b": 2, "c": 1})
    (('a', 'c'),)"""
    groups: dict[object, list[str]] = {}
    for peer, mark in marks.items():
        groups.setdefault(mark, []).append(peer)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
