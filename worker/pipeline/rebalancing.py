"""Which peer serves which stage: a newcomer's choice, stages without a replica, and moves.

Every peer decides by itself, from the same members, so that one of them moves and no other. What
peers know may differ for as long as gossip takes: the same peer has to be the one to move for a
while before it does.

Ref: Petals, arXiv:2209.01188: a joining server takes the blocks with the least throughput, and
moves when that gains enough; ours: a stage is never left without a replica.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import STATUS_BYTES
from murmuration.worker import wire
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline.profile import Profile
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.training.mailbox import StageMove
from murmuration.worker.transport import Method, Transport, TransportError

_MOVE_GAIN = 1.2  # by which factor the slowest stage's throughput must rise
_ASK_S = 5.0
_MOST_ASKED = 3

_PATIENCE_S = 2.0  # with a stage that has no replica, and with the peer that is to move there
_END_S = 20.0  # without stage 0: time for one of its replicas to start again
_EVEN_S = 20.0  # that a stage is slower: newcomers go there by themselves
_TURN_S = 20.0  # for a peer that has left to move, before another is chosen
_LOOK_S = 2.0  # between two choices of movers: large swarms have news all the time


def stage_to_join(throughput: Sequence[float]) -> int:
    """The stage with the least throughput (of all its replicas); the first of equals."""
    return min(range(len(throughput)), key=lambda stage: (throughput[stage], stage))


def stage_to_move_to(peer: int, stages: Sequence[Mapping[int, float]]) -> int | None:
    """The slowest stage, if a peer should leave its own for it.

    Args:
        stages: of each stage, the throughput of each of its replicas.
    """
    here = next(stage for stage, replicas in enumerate(stages) if peer in replicas)
    totals = [sum(replicas.values()) for replicas in stages]
    there = stage_to_join(totals)
    if there == here or len(stages[here]) == 1:
        return None
    after = list(totals)
    after[here] -= stages[here][peer]
    after[there] += stages[here][peer]
    return there if min(after) >= _MOVE_GAIN * min(totals) else None


def slowest_stage(members: Sequence[object], stages: StagesConfig) -> int:
    """The stage with the least throughput for its share of the routes; the first of equals.

    A peer that has not measured its speed counts as the median of those that have. Where nobody
    has, it is the stage with the fewest replicas.

    Args:
        members: of a status document.
    """
    serving: list[list[float]] = [[] for _ in range(stages.count)]
    for member in members:
        if not isinstance(member, Mapping) or member.get("health") not in ("alive", "suspect"):
            continue
        stage, speed = member.get("stage"), member.get("visits_per_s")
        if isinstance(stage, int) and 0 <= stage < stages.count:
            serving[stage].append(speed if isinstance(speed, int | float) and speed > 0 else 0.0)
    known = [speed for each in serving for speed in each if speed]
    usual = statistics.median(known) if known else 1.0
    totals = [sum(speed or usual for speed in each) for each in serving]
    # Stage 0 is in all routes, the others are in their share of them.
    share = (stages.rules(1).visited - 1) / max(1, stages.count - 1)
    return stage_to_join([totals[0], *(total / share for total in totals[1:])])


async def members_at(transport: Transport, address: str) -> Sequence[object]:
    """As a peer knows them; a coordinator, which does not measure, only says which peers to ask.

    Raises TransportError, WireError.
    """
    document = await _status(transport, address)
    members = _listed(document)
    if isinstance(document, Mapping) and document.get("kind") == "coordinator":
        there = [m for m in members if isinstance(m, Mapping) and m.get("health") == "alive"]
        for member in there[:_MOST_ASKED]:
            with suppress(TransportError, wire.WireError):
                if known := _listed(await _status(transport, str(member.get("address")))):
                    return known
    return members


def _listed(document: object) -> Sequence[object]:
    members = document.get("members") if isinstance(document, Mapping) else None
    return members if isinstance(members, list) else []


async def _status(transport: Transport, address: str) -> object:
    request = pb.StatusRequest().SerializeToString()
    raw = await transport.call(address, Method.STATUS, request, _ASK_S)
    return wire.unpack_document(wire.parse(pb.StatusReply, raw).document, STATUS_BYTES)


def served_stages(members: Sequence[Member]) -> set[int]:
    """The stages with a replica that lives, or that has ended its run by the schedule."""
    return {member.stage for member in members if member.live or member.phase is Phase.DONE}


class OrphanedStages:
    """Warns of stages without a replica, once each; sans-I/O. Times are monotonic seconds."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._since: dict[int, float] = {}
        self._warned: set[int] = set()

    def tick(self, members: Sequence[Member], now: float) -> dict[int, str]:
        """New warnings by stage; a second one only of a stage that was served in between."""
        served = served_stages(members)
        orphaned = [stage for stage in range(self._stages) if stage not in served]
        self._since = {stage: self._since.get(stage, now) for stage in orphaned}
        self._warned.intersection_update(orphaned)
        lines: dict[int, str] = {}
        for stage, since in self._since.items():
            if now - since >= _PATIENCE_S and stage not in self._warned:
                self._warned.add(stage)
                then = "routes leave it out" if stage else "nobody begins microbatches"
                lines[stage] = f"stage {stage} has no replica left: {then}"
        return lines

    def ends(self, now: float) -> bool:
        """Whether stage 0 has been gone for so long, as of the last tick, that the run is over."""
        return now - self._since.get(0, now) >= _END_S


class StageAssignment:
    """The peers that train and their stages, and which of them had better serve another.

    Of those that could move it is the last by name.

    Args:
        members: those peers; stages: how many there are.
    """

    def __init__(self, members: Iterable[Member], stages: int) -> None:
        self._members = sorted(members, key=lambda member: member.peer)
        self._stage_of = [member.stage for member in self._members]
        self._stages = stages

    def movers_to(self, orphaned: Sequence[int]) -> dict[int, str]:
        """The peer that would rebuild each of these stages, from the stage with the most replicas;
        from stage 0 last. A stage that nobody can be spared for is left out."""
        movers: dict[int, str] = {}
        for stage in orphaned:
            if not (spare := self._spare()):
                break
            mover = spare[0]
            self._stage_of[mover] = stage
            movers[stage] = self._members[mover].peer
        return movers

    def mover_to_slowest(self) -> tuple[str, int] | None:
        """(peer, stage): of the peers whose move makes the slowest stage faster by enough. Stage 0
        is left alone."""
        numbers = [n for n, stage in enumerate(self._stage_of) if stage > 0]
        speeds = {n: Profile.unpack(self._members[n].profile).visits_per_s for n in numbers}
        if not all(speeds.values()):
            speeds = dict.fromkeys(speeds, 1.0)
        serving = [
            {n: speeds[n] for n in numbers if self._stage_of[n] == stage}
            for stage in range(1, self._stages)
        ]
        moves = {n: stage_to_move_to(n, serving) for n in reversed(numbers)}
        gaining = [n for n, stage in moves.items() if stage is not None]
        if not gaining:
            return None
        to = 1 + next(stage for stage in moves.values() if stage is not None)
        return self._members[gaining[0]].peer, to

    def _spare(self) -> list[int]:
        replicas = Counter(self._stage_of)
        most = max(replicas.values(), default=0)
        if most < 2:
            return []
        fullest = {stage for stage, count in replicas.items() if count == most}
        able = (fullest - {0}) or fullest
        spare = [n for n in reversed(range(len(self._members))) if self._stage_of[n] in able]
        return sorted(spare, key=lambda n: self._stage_of[n])


@dataclass(frozen=True)
class _Turn:
    mover: str
    since: float


@dataclass(frozen=True)
class _Choice:
    """Args: at: when; members: what it was made from; orphaned: the stages that want a replica;
    movers: the peer to move to each of them; even: a peer to move to a slower stage, and which."""

    at: float
    members: object
    orphaned: Sequence[int]
    movers: Mapping[int, str]
    even: tuple[str, int] | None


class Rebalancer:
    """When this peer moves, to an orphaned stage or to one that is far slower; sans-I/O.

    Times are monotonic seconds.
    """

    def __init__(self, me: str, stages: int) -> None:
        self._me, self._stages = me, stages
        self._turns: dict[int, _Turn] = {}
        self._even: _Turn | None = None
        self._choice: _Choice | None = None

    def tick(self, members: Sequence[Member], now: float) -> StageMove | None:
        """Where this peer is to move; None to stay.

        A stage is orphaned when all its replicas are gone; one that has ended its run is not. Stage
        0, where microbatches begin and end, is not rebuilt, and no peer leaves it for speed.
        """
        live = [member for member in members if member.live]
        served = served_stages(members)
        orphaned = [stage for stage in range(1, self._stages) if stage not in served]
        training = [member for member in live if member.phase is Phase.TRAINING]
        here = {member.peer for member in training}
        # A peer that has left to move is waited for: it counts as gone until it is back.
        turns = {
            stage: turn
            for stage, turn in self._turns.items()
            if stage in orphaned and turn.mover not in here and now - turn.since <= _TURN_S
        }
        choice = self._choose(training, [stage for stage in orphaned if stage not in turns], now)
        for stage, mover in choice.movers.items():
            turn = self._turns.get(stage)
            if turn is not None and turn.mover == mover:
                turns[stage] = turn
            elif mover in here:
                turns[stage] = _Turn(mover, now)
        self._turns = turns
        for stage, turn in turns.items():
            if turn.mover == self._me and now - turn.since >= _PATIENCE_S:
                return StageMove(stage, orphaned=True)
        stable = len(training) == len(live) and all(m.health is Health.ALIVE for m in live)
        return self._even_out(choice.even if stable and not orphaned else None, now)

    def _choose(self, training: Sequence[Member], orphaned: Sequence[int], now: float) -> _Choice:
        """A new one only where something has changed, and not all the time."""
        seen = [(member.peer, member.epoch, member.stage, member.profile) for member in training]
        last = self._choice
        changed = last is not None and last.members != seen and now - last.at >= _LOOK_S
        if last is None or last.orphaned != orphaned or changed:
            assignment = StageAssignment(training, self._stages)
            even = None if orphaned else assignment.mover_to_slowest()
            last = _Choice(now, seen, orphaned, assignment.movers_to(orphaned), even)
            self._choice = last
        return last

    def _even_out(self, found: tuple[str, int] | None, now: float) -> StageMove | None:
        if found is None:
            self._even = None
            return None
        mover, stage = found
        if self._even is None or self._even.mover != mover:
            self._even = _Turn(mover, now)
        if mover == self._me and now - self._even.since >= _EVEN_S:
            return StageMove(stage, orphaned=False)
        return None
