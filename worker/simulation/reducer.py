"""The shards that a peer reduces: what its I/O does around `Reducing`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from torch import Tensor

from algorithms.codecs import Codec
from algorithms.diloco import mean_in_order
from algorithms.fragments import shard_bounds
from algorithms.grouping import reducer_orders
from worker.exchange.allreduce import reducer as shared
from worker.exchange.allreduce.reducer import Reducing
from worker.exchange.types import RoundTick, ShardKey, ViewUpdated
from worker.simulation.clock import Act
from worker.simulation.network import Stream
from worker.simulation.swarm import RUN, Group, Swarm

_TICK_S = 0.25


@lru_cache(maxsize=64)
def orders(group: Group) -> tuple[tuple[str, ...], ...]:
    """By shard, the peers that may reduce it, best first."""
    # One lap: more of them keep a link busy, which shared links are anyway.
    return reducer_orders(RUN, 0, group)


_bounds = lru_cache(maxsize=64)(shard_bounds)


@dataclass(frozen=True)
class Reduction:
    """A closed shard: whose mean, who lays out the next round, the mean itself (of all values)."""

    contributors: Group
    next_group: Group
    mean: Tensor
    size: int


@dataclass(eq=False)
class Visit:
    """One try of a contributor at a reducer, as the reducer sees it. No `stream`: itself."""

    key: ShardKey
    peer: int
    attempt: int
    group: Group
    values: Tensor
    tries: int
    size: int
    stream: Stream | None
    here: bool = False
    accepted: bool = False
    over: bool = False


@dataclass
class _Kept:
    """What a reducer keeps of an open shard: the values that are here, and the bytes of others."""

    values: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    came: dict[str, float] = field(default_factory=dict)


def _layout(_: int, group: Group) -> Sequence[Sequence[str]]:
    return orders(group)


def shard_bytes(codec: Codec, params: int, shard: int, shards: int) -> int:
    """Encoded, one of so many shards of all values."""
    start, stop = _bounds(params, shards, codec.block_elements)[shard]
    return codec.encoded_bytes(stop - start)


class Reducer:
    """Args:
    swarm, number: the peer that this belongs to.
    codec: of contributions and reductions.
    answer: takes what a visit has come to, at the contributor.
    """

    def __init__(
        self,
        swarm: Swarm,
        number: int,
        codec: Codec,
        answer: Callable[[Visit, shared.Decision, Reduction | None], None],
    ) -> None:
        self._swarm, self._number, self._codec, self._answer = swarm, number, codec, answer
        transfer_s = swarm.config.transfer_s(codec.encoded_bytes(swarm.scenario.params))
        self._machine = Reducing(swarm.names[number], _layout, swarm.config, [transfer_s])
        self._visits: dict[ShardKey, list[Visit]] = defaultdict(list)
        self._kept: dict[ShardKey, _Kept] = {}
        self._reductions: dict[ShardKey, Reduction] = {}
        self._ticking = False

    def viewed(self) -> None:
        """Membership has changed."""
        self.step(ViewUpdated(self._swarm.view(self._number)))

    def advanced(self, version: int, group: Group) -> None:
        """This peer has committed a version."""
        self.step(shared.Advanced(0, version, group))

    def learned(self, key: ShardKey, reduction: Reduction) -> None:
        """A reduction came from its reducer: keep it for others who may ask."""
        if key not in self._reductions:
            self._reductions[key] = reduction
            self.step(shared.Closed(key))

    def has(self, visit: Visit) -> float:
        """Bytes of these very values that an earlier try has left here."""
        kept = self._kept.get(visit.key)
        return kept.came.get(f"{visit.peer} {visit.tries}", 0.0) if kept else 0.0

    def keep(self, visit: Visit, came: float) -> None:
        """A try has broken off."""
        if (kept := self._kept.get(visit.key)) is not None:
            kept.came[f"{visit.peer} {visit.tries}"] = came

    def visited(self, visit: Visit) -> None:
        """A contributor has come."""
        self._visits[visit.key].append(visit)
        self._decide(visit)

    def took(self, visit: Visit) -> None:
        """Its contribution is here, all of it."""
        visit.here = True
        if visit.accepted:
            self._contributed(visit)

    def _decide(self, visit: Visit) -> None:
        mine = self._machine.group(0, visit.key.round)
        decision = self._machine.offer(visit.key, mine if mine == visit.group else None)
        match decision:
            case shared.Hold():
                pass
            case shared.Accept():
                visit.accepted = True
                kept = self._kept.setdefault(visit.key, _Kept())
                name = self._swarm.names[visit.peer]
                earlier = kept.values.get(name)
                if earlier is not None and earlier[0] != visit.tries:
                    del kept.values[name]
                    self.step(shared.Withdrawn(visit.key, name))
                if visit.here:
                    self._contributed(visit)
            case _:
                self._reply(visit, decision)

    def _contributed(self, visit: Visit) -> None:
        kept = self._kept.get(visit.key)
        if kept is None:
            return
        name = self._swarm.names[visit.peer]
        kept.values[name] = (visit.tries, visit.values)
        kept.came[f"{visit.peer} {visit.tries}"] = visit.size
        self.step(shared.Contributed(visit.key, name))
        self._tick_later()

    def _tick_later(self) -> None:
        """Ticks as long as a shard is open."""
        if not self._ticking and self._kept:
            self._ticking = True

            def tick() -> None:
                self._ticking = False
                self.step(RoundTick())
                self._tick_later()

            self._later(_TICK_S, tick)

    def step(self, event: shared.Event) -> None:
        """Gives the machine an event, and does what it says."""
        for action in self._machine.step(event, self._swarm.clock.now):
            match action:
                case shared.Compute(key, contributors, next_group):
                    self._average(key, contributors, next_group)
                case shared.Abandon(key, _):
                    self._kept.pop(key, None)
                    self._ask_again(key)
                case shared.Prune(_, round_):
                    self._forget(range(round_))
                case shared.Discard(_, round_):
                    self._forget(range(round_, round_ + 1))
        match event:
            case shared.Closed(key):
                self._kept.pop(key, None)
                self._ask_again(key)
            case shared.Advanced() | ViewUpdated():
                for key in list(self._visits):
                    self._ask_again(key)

    def _average(self, key: ShardKey, contributors: Group, next_group: Group) -> None:
        group = self._machine.group(0, key.round)
        assert group is not None, "a shard closes only when its group is known"
        values = self._kept.pop(key).values
        size = shard_bytes(self._codec, self._swarm.scenario.params, key.shard, len(group))
        mean = mean_in_order(values[peer][1] for peer in contributors)
        reduction = Reduction(contributors, next_group, mean, size)
        self._reductions[key] = reduction
        # After this step of the machine, which is still being carried out.
        self._later(0.0, partial(self.step, shared.Closed(key)))

    def _forget(self, rounds: range) -> None:
        for kept in (self._kept, self._reductions):
            for key in [key for key in kept if key.round in rounds]:
                del kept[key]

    def _ask_again(self, key: ShardKey) -> None:
        """What is to be said to those who wait for the shard, now that something has changed."""
        for visit in list(self._visits.get(key, ())):
            if visit.over:
                continue
            if visit.stream is not None and visit.stream.ended:
                visit.over = True
                self._visits[key].remove(visit)
            elif not visit.accepted:
                self._decide(visit)
            elif key in self._reductions:
                self._reply(visit, shared.Answer())
            elif key not in self._kept:
                decision = self._machine.offer(key, self._machine.group(0, key.round))
                if not isinstance(decision, shared.RedirectTo | shared.Refuse):
                    decision = shared.Refuse("again", "the shard has moved to another reducer")
                self._reply(visit, decision)
        if key in self._visits and not self._visits[key]:
            del self._visits[key]

    def _reply(self, visit: Visit, decision: shared.Decision) -> None:
        visit.over = True
        self._visits[visit.key].remove(visit)
        reduction = self._reductions.get(visit.key) if decision == shared.Answer() else None
        answer = partial(self._answer, visit, decision, reduction)
        if visit.stream is None:
            self._later(0.0, answer)
        else:
            visit.stream.send(self._number, answer, reduction.size if reduction else 0)

    def _later(self, delay_s: float, act: Act) -> None:
        self._swarm.clock.after(delay_s, lambda: self._swarm.act(self._number, act))
