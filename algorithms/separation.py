"""Peers that cannot reach each other: groups without them, and who is reached by all.

Deterministic: who starts from the same groups and the same pairs ends with the same.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

Pair = tuple[str, str]


def separated(
    drawn: Sequence[Sequence[str]], apart: Iterable[Pair], bench: Sequence[str] = ()
) -> list[list[str]]:
    """Groups in which everybody reaches everybody, as near as may be to those that were drawn.

    A member that does not reach another changes places with one of another group, or with one that
    would sit out, as long as that leaves fewer pairs apart; then who is apart from most of its
    group leaves it, until nobody is.

    Args:
        drawn: disjoint groups of two peers or more.
        apart: pairs of peers, the first name first.
        bench: peers in no group.

    Returns:
        The groups in which two or more remain.
    """
    unreached = _by_peer(apart)
    groups = [list(group) for group in drawn]
    spare = list(bench)
    for index in range(len(groups)):
        while _change(groups, index, spare, unreached):
            pass
    for group in groups:
        while (worst := max(group, key=lambda p: _apart_in(p, group, unreached))) and _apart_in(
            worst, group, unreached
        ):
            group.remove(worst)
    return [group for group in groups if len(group) > 1]


def reached_by_all(group: Collection[str], apart: Iterable[Pair]) -> frozenset[str]:
    """Those of a group whom everybody in it reaches.

    They are at least a third of it, as no more than three times its share may fall to anybody: else
    whoever is in most pairs does not count, for the fault is its own, and all are named where that
    is nobody.
    """
    inside = frozenset(group)
    pairs = {pair for pair in apart if inside.issuperset(pair)}
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


def _by_peer(apart: Iterable[Pair]) -> Mapping[str, set[str]]:
    unreached: dict[str, set[str]] = defaultdict(set)
    for one, other in apart:
        unreached[one].add(other)
        unreached[other].add(one)
    return unreached


def _apart_in(peer: str, group: Sequence[str], unreached: Mapping[str, set[str]]) -> int:
    """From how many of the group the peer is apart."""
    return sum(other in unreached[peer] for other in group) if peer in unreached else 0


def _change(
    groups: list[list[str]], index: int, spare: list[str], unreached: Mapping[str, set[str]]
) -> bool:
    """The first exchange between this group and another that helps, if there is one."""
    mine = groups[index]
    for here, leaves in enumerate(mine):
        if not (now := _apart_in(leaves, mine, unreached)):
            continue
        rest = mine[:here] + mine[here + 1 :]
        others = [groups[(index + step) % len(groups)] for step in range(1, len(groups))]
        for other in (*others, spare):
            for there, comes in enumerate(other):
                after = _apart_in(comes, rest, unreached)
                before = now
                if other is not spare:
                    before += _apart_in(comes, other, unreached)
                    after += _apart_in(leaves, other[:there] + other[there + 1 :], unreached)
                if after < before:
                    mine[here], other[there] = comes, leaves
                    return True
    return False
