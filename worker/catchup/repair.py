"""Anti-entropy: when this peer's state differs from the others', whose to fetch.

States are ordered by (version, peers that hold it, contributors of the latest round, hash), so
everyone agrees which of two to ask for. What most peers share wins over that order, and a minority
goes back to it (`votes`, docs/adr/0035). With pairs states differ by design; there a peer that has
fallen behind only moves on to where the others are in the schedule.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from murmuration.worker.membership import Digest, Health, Member, Phase

_WINDOW_S = 60.0
_SAMPLE_S = 1.0
_FASTER = 16
_SLACK_ROUNDS = 4  # between what is gossiped and what is so


@dataclass(frozen=True)
class Repair:
    """Fetch these fragments from the donor."""

    donor: Member
    fragments: tuple[int, ...]
    reason: str


class JumpLimit:
    """How far the others can be by now, as far as this peer's own pace tells.

    A peer that says it is further ahead is passed over. The others may have taken rounds while this
    peer took none, since the start of a window; nobody is `_FASTER` times as fast as this peer has
    ever been in it.

    Args:
        inner_steps: H of the plan.
    """

    def __init__(self, inner_steps: int) -> None:
        self._inner_steps = inner_steps
        self._steps: deque[tuple[float, int]] = deque()
        self._fastest_s = math.inf

    def advance(self, step: int, step_s: float, now: float) -> None:
        """This peer trains, and is at this step at monotonic time `now` (s). Args: step_s: what an
        inner step takes it, 0 while that is not known."""
        if step_s > 0:
            self._fastest_s = min(self._fastest_s, step_s)
        if not self._steps or now >= self._steps[-1][0] + _SAMPLE_S:
            self._steps.append((now, step))
        while len(self._steps) > 1 and self._steps[1][0] <= now - _WINDOW_S:
            self._steps.popleft()

    def possible(self, member: Member, mine: Sequence[Digest], step: int, now: float) -> bool:
        """Whether the member can be where it says, when this peer is at `mine` and `step`."""
        if not self._steps or self._fastest_s == math.inf:
            return True
        began, at = self._steps[0]
        steps = _SLACK_ROUNDS * self._inner_steps + _FASTER * (now - began) / self._fastest_s
        rounds = steps / self._inner_steps
        return member.step - at <= steps and all(
            theirs.version - my.version <= rounds
            for theirs, my in zip(member.digests, mine, strict=False)
        )


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
    begun = [
        member
        for member in members
        if member.health is Health.ALIVE and member.phase not in (Phase.STARTING, Phase.READY)
    ]
    held = Counter(
        (index, digest.version, digest.hash)
        for digests in (mine, *(member.digests for member in begun))
        for index, digest in enumerate(digests)
    )

    def rank(index: int, digest: Digest) -> tuple[int, ...]:
        holders = held[index, digest.version, digest.hash]
        return (digest.version, holders, digest.contributors, digest.hash)

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
    """Decides whether to go back to the state that most peers share.

    Peers that were cut off go on among themselves, and may be ahead of the others when they are
    back. The others have none of their rounds: so more of them would give up theirs.

    Args:
        mine: as in `choose_repair`.
        voters: the others whose word counts (`votes.electorate`).
        hash_of: the hash of this peer's own state, by fragment and version; 0 for not known.
        ended: this peer and all voters are done: nobody comes to where this peer is any more.

    Returns:
        All fragments of a donor, where in one more than half of all hold one state of an earlier
        version. At that version this peer had another state, or all have ended.
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
