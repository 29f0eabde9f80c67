"""Which peer serves which stage: a newcomer's choice, stages without a replica, and moves.

Every peer decides by itself, from the same members, so that one of them moves and no other. As
gossip takes time, it has to be the one to move for a while before it does.

Ref: Petals, arXiv:2209.01188: a joining server takes the blocks with the least throughput, and
moves when that gains enough. Ours: replicas are counted, as speeds are but claimed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import STATUS_BYTES
from murmuration.worker import wire
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.training.mailbox import StageMove
from murmuration.worker.transport import Method, Transport, TransportError

_MOVE_GAIN = 1.2  # by which factor the fewest replicas of a stage must rise
_ASK_S = 5.0
_MOST_ASKED = 3

_PATIENCE_S = 2.0  # with a stage that has no replica, and with the peer that is to move there
_END_S = 20.0  # without stage 0: time for one of its replicas to start again
_EVEN_S = 20.0  # that a stage has fewer: newcomers go there by themselves
_TURN_S = 20.0  # for a peer that has left to move, before another is chosen
_LOOK_S = 2.0  # between two choices of movers: large swarms have news all the time


def stage_in_need(members: Sequence[object], stages: StagesConfig) -> int:
    """The stage with the fewest replicas for its share of the routes, of the members of a status
    document; the first of equals."""
    serving = [0] * stages.count
    for member in members:
        if isinstance(member, Mapping) and member.get("health") in ("alive", "suspect"):
            stage = member.get("stage")
            if isinstance(stage, int) and 0 <= stage < stages.count:
                serving[stage] += 1
    # Stage 0 is in all routes, the others are in their share of them.
    share = (stages.rules(1).visited - 1) / max(1, stages.count - 1)
    replicas = [serving[0], *(count / share for count in serving[1:])]
    return replicas.index(min(replicas))


async def members_at(transport: Transport, address: str) -> Sequence[object]:
    """The members, asked of one where a coordinator answers. Raises TransportError, WireError."""
    kind, members = await _status(transport, address)
    if kind == "coordinator":
        there = [m for m in members if isinstance(m, Mapping) and m.get("health") == "alive"]
        for member in there[:_MOST_ASKED]:
            with suppress(TransportError, wire.WireError):
                _, known = await _status(transport, str(member.get("address")))
                if known:
                    return known
    return members


async def _status(transport: Transport, address: str) -> tuple[object, Sequence[object]]:
    request = pb.StatusRequest().SerializeToString()
    raw = await transport.call(address, Method.STATUS, request, _ASK_S)
    document = wire.unpack_document(wire.parse(pb.StatusReply, raw).document, STATUS_BYTES)
    members = document.get("members")
    return document.get("kind"), members if isinstance(members, list) else []


def served_stages(members: Sequence[Member]) -> set[int]:
    """The stages with a replica that lives, or that has ended its run by the schedule."""
    return {member.stage for member in members if member.live or member.phase is Phase.DONE}


class OrphanedStages:
    """Warns of stages without a replica, once each; sans-I/O. Times are monotonic seconds."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._since: dict[int, float] = {}
        self._warned: set[int] = set()

    def tick(self, members: Sequence[Member], now: float) -> list[int]:
        """The stages to warn of; a second time only if a stage was served in between."""
        served = served_stages(members)
        orphaned = [stage for stage in range(self._stages) if stage not in served]
        self._since = {stage: self._since.get(stage, now) for stage in orphaned}
        lasting = {stage for stage, since in self._since.items() if now - since >= _PATIENCE_S}
        new = sorted(lasting - self._warned)
        self._warned = self._warned.intersection(orphaned) | lasting
        return new

    def ends(self, now: float) -> bool:
        """Says whether stage 0 was gone for so long, at the last tick, that the run is over."""
        return now - self._since.get(0, now) >= _END_S


def movers_to(orphaned: Sequence[int], training: Iterable[Member]) -> dict[int, str]:
    """The peer to rebuild each of these stages: the last by name of the stage with the most
    replicas; of stage 0 last. A stage that nobody can be spared for is left out."""
    movers: dict[int, str] = {}
    stage_of = {member.peer: member.stage for member in training}
    for stage in orphaned:
        replicas = Counter(stage_of.values())
        most = max(replicas.values(), default=0)
        if most < 2:
            break
        fullest = {each for each, count in replicas.items() if count == most}
        spared = min(fullest - {0} or fullest)
        mover = max(peer for peer, at in stage_of.items() if at == spared)
        stage_of[mover], movers[stage] = stage, mover
    return movers


def mover_to_fewest(training: Iterable[Member], stages: int) -> tuple[str, int] | None:
    """(peer, stage): the last by name of the stages but 0 with the most replicas, and the one with
    the fewest, if that gains enough. Two at least stay behind."""
    stage_of = {member.peer: member.stage for member in training if member.stage > 0}
    replicas = Counter(stage_of.values())
    fewest, there = min((replicas[stage], stage) for stage in range(1, stages))
    most = max(replicas.values(), default=0)
    if most < fewest + 2 or fewest + 1 < _MOVE_GAIN * fewest:
        return None
    return max(peer for peer, at in stage_of.items() if replicas[at] == most), there


Turn = tuple[str, float]  # a peer that is to move, since when


class Rebalancer:
    """Decides when this peer moves to another stage; sans-I/O. Times are monotonic seconds."""

    def __init__(self, me: str, stages: int) -> None:
        self._me, self._stages = me, stages
        self._turns: dict[int, Turn] = {}
        self._even: Turn | None = None
        # Chosen then from these members: who moves to each stage that wants a replica.
        self._chosen_at, self._wanting = -math.inf, list[int]()
        self._seen: object = None
        self._movers: Mapping[int, str] = {}
        self._fewer: tuple[str, int] | None = None

    def tick(self, members: Sequence[Member], now: float) -> StageMove | None:
        """The move of this peer; None to stay. A stage is orphaned when all its replicas are gone
        before they have ended their run. Stage 0 is not rebuilt, nor left for another."""
        live, served = [member for member in members if member.live], served_stages(members)
        orphaned = [stage for stage in range(1, self._stages) if stage not in served]
        training = [member for member in live if member.phase is Phase.TRAINING]
        here = {member.peer for member in training}
        # A peer that has left to move is waited for: it counts as gone until it is back.
        turns = {
            stage: (mover, since)
            for stage, (mover, since) in self._turns.items()
            if stage in orphaned and mover not in here and now - since <= _TURN_S
        }
        wanting = [stage for stage in orphaned if stage not in turns]
        seen = [(member.peer, member.start_ms, member.stage) for member in training]
        # Chosen again only where something has changed, and not all the time.
        news = seen != self._seen and now - self._chosen_at >= _LOOK_S
        if wanting != self._wanting or news:
            self._chosen_at, self._seen, self._wanting = now, seen, wanting
            self._movers = movers_to(wanting, training)
            self._fewer = None if wanting else mover_to_fewest(training, self._stages)
        for stage, mover in self._movers.items():
            turn = self._turns.get(stage)
            if turn is not None and turn[0] == mover:
                turns[stage] = turn
            elif mover in here:
                turns[stage] = mover, now
        self._turns = turns
        for stage, (mover, since) in turns.items():
            if mover == self._me and now - since >= _PATIENCE_S:
                return StageMove(stage, orphaned=True)
        stable = len(training) == len(live) and all(m.health is Health.ALIVE for m in live)
        if self._fewer is None or orphaned or not stable:
            self._even = None
            return None
        mover, stage = self._fewer
        if self._even is None or self._even[0] != mover:
            self._even = mover, now
        if mover == self._me and now - self._even[1] >= _EVEN_S:
            return StageMove(stage, orphaned=False)
        return None
