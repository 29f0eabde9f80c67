"""What must hold in every schedule of rounds in small groups, and who was left behind in it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol.meeting_parts import (
    CONFIG,
    LATENCY_S,
    ROUND_S,
    TICK_S,
    TRANSFER_S,
    Attendance,
    Group,
)
from tests.protocol.meeting_schedules import MeetingWorld

# Of a round that nothing disturbs, once the last of the group has come: the header or what was held
# back, the values, and who staged says so.
EXCHANGE_S = LATENCY_S[1] + TRANSFER_S[1] + LATENCY_S[1]
# What the two generals cannot help: a lost message, a peer that died or froze with it.
EXCUSES = frozenset({"broken", "dead", "frozen"})


@dataclass(frozen=True)
class LeftBehind:
    """`peer` gave up a round that `partner` has applied, because of `cause`."""

    peer: str
    partner: str
    round: int
    cause: str


def violations(world: MeetingWorld) -> list[str]:
    """Everything that must not be, in words; each starts with the name of its check."""
    checks = (twice, mixed, missing, unstaged, overdue, delayed, unsettled, torn)
    return [f"{check.__name__}: {text}" for check in checks for text in check(world)]


def twice(world: MeetingWorld) -> Iterator[str]:
    """No round is applied again, or after a later one."""
    for peer in world.peers.values():
        if peer.applied != sorted(set(peer.applied)):
            yield f"{peer.name} applies {peer.applied}"


def mixed(world: MeetingWorld) -> Iterator[str]:
    """All that is applied is of this round and group, and of the sender's anchor in it."""
    parts = {(part.peer, part.round): part for part in world.attendances}
    for part in _applied(world):
        for peer, value in part.values.items():
            sent = parts.get((peer, part.round))
            if sent is None or sent.group != part.group or sent.value != value:
                yield f"{part.peer} applies {value} of {peer} in round {part.round}"


def missing(world: MeetingWorld) -> Iterator[str]:
    """What is applied are the values of all of the group."""
    for part in _applied(world):
        if sorted(part.values) != sorted(part.group):
            yield f"{part.peer} applies {sorted(part.values)} of {part.group}"


def unstaged(world: MeetingWorld) -> Iterator[str]:
    """Nobody applies before all of its group hold everything."""
    staged = {(part.peer, part.round): part.staged_at for part in world.attendances}
    for part in _applied(world):
        for peer in part.group if len(part.group) > 1 else ():
            at = staged.get((peer, part.round))
            if at is None or at > (part.ended_at or 0.0):
                yield f"{part.peer} applies round {part.round} before {peer} holds everything"


def overdue(world: MeetingWorld) -> Iterator[str]:
    """A round ends by its limit for everyone that is there to see it."""
    gone = [touch for touch in world.touches if touch.kind in ("kill", "freeze")]
    for part in world.attendances:
        limit = part.began_at + ROUND_S + TICK_S
        if part.staged_at is not None:
            limit += CONFIG.patience_s + world.leads_s[part.peer] + CONFIG.retry_s
        late = part.ended_at is None or part.ended_at > limit
        if late and not any(t.disturbs((part.peer,), part.began_at, limit) for t in gone):
            yield f"{part.peer} is in round {part.round} until {part.ended_at}, not {limit}"


def delayed(world: MeetingWorld) -> Iterator[str]:
    """A group that no fault touches takes no longer than its own exchange, whatever others do."""
    for group, parts in _gatherings(world):
        if len(parts) < len(group):
            continue
        first, last = min(p.began_at for p in parts), max(p.began_at for p in parts)
        limit = last + EXCHANGE_S
        if last - first > CONFIG.patience_s - TICK_S:
            continue
        if any(touch.disturbs(group, first, limit) for touch in world.touches):
            continue
        for part in parts:
            if not part.succeeded or (part.ended_at or 0.0) > limit:
                yield f"{part.peer} in round {part.round} of {group}: {part.failed or 'too late'}"


def unsettled(world: MeetingWorld) -> Iterator[str]:
    """When nothing goes wrong any more, every round of every group succeeds."""
    rounds = range(world.first_quiet, world.last_round + 1)
    for peer in world.peers.values():
        for round_ in rounds if not peer.dead else ():
            if round_ not in peer.applied:
                yield f"{peer.name} does not apply round {round_}, long after the last fault"


def torn(world: MeetingWorld) -> Iterator[str]:
    """Who gives up what another applies has an excuse."""
    for each in left_behind(world):
        if each.cause not in EXCUSES:
            yield f"{each.partner} applies round {each.round}, {each.peer} does not: {each.cause}"


def left_behind(world: MeetingWorld) -> list[LeftBehind]:
    """Everyone that gave up a round which somebody of its group has applied."""
    found = []
    for group, parts in _gatherings(world):
        applied = [part for part in parts if part.succeeded]
        for part in parts:
            if part.failed and applied:
                cause = _cause(world, part, {p.peer: p for p in parts}, group)
                found.append(LeftBehind(part.peer, applied[0].peer, part.round, cause))
    return found


def _cause(
    world: MeetingWorld, part: Attendance, parts: dict[str, Attendance], group: Group
) -> str:
    """Why this peer had not heard that its partners hold everything."""
    assert part.ended_at is not None
    for touch in world.touches:
        if touch.kind in ("kill", "freeze") and touch.disturbs(group, part.began_at, part.ended_at):
            return {"kill": "dead", "freeze": "frozen"}[touch.kind]
    if any((peer, part.peer, part.round) in world.unheard for peer in part.waiting_for):
        return "broken"
    return part.failed


def _applied(world: MeetingWorld) -> list[Attendance]:
    return [part for part in world.attendances if part.succeeded]


def _gatherings(world: MeetingWorld) -> Iterator[tuple[Group, list[Attendance]]]:
    """Those that held a round as the same group."""
    found: dict[tuple[int, Group], list[Attendance]] = defaultdict(list)
    for part in world.attendances:
        found[part.round, part.group].append(part)
    for (_, group), parts in found.items():
        yield group, parts
