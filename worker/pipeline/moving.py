"""When a peer leaves its stage for another: for one that nobody serves, or one that is far slower.

Every peer decides by itself, from the same cards, so that one of them moves and no other. Cards may
differ for as long as gossip takes: who is to move is the same for a while before it does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.membership import Health, Member, Phase
from worker.pipeline.orphaned import served_stages
from worker.pipeline.rebalancing import Rebalancing, StageExchange

_PATIENCE_S = 2.0  # that a stage is bare, and that the same peer is to move there
_EVEN_S = 20.0  # that a stage is slower: newcomers go there by themselves
_TURN_S = 20.0  # for whoever has left to move, before another is asked
_LOOK_S = 2.0  # between two computations of who is to move: large swarms tell news all the time


@dataclass(frozen=True)
class Moved:
    """Args: stage: to serve; bare: whether nobody serves it, so that it has to be made anew."""

    stage: int
    bare: bool


@dataclass(frozen=True)
class _Turn:
    mover: str
    since: float


@dataclass(frozen=True)
class _Looked:
    """Args: at: when; told: what was looked at; bare: the stages that want a replica;
    movers: who is to move to each of them; even: who is to move to a slower stage, and to which."""

    at: float
    told: object
    bare: Sequence[int]
    movers: Mapping[int, str]
    even: tuple[str, int] | None


class Moving:
    """One peer's eye on the stages; sans-I/O. Times are monotonic seconds."""

    def __init__(self, me: str, stages: int, exchange: StageExchange) -> None:
        self._me, self._stages, self._exchange = me, stages, exchange
        self._bare: dict[int, _Turn] = {}
        self._slow: _Turn | None = None
        self._looked: _Looked | None = None

    def look(self, members: Sequence[Member], now: float) -> Moved | None:
        """Where this peer is to move; None to stay.

        A stage is bare when all its replicas are gone; one that ended its run is not. Stage 0 holds
        what microbatches begin and end with: it is not made anew, and nobody leaves it for speed.
        """
        live = [member for member in members if member.live]
        served = served_stages(members)
        bare = [stage for stage in range(1, self._stages) if stage not in served]
        training = [member for member in live if member.phase is Phase.TRAINING]
        here = {member.peer for member in training}
        # Who has left to move is waited for: its card says that it is gone until it is back.
        turns = {
            stage: turn
            for stage, turn in self._bare.items()
            if stage in bare and turn.mover not in here and now - turn.since <= _TURN_S
        }
        looked = self._look(training, [stage for stage in bare if stage not in turns], now)
        for stage, mover in looked.movers.items():
            turn = self._bare.get(stage)
            if turn is not None and turn.mover == mover:
                turns[stage] = turn
            elif mover in here:
                turns[stage] = _Turn(mover, now)
        self._bare = turns
        for stage, turn in turns.items():
            if turn.mover == self._me and now - turn.since >= _PATIENCE_S:
                return Moved(stage, bare=True)
        settled = len(training) == len(live) and all(c.health is Health.ALIVE for c in live)
        return self._to_even_out(looked.even if settled and not bare else None, now)

    def _look(self, training: Sequence[Member], bare: Sequence[int], now: float) -> _Looked:
        """Computed anew only where something has changed, and not all the time."""
        told = [(member.peer, member.epoch, member.stage, member.profile) for member in training]
        last = self._looked
        if last is None or last.bare != bare or (last.told != told and now - last.at >= _LOOK_S):
            placing = Rebalancing(training, self._stages, self._exchange)
            even = None if bare else placing.to_slowest()
            self._looked = last = _Looked(now, told, bare, placing.to_bare(bare), even)
        return last

    def _to_even_out(self, found: tuple[str, int] | None, now: float) -> Moved | None:
        if found is None:
            self._slow = None
            return None
        mover, stage = found
        if self._slow is None or self._slow.mover != mover:
            self._slow = _Turn(mover, now)
        if mover == self._me and now - self._slow.since >= _EVEN_S:
            return Moved(stage, bare=False)
        return None
