"""One of this peer's own rounds: every shard to its reducer, and every reduction back.

A shard goes to the first usable peer in its rendezvous order that everybody reaches. A broken
stream is tried again at the same peer, resuming where it was; when membership doubts that peer, or
knows that the link to it is cut, the next takes over. The round succeeds when all shards are
reduced, and fails as a whole at its deadline or when a reducer says that it cannot succeed. The
machine ends by emitting `Succeeded` or `Failed` once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.exchange.types import (
    Failed,
    GivenUp,
    RoundConfig,
    RoundTick,
    ShardKey,
    Succeeded,
    Suspect,
    View,
    ViewUpdated,
)

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Reduced:
    """The reduction of a shard is here, complete and verified."""

    shard: int
    attempt: int


@dataclass(frozen=True)
class Redirected:
    """The asked peer sees a live peer above itself for this shard."""

    shard: int
    attempt: int
    peer: str


@dataclass(frozen=True)
class Broken:
    """The try ended without an answer; another may succeed. `link`: the link is at fault."""

    shard: int
    attempt: int
    reason: str
    link: bool


@dataclass(frozen=True)
class Refused:
    """The reducer says that this round cannot succeed for this peer."""

    shard: int
    attempt: int
    reason: str


Event = RoundTick | ViewUpdated | Reduced | Redirected | Broken | Refused | GivenUp

# ------------------------------------------------------------------------------------ actions


@dataclass(frozen=True)
class OpenExchange:
    """Send the shard to the peer and await its reduction; `resumed`: a try had begun there."""

    key: ShardKey
    peer: str
    attempt: int
    resumed: bool


@dataclass(frozen=True)
class CancelExchange:
    key: ShardKey
    attempt: int


Action = OpenExchange | CancelExchange | Suspect | Succeeded | Failed


@dataclass
class _Shard:
    target: str = ""
    attempt: int = 0
    open: bool = False
    reduced: bool = False
    retry_at: float = 0.0
    last_reason: str = ""
    tried: str = ""


class Contributing:
    """Round `round` of fragment `fragment` at this peer.

    Args:
        orders: per shard the peers that may reduce it, best first
            (`algorithms.grouping.reducer_orders`).
        deadline: monotonic time (s) at which the round is given up.
    """

    def __init__(
        self,
        me: str,
        fragment: int,
        round_: int,
        orders: Sequence[Sequence[str]],
        view: View,
        config: RoundConfig,
        deadline: float,
    ) -> None:
        self._me, self.fragment, self.round = me, fragment, round_
        self._orders, self._view, self._config = orders, view, config
        self._deadline = deadline
        self._shards = [_Shard() for _ in orders]
        self._ended = False

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The reducers whose answer is missing."""
        return tuple(sorted({s.target for s in self._shards if not s.reduced and s.target}))

    def step(self, event: Event, now: float) -> list[Action]:
        """Takes one event at monotonic time `now` (s) and says what to do."""
        if self._ended:
            return []
        actions: list[Action] = []
        match event:
            case RoundTick():
                pass
            case ViewUpdated(view):
                self._view = view
            case Reduced(shard, attempt):
                if state := self._current(shard, attempt):
                    state.reduced, state.open = True, False
            case Redirected(shard, attempt, peer):
                if state := self._current(shard, attempt):
                    state.open = False
                    state.last_reason = f"{state.target} leaves it to {peer}"
                    # Our own view decides; where it agrees, go there at once.
                    best = self._best(shard)
                    state.retry_at = now if best == peer else now + self._config.retry_s
            case Broken(shard, attempt, reason, link):
                if state := self._current(shard, attempt):
                    state.open, state.last_reason = False, reason
                    state.retry_at = now + self._config.retry_s
                    if link:
                        actions.append(Suspect(state.target))
            case Refused(shard, attempt, reason):
                if self._current(shard, attempt):
                    return actions + self._fail(reason)
            case GivenUp(reason):
                return self._fail(reason)
        actions += self._advance(now)
        if all(state.reduced for state in self._shards):
            self._ended = True
            actions.append(Succeeded())
        elif now >= self._deadline:
            reasons = {s.last_reason for s in self._shards if not s.reduced and s.last_reason}
            actions += self._fail("; ".join(["the round's deadline has passed", *sorted(reasons)]))
        return actions

    # --------------------------------------------------------------------------------- inside

    def _current(self, shard: int, attempt: int) -> _Shard | None:
        state = self._shards[shard]
        return state if state.open and state.attempt == attempt else None

    def _best(self, shard: int) -> str | None:
        return self._view.reducer(self._orders[shard])

    def _lost(self, peer: str) -> bool:
        """Whether a stream to the peer is not worth waiting for. That somebody else does not reach
        it is no reason: what has been sent there counts."""
        return not (self._view.usable(peer) and self._view.reach(self._me, peer))

    def _key(self, shard: int) -> ShardKey:
        return ShardKey(self.fragment, self.round, shard)

    def _advance(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for shard, state in enumerate(self._shards):
            if state.reduced:
                continue
            if state.open and not self._lost(state.target):
                continue
            best = self._best(shard)
            if state.open and best != state.target:
                actions.append(CancelExchange(self._key(shard), state.attempt))
                state.open, state.retry_at = False, now
            if state.open or best is None or now < state.retry_at:
                continue
            state.target, state.open = best, True
            state.attempt += 1
            actions.append(
                OpenExchange(self._key(shard), best, state.attempt, resumed=state.tried == best)
            )
            state.tried = best
        return actions

    def _fail(self, reason: str) -> list[Action]:
        self._ended = True
        waiting_for = self.waiting_for
        actions: list[Action] = [
            CancelExchange(self._key(shard), state.attempt)
            for shard, state in enumerate(self._shards)
            if state.open
        ]
        return [*actions, Failed(reason, waiting_for)]
