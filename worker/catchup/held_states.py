"""Remembers a peer's states, and how far rounds lead from one to another."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from murmuration.algorithms.counted import Part, contributors_of
from murmuration.algorithms.fragment_state import FragmentState
from murmuration.worker.membership import Member
from murmuration.worker.membership.swim import MAX_MEMBERS

if TYPE_CHECKING:
    from torch import Tensor

# The peer that has given a reduction, a number for its life and group, and the reduction's hash.
Received = tuple[str, int, int]
Moves = tuple[float, ...]  # how far a round leads an anchor and its momentum (L2)

REMEMBERED = 256  # states of each fragment that a peer knows the hash of
_SAMPLED = 1024  # values of an anchor, and of a momentum, by which its moves are measured
_MOVES = 16  # and rounds of which reductions are known

_FURTHER = 5.0  # times the way that rounds usually lead is still plausible
_SIZE = 0.5  # of the anchor's norm is, as long as no round's move is known
_SETTLES = 4  # rounds: a momentum of 0.9 is at most ten of its moves away, after any number


class HeldStates:
    """The states that this peer has held, as it remembers them. Their hashes confirm them to
    others. Whose contributions its own rounds have counted says whose word counts, and how far its
    anchors and momenta usually move says which states are plausible."""

    def __init__(self, exact: Sequence[int] = ()) -> None:
        self._hashes: dict[tuple[int, int], int] = {}
        self._agreed: dict[tuple[str, int], int] = {}  # the last version that is as this peer's
        self._contributed: dict[str, None] = {}  # the latest last
        self.contributors: frozenset[str] = frozenset()  # to rounds of this peer
        self.exact = exact  # limbs of integers that each fragment ends with
        self._sampled: dict[int, tuple[int, Sequence[Tensor]]] = {}
        self._received: dict[int, deque[tuple[int, Sequence[Received]]]] = {}
        self._moves: dict[int, dict[int, Moves]] = {}  # by the version that it led to

    def add(self, states: Sequence[FragmentState]) -> None:
        first = not self._hashes  # its own, from its checkpoint
        for index, state in enumerate(states):
            for each in (h for h in state.history if first and h.round >= state.told_until):
                self.took_part(index, each.round, each.parts)
            self._hashes.pop((index, state.version), None)
            self._hashes[index, state.version] = state.hash
            self._measure(index, state)
        for oldest in list(self._hashes)[: -REMEMBERED * max(1, len(states))]:
            del self._hashes[oldest]

    def took_part(
        self, fragment: int, round_: int, parts: Iterable[Part], received: Sequence[Received] = ()
    ) -> None:
        """A round of this peer has closed, with these contributors by range, and reductions."""
        self._received.setdefault(fragment, deque(maxlen=_MOVES)).append((round_ + 1, received))
        for peer in contributors_of(parts):
            self._contributed.pop(peer, None)
            self._contributed[peer] = None
        for oldest in list(self._contributed)[:-MAX_MEMBERS]:
            del self._contributed[oldest]
        self.contributors = frozenset(self._contributed)

    def shares(self, peers: Iterable[str], states: Mapping[int, FragmentState]) -> None:
        """This peer takes over states that these hold."""
        self._agreed |= {(peer, i): state.version for peer in peers for i, state in states.items()}

    def heard(self, member: Member) -> None:
        for index, digest in enumerate(member.digests):
            if digest.hash == self.hash_of(index, digest.version):
                self._agreed[member.peer, index] = digest.version

    def received(self, fragment: int, version: int) -> Sequence[Received]:
        """The reductions that led to this version, by shard; nothing where that is not known."""
        rounds = reversed(self._received.get(fragment, ()))
        return next((received for at, received in rounds if at == version), ())

    def parted(self, fragment: int, peers: Iterable[str], version: int) -> int:
        """The version from which the states of these went another way than this peer's: the last
        that one of them shared; else the first that it remembers of contributors, or `version`."""
        shared = [self._agreed.get((peer, fragment), -1) for peer in peers]
        if (last := max(shared, default=-1)) >= 0:
            return min(last, version)
        known = self.contributors.intersection(peers)
        first = min((at for index, at in self._hashes if index == fragment), default=version)
        return first if known else version

    def usual_moves(self, fragment: int, since: int, peers: Iterable[str]) -> Moves | None:
        """How far a round leads, as the mean since a few rounds before this version, if known. Of
        contributors it is that of all remembered rounds, if more: one that trained alone may have
        come to rest."""
        moves = self._moves.get(fragment, {})
        newest = max(moves, default=0)
        found = [move for at, move in moves.items() if at > min(since, newest - _MOVES)]
        longer = moves.values() if self.contributors.intersection(peers) else found
        if not found:
            return None
        means = (map(statistics.fmean, zip(*each, strict=True)) for each in (found, longer))
        return tuple(map(max, *means))

    def measured(self, index: int, state: FragmentState) -> "tuple[Tensor, Tensor]":
        """Anchor and momentum without the limbs of integers."""
        end = len(state.anchor) - (self.exact[index] if self.exact else 0)
        return state.anchor[:end], state.momentum[:end]

    def _measure(self, index: int, state: FragmentState) -> None:
        version, before = self._sampled.get(index, (state.version, None))
        if before is not None and version == state.version:
            return
        whole = self.measured(index, state)
        samples = [values[:: max(1, len(values) // _SAMPLED)].clone() for values in whole]
        self._sampled[index] = state.version, samples
        if before is not None and version + 1 == state.version:
            moves = self._moves.setdefault(index, {})
            moves[state.version] = tuple(
                float((now - then).norm()) * math.sqrt(len(values) / max(1, len(now)))
                for values, now, then in zip(whole, samples, before, strict=True)
            )
            for oldest in list(moves)[:-REMEMBERED]:
                del moves[oldest]

    def hash_of(self, fragment: int, version: int) -> int:
        """0: this peer does not know it."""
        return self._hashes.get((fragment, version), 0)

    def versions(self, fragment: int, until: int) -> list[int]:
        known = (version for index, version in self._hashes if index == fragment)
        return sorted((version for version in known if version <= until), reverse=True)

    def too_far(
        self,
        mine: Sequence[FragmentState],
        theirs: Mapping[int, FragmentState],
        holders: Sequence[str],
    ) -> bool:
        """Tells whether rounds hardly lead so far since the holders had this peer's. Any thread."""
        for index, state in theirs.items():
            version, own = mine[index].version, self.measured(index, mine[index])
            since = self.parted(index, holders, version)
            rounds = max(1, max(version, state.version) - since)
            if moves := self.usual_moves(index, since, holders):
                limits = [_FURTHER * rounds * moves[0], _FURTHER * min(rounds, _SETTLES) * moves[1]]
            else:
                anchor, momentum = (float(values.norm()) for values in own)
                limits = [_SIZE * anchor, _FURTHER * momentum or _SIZE * anchor]
            both = zip(self.measured(index, state), own, limits, strict=True)
            if any(float((values - here).norm()) > limit for values, here, limit in both):
                return True
        return False
