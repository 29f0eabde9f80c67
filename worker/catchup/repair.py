"""Anti-entropy: when this peer's state differs from the others', whose to fetch.

States are ordered by (version, contributors of the latest round, hash), so everyone agrees which of
two wins, and replicas converge again after any fault. With pairs states differ by design; there a
peer that has fallen behind only moves on to where the others are in the schedule.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from worker.membership import Digest, Health, Member, Phase


@dataclass(frozen=True)
class Repair:
    """Fetch these fragments from the donor."""

    donor: Member
    fragments: tuple[int, ...]
    reason: str


def choose_repair(
    mine: Sequence[Digest], members: Iterable[Member], failed: frozenset[int]
) -> Repair | None:
    """Decides whether to fetch state, and from whom.

    Args:
        mine: this peer's digests, by fragment.
        members: the other peers.
        failed: fragments whose current round this peer has given up, and which it therefore cannot
            bring forward by itself. One version of difference is otherwise the normal course.

    Returns:
        The donor that wins in most fragments, the most advanced of several; or None when there is
        nothing to repair.
    """
    best: Repair | None = None
    best_rank: tuple[object, ...] = ()
    for member in members:
        if member.health is not Health.ALIVE or member.phase in (Phase.STARTING, Phase.READY):
            continue
        reasons: dict[int, str] = {}
        overtaken = False
        for index, (my, other) in enumerate(zip(mine, member.digests, strict=False)):
            if other.rank <= my.rank:
                continue
            ahead = other.version - my.version
            if ahead == 0 and other.hash != my.hash:
                reasons[index] = f"another state at version {my.version}"
            elif ahead >= 2 or (ahead == 1 and index in failed):
                reasons[index] = f"version {my.version}, there {other.version}"
            overtaken = overtaken or ahead >= 2
        if overtaken:
            # This peer goes on at the other's step, so it needs all that belongs to that step.
            first = next(iter(reasons.values()))
            reasons = dict.fromkeys(range(len(mine)), first)
        rank = (len(reasons), [member.digests[index].rank for index in reasons])
        if reasons and (best is None or rank > best_rank):
            first = next(iter(reasons.values()))
            best, best_rank = Repair(member, tuple(reasons), first), rank
    return best


def step_of_the_others(
    mine: Sequence[Digest], members: Iterable[Member], partners: Container[str] = ()
) -> int | None:
    """Where a peer in a plan of pairs should go on, having slept while the others did not.

    Args:
        mine: this peer's digests, by fragment.
        members: the other peers.
        partners: of the rounds that this peer has come to.

    Returns:
        The furthest step known of a peer, if most of the others are two rounds ahead in every
        fragment; None when this peer is among them. None as well while a partner is no further than
        this peer: they have a round to hold, however often faster pairs have met meanwhile.
    """
    others = [c for c in members if c.health is Health.ALIVE and c.phase is Phase.TRAINING]
    if any(
        theirs.version <= my.version
        for member in others
        if member.peer in partners
        for theirs, my in zip(member.digests, mine, strict=False)
    ):
        return None
    ahead = [
        member
        for member in others
        if len(member.digests) == len(mine)
        and all(d.version >= my.version + 2 for d, my in zip(member.digests, mine, strict=True))
    ]
    return max(member.step for member in ahead) if 2 * len(ahead) > len(others) else None
