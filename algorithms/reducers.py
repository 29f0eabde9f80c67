"""Which peer reduces which shard of a round: rendezvous (highest random weight) hashing.

Every peer that knows the group computes the same reducers, so no peer is asked. A group of n cuts a
fragment into chunks_per_peer * n shards. So traffic per peer is 2 (n-1)/n of the fragment.

The next round's group follows from the reductions of this one, which all peers have alike.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

Pair = tuple[str, str]

_FEW_JOINERS = 4


def weight(key: bytes, peer: str) -> int:
    """The 64-bit weight of a peer for a key."""
    return int.from_bytes(blake2b(peer.encode(), key=key[:64], digest_size=8).digest(), "big")


def ranking(key: bytes, peers: Sequence[str]) -> tuple[str, ...]:
    """The peers by falling weight for this key; ties (never seen) by name."""
    return tuple(sorted(peers, key=lambda peer: (-weight(key, peer), peer)))


def reducer_orders(
    run: int, fragment: int, group: Sequence[str], chunks_per_peer: int = 1
) -> tuple[tuple[str, ...], ...]:
    """For each of the chunks_per_peer * len(group) shards, the peers that may reduce it, in order.

    The first is the reducer. Of len(group) shards in a row, each takes the heaviest peer that has
    none yet, so that the load is exactly even. The others follow by weight and take over when all
    before them are gone. As long as the group stays the same a peer reduces the same shards of a
    fragment in every round: it keeps the residual of their rounding (docs/adr/0006). Args: run:
    64-bit run id; group: in any order.
    """
    taken: set[str] = set()
    orders = []
    for shard in range(chunks_per_peer * len(group)):
        if shard % len(group) == 0:
            taken.clear()
        key = b"".join(number.to_bytes(8, "big") for number in (run, fragment, shard))
        by_weight = ranking(key, group)
        first = next(peer for peer in by_weight if peer not in taken)
        taken.add(first)
        orders.append((first, *(peer for peer in by_weight if peer != first)))
    return tuple(orders)


def next_group(
    group: Sequence[str], contributors: Sequence[Sequence[str]], joiners: Sequence[str]
) -> tuple[str, ...]:
    """The peers that lay out the round after this one, sorted.

    A peer of the group stays if at least half of the shards count it: no single reducer can leave
    one out, or keep one that others do not see. Joiners count for one round, and stay by what they
    contribute in it. `contributors` are of each shard, `joiners` of the shard that names them.
    """
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


def reached_by_all(group: Collection[str], unreachable: Iterable[Pair]) -> frozenset[str]:
    """Those of a group that everybody in it reaches: at least a third of it, as no more than three
    times its share may fall to any peer. If fewer are left, the peer in most pairs does not count,
    for the fault is its own; where no single peer is in most, all are named."""
    inside = frozenset(group)
    pairs = {pair for pair in unreachable if inside.issuperset(pair)}
    while pairs:
        left = inside.difference(*pairs)
        if 3 * len(left) >= len(inside):
            return left
        named = Counter(peer for pair in pairs for peer in pair)
        (worst, most), *others = named.most_common(2)
        if most == others[0][1]:
            return inside
        pairs = {pair for pair in pairs if worst not in pair}
    return inside
