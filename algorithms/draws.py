"""Draws that are alike at every peer: the reducers of shards, and the groups of a round in pairs.

Every peer that knows the group computes the same, so no peer is asked: names are ranked by hashes
that depend on nothing but the arguments. Shards have reducers by rendezvous (highest random weight)
hashing. A group of n cuts a fragment into chunks_per_peer * n shards. So traffic per peer is
2 (n-1)/n of the fragment.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

Pair = tuple[str, str]


def weight(key: bytes, peer: str) -> int:
    """The 64-bit weight of a peer for a key."""
    return int.from_bytes(blake2b(peer.encode(), key=key[:64], digest_size=8).digest(), "big")


def ranking(key: bytes, peers: Sequence[str]) -> tuple[str, ...]:
    """The peers by falling weight for this key; ties (never seen) by name."""
    return tuple(sorted(peers, key=lambda peer: (-weight(key, peer), peer)))


def _key(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


def reducer_orders(
    run: int, fragment: int, group: Sequence[str], chunks_per_peer: int = 1
) -> tuple[tuple[str, ...], ...]:
    """For each of the chunks_per_peer * len(group) shards, the peers that may reduce it, in order.

    The first is the reducer. Of len(group) shards in a row, each takes the heaviest peer that has
    none yet, so that the load is exactly even. The others follow by weight and take over when all
    before them are gone. As long as the group stays the same a peer reduces the same shards of a
    fragment in every round: it keeps the residual of their rounding (docs/adr/0006). Args: run:
    64-bit run id; group: in any order."""
    taken: set[str] = set()
    orders = []
    for shard in range(chunks_per_peer * len(group)):
        if shard % len(group) == 0:
            taken.clear()
        by_weight = ranking(_key(run, fragment, shard), group)
        first = next(peer for peer in by_weight if peer not in taken)
        taken.add(first)
        orders.append((first, *(peer for peer in by_weight if peer != first)))
    return tuple(orders)


def membership_id(peers: Iterable[str]) -> int:
    """A 64-bit hash of the set of peers: where it is the same, all groups are the same."""
    digest = blake2b(digest_size=8)
    for peer in sorted(set(peers)):
        name = peer.encode()
        digest.update(len(name).to_bytes(8, "big") + name)
    return int.from_bytes(digest.digest(), "big")


def groups(
    run: int,
    fragment: int,
    round_: int,
    membership: int,
    peers: Iterable[str],
    size: int = 2,
    unreachable: Collection[Pair] = (),
) -> tuple[tuple[str, ...], ...]:
    """The groups of a round, each in sorted order: each peer is in one of them, or in none.

    The peers that take part are put in an order that is random for every round, and cut into `size`
    rows below each other; the columns are the groups, so positions i and i + n/2 make a pair. The
    rest of n by `size` sits out, by turns: while the members stay the same, each sits out equally
    often in n rounds, and never in two rounds running. Fewer peers than `size` make one group. Two
    that cannot reach each other are not put together (see `separated`). Args: run: its 64-bit
    id; membership: `membership_id`; peers: in any order; size: of a group, at least 2;
    unreachable: pairs that cannot reach each other, the first name first.

    Ref: arXiv:2506.10911, where the groups are random each round; the turns are ours."""
    members = sorted(set(peers))
    if len(members) < 2:
        return ()
    size = min(size, len(members))
    rest = len(members) % size  # taken in turn from a circle in an order of its own
    circle = ranking(_key(run, fragment, membership), members) if rest else ()
    resting = {circle[(round_ * rest + i) % len(circle)] for i in range(rest)}
    taking_part = [peer for peer in members if peer not in resting]
    order = ranking(_key(run, fragment, membership, round_), taking_part)
    count = len(order) // size
    drawn = [order[column::count] for column in range(count)]
    together = separated(drawn, unreachable, sorted(resting)) if unreachable else drawn
    return tuple(tuple(sorted(group)) for group in together)


def separated(
    drawn: Sequence[Sequence[str]], unreachable: Iterable[Pair], bench: Sequence[str] = ()
) -> list[list[str]]:
    """Groups in which everybody reaches everybody, as near as may be to those that were drawn.

    A member that does not reach another changes places with one of another group, or of the
    `bench`, which is in none, as long as that leaves fewer such pairs. Then the peer that reaches
    fewest of its group leaves it, until all reach each other. Groups of one are left out. The same
    groups and pairs give every peer the same answer."""
    unreached: dict[str, set[str]] = defaultdict(set)
    for one, other in unreachable:
        unreached[one].add(other)
        unreached[other].add(one)
    groups, spare = [list(group) for group in drawn], list(bench)
    for index in range(len(groups)):
        while _change(groups, index, spare, unreached):
            pass
    for group in groups:
        lacks = {peer: _unreached_in(peer, group, unreached) for peer in group}
        while lacks[worst := max(group, key=lacks.__getitem__)]:
            group.remove(worst)
            lacks = {peer: _unreached_in(peer, group, unreached) for peer in group}
    return [group for group in groups if len(group) > 1]


def _unreached_in(peer: str, group: Sequence[str], unreached: Mapping[str, set[str]]) -> int:
    return sum(other in unreached[peer] for other in group) if peer in unreached else 0


def _change(
    groups: list[list[str]], index: int, spare: list[str], unreached: Mapping[str, set[str]]
) -> bool:
    """The first exchange between this group and another that helps, if there is one."""
    mine = groups[index]
    for here, leaves in enumerate(mine):
        if not (now := _unreached_in(leaves, mine, unreached)):
            continue
        rest = mine[:here] + mine[here + 1 :]
        others = [groups[(index + step) % len(groups)] for step in range(1, len(groups))]
        for other in (*others, spare):
            for there, comes in enumerate(other):
                after = _unreached_in(comes, rest, unreached)
                before = now
                if other is not spare:
                    before += _unreached_in(comes, other, unreached)
                    after += _unreached_in(leaves, other[:there] + other[there + 1 :], unreached)
                if after < before:
                    mine[here], other[there] = comes, leaves
                    return True
    return False
