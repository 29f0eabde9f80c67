"""From what peers have told of themselves to routes, the same on every peer that has heard the same.

A schedule is named by a hash of all that it is made of, so that peers can tell whether they plan
with the same measurements. Nobody leads: who has heard something else plans differently for an
iteration or two, which costs time and nothing else.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

from algorithms.skippipe.cost import BACKWARD_RATIO, LOSS_RATIO, Costs, Links
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.route import Route, Rules
from algorithms.skippipe.routing import PRESETS
from worker.exchange import Offload
from worker.membership import Card
from worker.stages.config import StagesConfig
from worker.stages.context import StageContext, serves
from worker.stages.profile import Profile
from worker.stages.visit import Hop

_RECOMPUTED = 1.0 + BACKWARD_RATIO  # a backward does its forward again
_USUAL_FORWARD_S = 0.01
_USUAL_RATE = 2.5e6  # bytes/s
_USUAL_BYTES = 100_000
_USUAL_MEMORY = 3


@dataclass(frozen=True)
class Table:
    """The peers that serve, in the order of their numbers, and what routes are planned on.

    `stages` are those that have a replica: a pipeline's stage n is the model's stages[n].
    """

    peers: tuple[str, ...]
    stages: tuple[int, ...]
    pipeline: Pipeline
    name: int


class Schedule:
    """This peer's routes. io thread only."""

    def __init__(self, context: StageContext, offload: Offload) -> None:
        self._context, self._offload = context, offload
        self._cards: tuple[tuple[str, int, int, bytes], ...] = ()
        self._table: Table | None = None

    @property
    def name(self) -> int:
        """Of the schedule that this peer would plan with now."""
        return schedule_name(self._context.cards())

    def table(self) -> Table | None:
        """None while no replica of stage 0 is there."""
        cards = [card for card in self._context.cards() if serves(card)]
        told = tuple((card.peer, card.epoch, card.stage, card.profile) for card in cards)
        if told != self._cards or self._table is None:
            self._cards, self._table = told, table_of(cards)
        return self._table

    async def routes(self, iteration: int) -> tuple[list[tuple[Hop, ...]], int]:
        """(the route of each of this peer's microbatches behind stage 0, the schedule's name)."""
        context, table = self._context, self.table()
        count = context.config.microbatches
        if table is None or context.me not in table.peers:
            return [()] * count, self.name
        me = table.peers.index(context.me)
        origins = table.pipeline.stages[0]
        work = _planner(table, context.config, context.seed, iteration)
        routes = await self._offload(work)
        mine = [
            tuple(
                Hop(table.stages[table.pipeline.stage_of[p]], table.peers[p]) for p in r.peers[1:]
            )
            for r in routes
            if r.peers[0] == me
        ]
        assert len(mine) == count and me in origins
        return mine, table.name


def schedule_name(cards: Iterable[Card]) -> int:
    """A hash of who serves what, and of what each has measured."""
    digest = xxhash.xxh3_64()
    for card in sorted((card for card in cards if serves(card)), key=lambda card: card.peer):
        digest.update(f"{card.peer}/{card.epoch}/{card.stage}/{len(card.profile)}/".encode())
        digest.update(card.profile)
    return digest.intdigest()


def table_of(cards: Sequence[Card]) -> Table | None:
    """What routes are planned on; what nobody has measured is taken to be as usual."""
    cards = sorted(cards, key=lambda card: card.peer)
    stages = sorted({card.stage for card in cards})
    if not stages or stages[0] != 0:
        return None
    profiles = [Profile.unpack(card.profile) for card in cards]
    sizes = [profile.visit_bytes for profile in profiles if profile.visit_bytes]
    message_bytes = max(sizes, default=_USUAL_BYTES)
    links = links_of([card.peer for card in cards], profiles)
    forward_s = _filled([p.forward_s for p in profiles], _USUAL_FORWARD_S)
    usual_s = statistics.median(forward_s)
    costs = Costs(
        delay_s=links.delay_s(),
        transfer_s=links.transfer_s(message_bytes),
        forward_s=np.array(forward_s),
        backward_s=np.array(_filled([p.backward_s for p in profiles], _RECOMPUTED * usual_s)),
        loss_s=np.array(_filled([p.loss_s for p in profiles], LOSS_RATIO * usual_s)),
    )
    memory = tuple(profile.memory or _USUAL_MEMORY for profile in profiles)
    numbered = {
        stage: tuple(n for n, card in enumerate(cards) if card.stage == stage) for stage in stages
    }
    pipeline = Pipeline(stages=tuple(numbered.values()), memory=memory, costs=costs)
    return Table(tuple(c.peer for c in cards), tuple(stages), pipeline, schedule_name(cards))


def _filled(seconds: Sequence[float], usual_s: float) -> list[float]:
    """The median of what is known in place of zeros."""
    known = [s for s in seconds if s > 0]
    usual_s = statistics.median(known) if known else usual_s
    return [s or usual_s for s in seconds]


def links_of(peers: Sequence[str], profiles: Sequence[Profile]) -> Links:
    """Both ends measure a latency, and the shorter one is the link's; a rate is the receiver's."""
    known_s = [s for profile in profiles for s in profile.latency_s.values()]
    rates = [rate for profile in profiles for rate in profile.rate_bytes_per_s.values() if rate]
    usual_s = statistics.median(known_s) if known_s else 0.0
    usual_rate = statistics.median(rates) if rates else _USUAL_RATE
    count = len(peers)
    latency_s, rate = np.full((count, count), usual_s), np.full((count, count), usual_rate)
    for i, sender in enumerate(peers):
        for j, receiver in enumerate(peers):
            told = [
                profile.latency_s[other]
                for profile, other in ((profiles[i], receiver), (profiles[j], sender))
                if other in profile.latency_s
            ]
            if told:
                latency_s[i, j] = min(told)
            rate[i, j] = profiles[j].rate_bytes_per_s.get(sender) or usual_rate
    return Links(latency_s=latency_s, rate_bytes_per_s=rate)


def planned_rules(config: StagesConfig, table: Table, iteration: int) -> Rules:
    """The iteration's rules, for the stages that have a replica."""
    rules = config.rules(iteration)
    missing = config.count - len(table.stages)
    return Rules(
        stages=len(table.stages), visited=max(1, min(len(table.stages), rules.visited - missing))
    )


def _planner(
    table: Table, config: StagesConfig, seed: int, iteration: int
) -> Callable[[], Sequence[Route]]:
    rules = planned_rules(config, table, iteration)
    # Origins take turns, so that a fixed lane is an origin's own.
    origins = tuple(table.pipeline.stages[0]) * config.microbatches
    # Searched routes are searched once; a few kinds of them even out what does not divide.
    kind = iteration % max(1, rules.stages - 1) if config.routing == "skip" else iteration
    drawn = 0 if config.routing in ("full", "stochastic") else seed + kind
    routing = config.routing if rules.stages > 1 else "full"
    return lambda: _planned(table.name, table.pipeline, rules, origins, routing, drawn)


@lru_cache(maxsize=64)
def _planned(
    name: int,
    pipeline: Pipeline,
    rules: Rules,
    origins: tuple[int, ...],
    routing: str,
    seed: int,
) -> Sequence[Route]:
    return PRESETS[routing](pipeline, rules, origins, seed)
