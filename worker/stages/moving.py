"""Who leaves a stage for another: for one that nobody serves, or for one that is far slower.

Every peer decides by itself, from the same cards, so that one of them moves and no other.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.skippipe.moving import stage_to_move_to
from worker.membership import Card, Health, Phase
from worker.stages.profile import Profile
from worker.stages.unserved import served_stages

_PATIENCE_S = 2.0  # that a stage is bare
_EVEN_S = 20.0  # that a stage is slower: newcomers go there by themselves
_TURN_S = 20.0  # for whoever is asked to move, before another is


@dataclass(frozen=True)
class Moved:
    """Args: stage: to serve; bare: whether nobody serves it, so that it has to be made anew."""

    stage: int
    bare: bool


@dataclass(frozen=True)
class _Turn:
    mover: str
    since: float


class Moving:
    """One peer's eye on the stages; sans-I/O. Times are monotonic seconds."""

    def __init__(self, me: str, stages: int) -> None:
        self._me, self._stages = me, stages
        self._bare: dict[int, _Turn] = {}
        self._slow: _Turn | None = None

    def look(self, cards: Sequence[Card], now: float) -> Moved | None:
        """Where this peer is to move; None to stay.

        A stage is bare when all its replicas are gone; one that ended its run is not. Stage 0 holds
        what microbatches begin and end with: it is not made anew, and nobody leaves it for speed.
        """
        live = [card for card in cards if card.live]
        served = served_stages(cards)
        bare = [stage for stage in range(1, self._stages) if stage not in served]
        training = [card for card in live if card.phase is Phase.TRAINING]
        turns: dict[int, _Turn] = {}
        for stage, mover in zip(bare, _spare(training), strict=False):
            turn = self._bare.get(stage)
            if turn is None or now - turn.since > _TURN_S:
                turn = _Turn(mover, now)
            turns[stage] = turn
        self._bare = turns
        for stage, turn in turns.items():
            if turn.mover == self._me and now - turn.since >= _PATIENCE_S:
                return Moved(stage, bare=True)
        return None if bare else self._to_even_out(live, training, now)

    def _to_even_out(
        self, live: Sequence[Card], training: Sequence[Card], now: float
    ) -> Moved | None:
        settled = len(training) == len(live) and all(c.health is Health.ALIVE for c in live)
        found = _faster_elsewhere(training, self._stages) if settled else None
        if found is None:
            self._slow = None
            return None
        mover, stage = found
        if self._slow is None or self._slow.mover != mover:
            self._slow = _Turn(mover, now)
        if mover == self._me and now - self._slow.since >= _EVEN_S:
            return Moved(stage, bare=False)
        return None


def _spare(cards: Sequence[Card]) -> list[str]:
    """Who can be spared: first the last by name on the stage with the most replicas."""
    left = Counter(card.stage for card in cards)
    spare = sorted(cards, key=lambda card: card.peer, reverse=True)
    movers = []
    while spare:
        card = min(spare, key=lambda card: (-left[card.stage], card.stage == 0, card.stage))
        if left[card.stage] < 2:
            break
        movers.append(card.peer)
        spare.remove(card)
        left[card.stage] -= 1
    return movers


def _faster_elsewhere(cards: Sequence[Card], stages: int) -> tuple[str, int] | None:
    """(who, to which stage): the first, from behind, whose move makes the slowest stage faster."""
    numbered = sorted((card for card in cards if card.stage > 0), key=lambda card: card.peer)
    speeds = {n: _visits_per_s(card) for n, card in enumerate(numbered)}
    if not all(speeds.values()):
        speeds = dict.fromkeys(speeds, 1.0)
    serving = [
        {n: speeds[n] for n, card in enumerate(numbered) if card.stage == stage}
        for stage in range(1, stages)
    ]
    for n in reversed(range(len(numbered))):
        move = stage_to_move_to(n, serving)
        if move.stage is not None:
            return numbered[n].peer, move.stage + 1
    return None


def _visits_per_s(card: Card) -> float:
    """0 when the peer has not measured it."""
    profile = Profile.unpack(card.profile)
    visit_s = profile.forward_s + profile.backward_s
    return 1 / visit_s if profile.forward_s > 0 and profile.backward_s > 0 else 0.0
