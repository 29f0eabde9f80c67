"""When a run starts and has ended, and whose state to fetch: before the start, and ever after.

All decide alike from the digests and phases that gossip tells. States are ordered by (version,
peers that hold it, contributors of the latest round, first of these peers by name). What most peers
share wins over that order, and a minority goes back to it. With pairs states differ by design;
there a peer that has fallen behind only moves on to where the others are in the schedule.

A state replaces a peer's own only where most of the contributors to its rounds hold it. Where no
state has so many, the one of at least as many as are on any other way may do, if it is no further
away than rounds usually lead (docs/adr/0035).
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.plan import Plan
from murmuration.worker.membership import Digest, Health, Member, Phase


def choose_take_over(
    me: Member, replicas: Iterable[Member], as_started: tuple[Digest, ...], plan: Plan
) -> tuple[bool, Member | None]:
    """Decides before the start: (whether a run is under way, from which replica to fetch state).

    Peers that have just started with this one in their group have the state that it will have
    (`as_started`): nothing is to be taken over. Of peers that are all about to start, after a
    restart of the swarm, the most advanced gives its state to the others.
    """
    alive = [m for m in replicas if m.health is Health.ALIVE and m.phase is not Phase.STARTING]
    known = [member for member in alive if len(member.digests) == len(me.digests)]
    started = [member for member in known if member.phase is not Phase.READY]
    # In pairs, peers that have started wait for the others before their first step: until then they
    # have what this peer has.
    positions = {(m.step, *(each.version for each in m.digests)) for m in (me, *started)}
    wait = plan.exchange == "pairs" and len(positions) == 1
    under_way = bool(started) and not wait and all(m.digests != as_started for m in started)
    rank = _ranking((member.peer, member.digests) for member in (me, *known))
    ahead = [
        member
        for member in known
        if any(
            theirs.version and rank(index, theirs) > rank(index, mine)
            for index, (theirs, mine) in enumerate(zip(member.digests, me.digests, strict=True))
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
    donor = max(donors, key=lambda m: [*map(rank, count(), m.digests)], default=None)
    return under_way, donor


def have_started(others: Iterable[Member]) -> list[Member]:
    """The peers that train, or are done and wait for this peer, whose stage is made again."""
    return [m for m in others if m.live and m.phase in (Phase.TRAINING, Phase.DONE)]


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


def _ranking(
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
    rank = _ranking([(me, mine), *((member.peer, member.digests) for member in begun)])
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
            first = next(iter(reasons.values()))
            best, best_rank = Repair(member, tuple(reasons), first), its_rank
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

    Args: voters: the others whose word counts (`electorate`). hash_of: of this peer's own state, by
    fragment and version; 0: not known. ended: this peer and all voters are done.

    Returns: All fragments of a donor, where in one more than half of all hold one state of an
    earlier version. At that version this peer had another state, or all have ended.
    """
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
    furthest of a peer, if most others are two rounds ahead in every fragment. None while a partner
    of a round that it has come to is no further: they have a round to hold."""
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


_WHO_SPEAKS = ({Phase.TRAINING}, {Phase.DONE, Phase.LEAVING}, {Phase.READY})


@dataclass(frozen=True)
class Electorate:
    """The others whose word counts, and whether this peer's own does (`counts_me`)."""

    others: tuple[Member, ...]
    counts_me: bool
    known: bool  # they have contributed to rounds of this peer; else these are all that train
    # As many as stay where they are may be enough; not for one that has just joined.
    may_tie: bool = True

    @property
    def size(self) -> int:
        return len(self.others) + self.counts_me


def electorate(
    mine: Sequence[Digest], phase: Phase, replicas: Iterable[Member], contributors: Collection[str]
) -> Electorate:
    """Says whose word counts for a peer with these digests. One that has closed no round since it
    began or joined follows most of those that train. Args: contributors: to its rounds."""
    alive = [m for m in replicas if m.health is Health.ALIVE and len(m.digests) == len(mine)]
    begun = [m for m in alive if m.phase is not Phase.READY or any(d.version for d in m.digests)]
    trains, has_rounds = phase is not Phase.READY, any(digest.version for digest in mine)
    found = [member for member in begun if member.peer in contributors]
    known = bool(found)
    for phases in _WHO_SPEAKS:
        found = found or [member for member in alive if member.phase in phases]
    all_ready = all(member.phase is Phase.READY for member in found)
    if phase is Phase.TRAINING and has_rounds and not contributors:
        return Electorate(tuple(found), counts_me=False, known=known, may_tie=False)
    counts_me = trains or (has_rounds and all_ready)
    return Electorate(tuple(found), counts_me, known, trains or has_rounds or all_ready)


@dataclass(frozen=True)
class Votes:
    """Counts what the electorate says of a donor's states."""

    among: Electorate
    holders: tuple[str, ...]  # others that hold them, or have held them
    keepers: int  # with this peer, on the other way that most follow (`most_on_a_way`)
    undecided: int  # those that do not know the states, or have not answered

    @property
    def majority(self) -> bool:
        return 2 * len(self.holders) > self.among.size

    @property
    def enough(self) -> bool:
        """Nobody is outnumbered by taking over the donor's."""
        return self.majority or (self.among.may_tie and len(self.holders) >= self.keepers)

    @property
    def lost(self) -> bool:
        """Whatever the undecided say yet, it is not enough."""
        most = len(self.holders) + self.undecided
        return 2 * most <= self.among.size and not (self.among.may_tie and most >= self.keepers)


# The hashes of the states that a peer has, or has had, by fragment and version; 0: not known.
Had = Mapping[tuple[int, int], int]


def confirms(had: Had, states: Mapping[int, FragmentState | Digest]) -> bool | None:
    """Tells whether a peer has had all these; None when it does not know some of them."""
    pairs = [(had.get((index, state.version), 0), state.hash) for index, state in states.items()]
    if any(hash_ not in (0, asked) for hash_, asked in pairs):
        return False
    return None if any(not hash_ for hash_, _ in pairs) else True


def most_on_a_way(at: Mapping[str, Mapping[int, Digest]], had: Mapping[str, Had]) -> int:
    """Counts the peers on the way that most are on; 1 at least. A way is all that a peer has `had`.
    On it are those that are there, and those that it has left behind. In some fragments these may
    be ahead of it, where they have had what it has there. Args: at: where each is, by fragment."""
    steps = {peer: sum(each.version for each in digests.values()) for peer, digests in at.items()}

    def one_way(peer: str, other: str) -> bool:
        return steps[other] <= steps[peer] and all(
            had[peer].get((index, theirs.version)) == theirs.hash
            or had[other].get((index, its.version)) == its.hash
            for (index, its), theirs in zip(at[peer].items(), at[other].values(), strict=True)
        )

    return max((1 + sum(o != p and one_way(p, o) for o in at) for p in at), default=1)
