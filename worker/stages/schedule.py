"""From what peers have told of themselves to routes: the same wherever the same was heard.

A schedule is named by a hash of all that it is made of, so that peers can tell whether they plan
with the same measurements. Nobody leads: who has heard something else plans differently for an
iteration or two, which costs time and nothing else.
"""

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from algorithms.skippipe.cost import BACKWARD_RATIO, LOSS_RATIO, Costs, Links
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.prediction import origins_in_turns
from algorithms.skippipe.route import MAX_JUMP, Route, Rules
from algorithms.skippipe.routing import PRESETS, random
from algorithms.skippipe.search import search_routes
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
_EFFORT_S = 0.5  # of a search, which takes the train thread's time


@dataclass(frozen=True)
class Table:
    """The peers that serve, in the order of their numbers, and what routes are planned on.

    `stages` are those that have a replica: a pipeline's stage n is the model's stages[n].
    """

    peers: tuple[str, ...]
    stages: tuple[int, ...]
    pipeline: Pipeline
    links: Links
    visit_bytes: int
    name: int


class Schedule:
    """This peer's routes. io thread only.

    Training does not wait for a search: until it has found routes for what was measured last, those
    found before go on, or random ones where peers have come or gone.
    """

    def __init__(self, context: StageContext, offload: Offload) -> None:
        self._context, self._offload = context, offload
        self._told: tuple[tuple[str, int, int, bytes], ...] = ()
        self._table: Table | None = None
        self._found: dict[int, tuple[Table, Sequence[Route]]] = {}
        self._searching: asyncio.Task[None] | None = None

    @property
    def name(self) -> int:
        """Of the schedule that this peer would plan with now."""
        return schedule_name(self._context.cards())

    @property
    def document(self) -> dict[str, object] | None:
        """The measurements that this peer has planned with at last."""
        return links_document(self._table, self._context.config) if self._table else None

    def routes(self, iteration: int) -> tuple[list[tuple[Hop, ...]], int]:
        """(the route of each of this peer's microbatches behind stage 0, the schedule's name)."""
        context, table = self._context, self._current()
        count = context.config.microbatches
        if table is None or context.me not in table.peers:
            return [()] * count, self.name
        table, routes = self._routes(table, iteration)
        me = table.peers.index(context.me)
        mine = [_hops(table, route) for route in routes if route.origin == me]
        assert len(mine) == count, "every origin begins as many microbatches"
        return mine, table.name

    async def close(self) -> None:
        if self._searching is not None:
            self._searching.cancel()
            await asyncio.gather(self._searching, return_exceptions=True)

    def _current(self) -> Table | None:
        """What was told last; None while no replica of stage 0 is there."""
        cards = [card for card in self._context.cards() if serves(card)]
        told = tuple((card.peer, card.epoch, card.stage, card.profile) for card in cards)
        if told != self._told or self._table is None:
            self._told, self._table = told, table_of(cards)
        return self._table

    def _routes(self, table: Table, iteration: int) -> tuple[Table, Sequence[Route]]:
        config, seed = self._context.config, self._context.seed
        rules = planned_rules(config, table, iteration)
        origins = origins_in_turns(table.pipeline, config.microbatches)
        if config.routing != "skip" or rules.stages == 1:
            routing = PRESETS[config.routing]
            return table, routing(table.pipeline, rules, origins, seed + iteration)
        # A few kinds of searched routes even out what does not divide.
        kind = -1 if rules.visited == rules.stages else iteration % (rules.stages - 1)
        before, routes = self._found.get(kind, (None, ()))
        if before is not None and before.name == table.name:
            return table, routes
        if self._searching is None or self._searching.done():
            work = self._search(kind, table, rules, origins, seed + kind)
            self._searching = asyncio.get_running_loop().create_task(work)
        if before is not None and before.peers == table.peers and before.stages == table.stages:
            return before, routes
        return table, random(table.pipeline, rules, origins, seed + iteration)

    async def _search(
        self, kind: int, table: Table, rules: Rules, origins: Sequence[int], seed: int
    ) -> None:
        found = await self._offload(
            lambda: search_routes(
                table.pipeline, rules, origins, seed=seed, effort_s=_EFFORT_S, shared_uplinks=True
            )
        )
        self._found[kind] = (table, found.routes)


def links_document(table: Table, config: StagesConfig) -> dict[str, object]:
    """What `murmur plan --links` reads: plain values."""
    pipeline, costs = table.pipeline, table.pipeline.costs
    return {
        "peers": list(table.peers),
        "stage": [table.stages[stage] for stage in pipeline.stage_of],
        "latency_s": table.links.latency_s.tolist(),
        "rate_bytes_per_s": table.links.rate_bytes_per_s.tolist(),
        "forward_s": costs.forward_s.tolist(),
        "backward_s": costs.backward_s.tolist(),
        "loss_s": costs.loss_s.tolist(),
        "memory": list(pipeline.memory),
        "activation_bytes": table.visit_bytes,
        "microbatches": config.microbatches,
        "skip": config.skip,
    }


def _hops(table: Table, route: Route) -> tuple[Hop, ...]:
    """What of a route lies behind its origin."""
    stage_of, peers = table.pipeline.stage_of, table.peers
    return tuple(Hop(table.stages[stage_of[peer]], peers[peer]) for peer in route.peers[1:])


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
    return Table(
        peers=tuple(card.peer for card in cards),
        stages=tuple(stages),
        pipeline=pipeline,
        links=links,
        visit_bytes=message_bytes,
        name=schedule_name(cards),
    )


def _filled(seconds: Sequence[float], usual_s: float) -> list[float]:
    """The median of what is known in place of zeros."""
    known = [s for s in seconds if s > 0]
    usual_s = statistics.median(known) if known else usual_s
    return [s or usual_s for s in seconds]


def links_of(peers: Sequence[str], profiles: Sequence[Profile]) -> Links:
    """Both ends measure a latency, and the shorter one is the link's; a rate is the sender's."""
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
            rate[i, j] = profiles[i].rate_bytes_per_s.get(receiver) or usual_rate
    return Links(latency_s=latency_s, rate_bytes_per_s=rate)


def planned_rules(config: StagesConfig, table: Table, iteration: int) -> Rules:
    """The iteration's rules, for the stages that have a replica."""
    stages = len(table.stages)
    skipped = config.count - config.rules(iteration).visited
    fewest = 1 + -(-(stages - 1) // MAX_JUMP)  # what is left may be too little to skip as much
    return Rules(stages=stages, visited=max(fewest, stages - skipped))
