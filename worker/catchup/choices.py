"""When a run has ended, and whose state a peer that trains or has trained is to fetch.

All decide alike from the digests and phases that gossip tells. States are ordered by (version,
peers that hold it, contributors of the latest round, first of these peers by name). What most peers
share wins over that order, and a minority goes back to it. With pairs states differ by design;
there a peer that has fallen behind only moves on to where the others are in the schedule.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from murmuration.algorithms.plan import Plan
from murmuration.worker.membership import Digest, Health, Member, Phase


def all_agree(me: Member, others: Iterable[Member], plan: Plan) -> bool:
    """Tells whether all have ended the run, with one state in each stage where the plan has one.
    Peers that have not begun do not count, unless one alone serves its stage."""
    live = [member for member in others if member.live]
    begun = [member for member in live if member.phase is not Phase.STARTING]
    one_anchor = plan.exchange == "mean" or plan.consensus
    return {member.stage for member in live} <= {member.stage for member in (me, *begun)} and all(
        member.phase is Phase.DONE
        and (member.digests == me.digests or not one_anchor or member.stage != me.stage)
        for member in (me, *begun)  # what this peer has made last may not be known here yet
    )


def all_leave(me: Member, others: Iterable[Member], plan: Plan, steps: int) -> bool:
    """Tells whether the loops of all have ended before step `steps`, with one state where there is
    one. A peer that has come to the mean after them has seen all loops end."""
    one_anchor = plan.exchange == "mean"
    return all(
        at_end(member, steps)
        or (member.phase is Phase.LEAVING and (member.digests == me.digests or not one_anchor))
        for member in others
        if member.live and member.phase is not Phase.STARTING
    )


def at_end(member: Member, steps: int) -> bool:
    """Tells whether a peer has the mean that ends a run early, numbered as its last step."""
    return any(digest.version >= steps for digest in member.digests)


@dataclass(frozen=True)
class Repair:
    """Fetch these fragments from the donor."""

    donor: Member
    fragments: tuple[int, ...]
    reason: str


def ranking(
    states: Iterable[tuple[str, Sequence[Digest]]],
) -> Callable[[int, Digest], tuple[int, ...]]:
    """Ranks the states of a fragment among these peers: the highest is to be asked for."""
    holders: dict[tuple[int, int, int], list[int]] = {}  # by their place among the names
    for place, (_, digests) in enumerate(sorted(states, key=lambda each: each[0])):
        for index, digest in enumerate(digests):
            holders.setdefault((index, digest.version, digest.hash), []).append(place)

    def rank(index: int, digest: Digest) -> tuple[int, ...]:
        held = holders[index, digest.version, digest.hash]
        return (digest.version, len(held), digest.contributors, -held[0])

    return rank


def choose_repair(
    me: str, mine: Sequence[Digest], members: Iterable[Member], failed: frozenset[int]
) -> Repair | None:
    """Decides whether to fetch state, and from whom: the donor that wins in most fragments, the
    most advanced of several. Args: mine: this peer's digests; failed: fragments whose round it has
    given up, and cannot bring forward by itself. Else one version of difference is normal."""
    best: Repair | None = None
    best_rank: tuple[object, ...] = ()
    alive = (member for member in members if member.health is Health.ALIVE)
    begun = [member for member in alive if member.phase not in (Phase.STARTING, Phase.READY)]
    rank = ranking([(me, mine), *((member.peer, member.digests) for member in begun)])
    for member in begun:
        reasons: dict[int, str] = {}
        overtaken = False
        for index, (my, other) in enumerate(zip(mine, member.digests, strict=False)):
            if rank(index, other) <= rank(index, my):
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
        its_rank = (len(reasons), [rank(index, member.digests[index]) for index in reasons])
        if reasons and (best is None or its_rank > best_rank):
            best, best_rank = Repair(member, tuple(reasons), next(iter(reasons.values()))), its_rank
    return best


def choose_return(
    mine: Sequence[Digest],
    voters: Sequence[Member],
    hash_of: Callable[[int, int], int],
    *,
    ended: bool = False,
) -> Repair | None:
    """Decides whether to go back to the state that most peers share: peers that were cut off may be
    ahead of the others, which have none of their rounds.

    Args: voters: the others whose word counts. hash_of: of this peer's own state, by fragment and
    version; 0: not known. ended: this peer and all voters are done.

    Returns: All fragments of a donor, where in one more than half of all hold one state of an
    earlier version. At that version this peer had another state, or all have ended."""
    for index in range(len(mine)):
        held = Counter((m.digests[index].version, m.digests[index].hash) for m in voters)
        if not held:
            continue
        (version, hash_), holders = held.most_common(1)[0]
        other_way = hash_of(index, version) not in (0, hash_)
        if version < mine[index].version and (other_way or ended) and 2 * holders > len(voters) + 1:
            shared = (m for m in voters if m.digests[index].hash == hash_)
            reason = f"most peers share another history, at version {version}"
            donor = min(shared, key=lambda member: member.peer)
            return Repair(donor, tuple(range(len(mine))), reason)
    return None


def step_of_the_others(
    mine: Sequence[Digest], members: Iterable[Member], partners: Container[str] = ()
) -> int | None:
    """The step to go on at, for a peer in pairs that has slept while the others did not: the
    furthest that two have come to, if most others are two rounds ahead in every fragment; of one
    other, that one's. None while a partner of a round that it has come to is no further: they have
    a round to hold."""
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
    furthest = sorted(member.step for member in ahead)[-2:]
    return furthest[0] if 2 * len(ahead) > len(others) else None
