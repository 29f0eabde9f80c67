"""When a run starts, when there is a state to take over first, and when all have come to the end.

All decide alike from what gossip tells: the digests of the others, and their phases.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from murmuration.algorithms.plan import Plan
from murmuration.worker.membership import Digest, Health, Member, Phase

_ALONE_S = 2.0


@dataclass(frozen=True)
class TakeOver:
    """Whether a run is under way without this peer, and the peer whose state to fetch."""

    under_way: bool
    donor: Member | None


def choose_take_over(
    me: Member, replicas: Iterable[Member], as_started: tuple[Digest, ...], plan: Plan
) -> TakeOver:
    """Decides before the start whether to fetch state, and from whom.

    Peers that have started a moment ago with this one in their group have the state that this one
    will have: then there is nothing to take over. Of peers that are all about to start, after a
    restart of the whole swarm, the most advanced gives its state to the others; before the first
    round it is the first by name, if their initial parameters differ.

    Args:
        replicas: the other peers of this peer's stage.
        as_started: this peer's digests as they will be once it starts with all that may join.
    """
    known = [
        member
        for member in replicas
        if member.health is Health.ALIVE
        and member.phase is not Phase.STARTING
        and len(member.digests) == len(me.digests)
    ]
    started = [member for member in known if member.phase is not Phase.READY]
    # In pairs, peers that have started wait for the others before their first step: until then they
    # have what this peer has.
    wait = plan.exchange == "pairs" and all(_position(m) == _position(me) for m in started)
    under_way = bool(started) and not wait and all(m.digests != as_started for m in started)
    ahead = [
        member
        for member in known
        if any(
            theirs.version and theirs.rank > mine.rank
            for theirs, mine in zip(member.digests, me.digests, strict=True)
        )
    ]
    donors = ahead or (started if under_way else [])
    if not donors and not any(digest.version for digest in me.digests):
        # All are about to begin: where their models were drawn apart, that of most has it, of
        # several the first by name.
        ready = [me, *(member for member in known if member.phase is Phase.READY)]
        held = Counter(member.digests for member in ready)
        first = min(ready, key=lambda member: (-held[member.digests], member.peer))
        donors = [first] if first.digests != me.digests else []
    donor = max(donors, key=lambda m: [digest.rank for digest in m.digests], default=None)
    return TakeOver(under_way, donor)


def have_started(others: Iterable[Member]) -> list[Member]:
    """The peers that train, or are done and wait for this peer, whose stage is made again."""
    return [m for m in others if m.live and m.phase in (Phase.TRAINING, Phase.DONE)]


def any_has_begun(others: Iterable[Member]) -> bool:
    """Whether a peer is known to have trained in this run, be it gone by now."""
    return any(member.phase in (Phase.TRAINING, Phase.DONE) for member in others)


def may_follow(started: Sequence[Member], as_started: tuple[Digest, ...], since_s: float) -> bool:
    """Whether to start after others that have, where this peer does not count itself.

    They must have started with the same peers; or with others, and then `since_s` ago or longer.
    """
    known = any(member.digests == as_started for member in started)
    return bool(started) and (known or since_s >= _ALONE_S)


def all_agree(me: Member, others: Iterable[Member], plan: Plan) -> bool:
    """Whether all have come to the end of the run, with the same state in each stage.

    Peers that have not begun do not count, unless one alone serves its stage. In pairs without a
    consensus at the end the states differ by design.
    """
    live = [member for member in others if member.live]
    begun = [member for member in live if member.phase is not Phase.STARTING]
    one_anchor = plan.exchange == "mean" or plan.consensus
    return {member.stage for member in live} <= {member.stage for member in (me, *begun)} and all(
        member.phase is Phase.DONE
        and (member.digests == me.digests or not one_anchor or member.stage != me.stage)
        for member in (me, *begun)  # what this peer has made last may not be known here yet
    )


def all_leave(me: Member, others: Iterable[Member], plan: Plan, steps: int) -> bool:
    """Whether the loops of all have ended before the run's last step, with one state where there is
    one.

    Args:
        steps: of the run. A peer that has come to the mean after them has seen all loops end.
    """
    one_anchor = plan.exchange == "mean"
    return all(
        at_end(member, steps)
        or (member.phase is Phase.LEAVING and (member.digests == me.digests or not one_anchor))
        for member in others
        if member.live and member.phase is not Phase.STARTING
    )


def at_end(member: Member, steps: int) -> bool:
    """Whether a peer has come to the mean that ends a run of so many steps before these are taken:
    as a round it has their number."""
    return any(digest.version >= steps for digest in member.digests)


def _position(member: Member) -> tuple[int, ...]:
    return (member.step, *(digest.version for digest in member.digests))
