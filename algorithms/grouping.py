"""Who exchanges with whom when a round is held in small groups: a permutation that all can compute.

Everyone who knows the members computes the same groups, so nobody is asked. Names are ranked by the
hashes of rendezvous.py, which depend on nothing but the arguments.
"""

from collections.abc import Collection, Iterable
from hashlib import blake2b

from algorithms.rendezvous import ranking
from algorithms.separation import separated


def membership_epoch(peers: Iterable[str]) -> int:
    """A 64-bit hash of the set of peers: who agrees on it agrees on the groups of every round."""
    digest = blake2b(digest_size=8)
    for peer in sorted(set(peers)):
        name = peer.encode()
        digest.update(len(name).to_bytes(8, "big") + name)
    return int.from_bytes(digest.digest(), "big")


def groups(
    run: int,
    fragment: int,
    round_: int,
    epoch: int,
    peers: Iterable[str],
    size: int = 2,
    apart: Collection[tuple[str, str]] = (),
) -> tuple[tuple[str, ...], ...]:
    """The groups of a round: each peer in one of them, or in none.

    The peers that take part are put in an order that is random for every round, and cut into
    `size` rows below each other; the columns are the groups, so positions i and i + n/2 make a
    pair. What is left of n by `size` sits out, by turns: as long as the epoch lasts, each peer
    sits out equally often in n rounds, and never in two rounds running. Fewer peers than `size`
    make one group.

    Two that cannot reach each other are not put together: one of them changes places with a member
    of another group, or else with a peer that would sit out; where no change helps, as many as need
    be sit out. In such rounds it is not by turns.

    Args:
        run: 64-bit run id.
        fragment: fragment index.
        round_: index of the fragment's round.
        epoch: 64-bit membership epoch.
        peers: the members; their order does not matter.
        size: peers in a group, at least 2.
        apart: pairs of peers that cannot reach each other, the first name first.

    Returns:
        The groups, each in sorted order; none if there are fewer than two peers.

    Raises:
        ValueError: the size is below 2.

    Ref: arXiv:2506.10911, where the groups are random each round; the turns are ours.
    """
    if size < 2:
        raise ValueError(f"group size is {size}; it must be at least 2 (2 is a pair)")
    members = sorted(set(peers))
    if len(members) < 2:
        return ()
    size = min(size, len(members))
    resting = set(_sitting_out(_key(run, fragment, epoch), round_, members, len(members) % size))
    taking_part = [peer for peer in members if peer not in resting]
    order = ranking(_key(run, fragment, epoch, round_), taking_part)
    count = len(order) // size
    drawn = [order[column::count] for column in range(count)]
    together = separated(drawn, apart, sorted(resting)) if apart else drawn
    return tuple(tuple(sorted(group)) for group in together)


def group_of(
    me: str,
    run: int,
    fragment: int,
    round_: int,
    epoch: int,
    peers: Iterable[str],
    size: int = 2,
    apart: Collection[tuple[str, str]] = (),
) -> tuple[str, ...] | None:
    """The group that `me` is in, itself included; None if it sits this round out."""
    every = groups(run, fragment, round_, epoch, peers, size, apart)
    return next((group for group in every if me in group), None)


def _sitting_out(key: bytes, round_: int, members: list[str], count: int) -> tuple[str, ...]:
    """`count` of the members, taken in turn from a circle in an order of its own."""
    circle = ranking(key, members) if count else ()
    return tuple(circle[(round_ * count + i) % len(circle)] for i in range(count))


def _key(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)
