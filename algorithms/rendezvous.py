"""Who reduces which shard: rendezvous (highest random weight) hashing, one shard a peer and lap.

Everyone who knows the group computes the same answer, so nobody is asked. A group of n cuts a
fragment into n shards, or n in each of several laps, and each peer reduces one of a lap: traffic
per peer is 2 (n-1)/n of the fragment.
"""

from collections.abc import Sequence
from hashlib import blake2b


def weight(key: bytes, peer: str) -> int:
    """The 64-bit weight of a peer for a key."""
    return int.from_bytes(blake2b(peer.encode(), key=key[:64], digest_size=8).digest(), "big")


def ranking(key: bytes, peers: Sequence[str]) -> tuple[str, ...]:
    """The peers by falling weight for this key; ties (never seen) by name."""
    return tuple(sorted(peers, key=lambda peer: (-weight(key, peer), peer)))


def reducer_orders(
    run: int, fragment: int, group: Sequence[str], laps: int = 1
) -> tuple[tuple[str, ...], ...]:
    """For each of the laps * len(group) shards, the peers in the order in which they may reduce it.

    The first is the reducer: going through the shards of a lap, each takes the heaviest peer that
    has none yet, so that the load is exactly even. The others follow by weight and take over when
    all before them are gone. As long as the group stays the same a peer reduces the same shards of
    a fragment in every round: it keeps the residual of their rounding (docs/adr/0006).

    Args:
        run: 64-bit run id.
        fragment: fragment index.
        group: the peers that lay out the round; the order does not matter.
        laps: how many shards each peer reduces.
    """
    taken: set[str] = set()
    orders = []
    for shard in range(laps * len(group)):
        if shard % len(group) == 0:
            taken.clear()
        key = b"".join(number.to_bytes(8, "big") for number in (run, fragment, shard))
        by_weight = ranking(key, group)
        first = next(peer for peer in by_weight if peer not in taken)
        taken.add(first)
        orders.append((first, *(peer for peer in by_weight if peer != first)))
    return tuple(orders)
