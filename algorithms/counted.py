"""The part of a peer's contributions in an anchor: which peers its last rounds have counted.

The record is part of a state and travels with it: docs/adr/0028 says what it is good for. Each
value of a pseudo-gradient stands once: in the anchor, or in the local parameters.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch import Tensor

from murmuration.algorithms.fragments import Ranges, union

RECORDED_ROUNDS = 16  # of each fragment: a peer may be so far behind, and still be told
REMEMBERED_ROUNDS = 2  # of this peer's contributions: a difference is repaired within one

MOST_PARTS = 256  # of a round; one that is cut up further is not recorded

Peers = tuple[str, ...]
Part = tuple[int, int, Peers]
"""(start, stop, contributors) of a shard's reduction."""


@dataclass(frozen=True)
class CountedRound:
    """The contributors of a round, by range of values: in order, without gaps."""

    round: int
    parts: tuple[Part, ...]


History = tuple[CountedRound, ...]
"""The last rounds of a state, the latest last."""


@dataclass(frozen=True)
class SentRound:
    """A contribution to a round that is over."""

    round: int
    values: Callable[[], Tensor]  # gives it as others have decoded it (1-D fp32)
    taken: Ranges  # the ranges in which the local parameters do not keep it


def recorded(history: History, round_: int, parts: Sequence[Part]) -> History:
    """The history after one more round; as it was where its contributors are not known."""
    runs = [list(same) for _, same in groupby(sorted(parts), key=itemgetter(2))]
    joined = [(run[0][0], run[-1][1], run[0][2]) for run in runs]
    if not 0 < len(joined) <= MOST_PARTS:
        return history
    return (*history, CountedRound(round_, tuple(joined)))[-RECORDED_ROUNDS:]


def counted_of(history: History, round_: int, peer: str) -> Ranges | None:
    """Where a state has this peer's contribution to a round; None: it does not say."""
    for each in history:
        if each.round == round_:
            return union(((start, stop) for start, stop, peers in each.parts if peer in peers), ())
    return None


def contributors_of(parts: Iterable[Part]) -> frozenset[str]:
    """The peers in more than half of a round's values: no one reducer adds or leaves out any."""
    counted: Counter[str] = Counter()
    total = 0
    for start, stop, peers in parts:
        total += stop - start
        counted.update(dict.fromkeys(peers, stop - start))
    return frozenset(peer for peer, values in counted.items() if 2 * values > total)


def to_plain(history: History) -> list[Any]:
    """As lists and numbers, for a checkpoint."""
    return [
        [each.round, [[*bounds, [*peers]] for *bounds, peers in each.parts]] for each in history
    ]


def from_plain(plain: Iterable[Any]) -> History:
    """Reads what `to_plain` has made."""
    return tuple(
        CountedRound(round_, tuple((start, stop, tuple(peers)) for start, stop, peers in parts))
        for round_, parts in plain
    )


def reconcile(local: Tensor, sent: SentRound, counted: Ranges) -> SentRound:
    """Makes up in the local parameters (1-D fp32) for another reduction of a round, of which the
    anchor has the contribution where `counted` says. Returns the round as they have it now."""
    if counted == sent.taken:
        return sent
    values = sent.values()
    for start, stop in without(counted, sent.taken):
        local[start:stop] += values[start:stop]
    for start, stop in without(sent.taken, counted):
        local[start:stop] -= values[start:stop]
    return SentRound(sent.round, sent.values, counted)


def without(ranges: Iterable[tuple[int, int]], others: Ranges) -> Ranges:
    """The parts of these ranges that are in none of the others, both in order."""
    left = []
    for start, stop in ranges:
        for from_, to in others:
            if from_ < stop and start < to:
                if start < from_:
                    left.append((start, from_))
                start = max(start, to)
        if start < stop:
            left.append((start, stop))
    return tuple(left)
