"""From what peers have told of themselves to this peer's routes.

The same measurements give the same table everywhere, and a table the same routes: those of `full`,
`random` and `stochastic` at once, those of `skip` when a search is over. Nobody leads, and nobody
waits: meanwhile an origin goes on with routes of its own choice, and so does one that has heard
something else, for an iteration or two. That costs time and nothing else. Each visit names the
table that its origin knew when the iteration began, so that peers which know another gossip with
that origin. One whose search is not over yet disagrees with nobody, and neither does one whose
table was this peer's a moment ago: figures change while visits are under way.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from algorithms.skippipe.route import MAX_JUMP, Route, Rules
from algorithms.skippipe.routing import PRESETS, origins_in_turns, random
from algorithms.skippipe.search import search_routes
from worker.exchange.context import Offload
from worker.membership import Member
from worker.pipeline.config import StagesConfig
from worker.pipeline.context import StageContext, serves
from worker.pipeline.network_snapshot import NetworkSnapshot, links_document, table_name, table_of
from worker.pipeline.stage_call import Hop

_EFFORT_S = 0.5  # of a search, which takes the train thread's time
_LAG_S = 10.0  # that visits may still name the table before
_MOST_BEFORE = 256  # tables in that time


@dataclass(frozen=True)
class _Planned:
    """All origins' routes, with the table that they are on: an older one while a search runs."""

    table: NetworkSnapshot
    routes: Sequence[Route]


class RoutePlanner:
    """This peer's routes. io thread only.

    Training does not wait for a search: until it has found routes for what was measured last, those
    found before go on, or random ones where they would not be served any more.
    """

    def __init__(self, context: StageContext, offload: Offload) -> None:
        self._context, self._offload = context, offload
        self._told: tuple[tuple[str, int, int, bytes], ...] | None = None
        self._name = 0
        self._replaced: dict[int, float] = {}  # when, by the name of the table; the latest last
        self._table: NetworkSnapshot | None = None
        self._found: dict[int, _Planned] = {}
        self._failed: dict[int, int] = {}  # the table that no routes were found for, by kind
        self._searching: asyncio.Task[None] | None = None

    @property
    def name(self) -> int:
        """Of the measurements that this peer would plan with now."""
        self.look()
        return self._name

    def look(self) -> None:
        """Takes what has been told since the last look."""
        members = _serving(self._context.members())
        told = tuple(
            (member.peer, member.epoch, member.stage, member.profile) for member in members
        )
        if told == self._told:
            return
        if self._told is not None:
            self._replaced.pop(self._name, None)
            self._replaced[self._name] = self._context.clock()
        if len(self._replaced) > _MOST_BEFORE:
            del self._replaced[next(iter(self._replaced))]
        self._told, self._name = told, table_name(members)

    def knows(self, name: int) -> bool:
        """Whether this peer would plan with the table of that name, or would have a moment ago."""
        if name == self.name:
            return True
        replaced_s = self._replaced.get(name)
        return replaced_s is not None and self._context.clock() - replaced_s <= _LAG_S

    @property
    def document(self) -> dict[str, object] | None:
        """The measurements that this peer has planned with at last."""
        return links_document(self._table, self._context.config) if self._table else None

    def routes(self, iteration: int) -> tuple[list[tuple[Hop, ...]], int]:
        """(the route of each of this peer's microbatches behind stage 0, the name of the table)."""
        context, table = self._context, self._current()
        count = context.config.microbatches
        if table is None or context.me not in table.peers:
            return [()] * count, self.name
        planned = self._planned(table, iteration)
        me = planned.table.peers.index(context.me)
        mine = [_hops(planned.table, route) for route in planned.routes if route.origin == me]
        assert len(mine) == count, "every origin begins as many microbatches"
        return mine, table.name

    async def close(self) -> None:
        if self._searching is not None:
            self._searching.cancel()
            await asyncio.gather(self._searching, return_exceptions=True)

    def _current(self) -> NetworkSnapshot | None:
        """What was told last; None while no replica of stage 0 is there."""
        name = self.name
        if self._table is None or self._table.name != name:
            self._table = table_of(_serving(self._context.members()))
        return self._table

    def _planned(self, table: NetworkSnapshot, iteration: int) -> _Planned:
        config, seed = self._context.config, self._context.seed
        rules = planned_rules(config, table, iteration)
        origins = origins_in_turns(table.pipeline, config.microbatches)
        if config.routing != "skip" or rules.stages == 1:
            routing = PRESETS[config.routing]
            routes = routing(table.pipeline, rules, origins, seed + iteration)
            return _Planned(table, routes)
        # A few kinds of searched routes even out what does not divide.
        kind = -1 if rules.visited == rules.stages else iteration % (rules.stages - 1)
        before = self._found.get(kind)
        if before is not None and before.table.name == table.name:
            return before
        idle = self._searching is None or self._searching.done()
        if idle and self._failed.get(kind) != table.name:
            work = self._search(kind, table, rules, origins, seed + kind)
            self._searching = asyncio.get_running_loop().create_task(work)
        if before is not None and _served_alike(before.table, table):
            return before
        drawn = random(table.pipeline, rules, origins, seed + iteration)
        return _Planned(table, drawn)

    async def _search(
        self, kind: int, table: NetworkSnapshot, rules: Rules, origins: Sequence[int], seed: int
    ) -> None:
        try:
            found = await self._offload(
                lambda: search_routes(
                    table.pipeline,
                    rules,
                    origins,
                    seed=seed,
                    effort_s=_EFFORT_S,
                    shared_uplinks=True,
                )
            )
        except Exception as error:  # whatever it is, training goes on with the routes it has
            self._failed[kind] = table.name
            text = f"no routes were searched: {type(error).__name__}: {error}"
            self._context.log({"event": "warning", "text": text})
        else:
            self._found[kind] = _Planned(table, found.routes)


def _serving(members: Sequence[Member]) -> list[Member]:
    return [member for member in members if serves(member)]


def _served_alike(before: NetworkSnapshot, now: NetworkSnapshot) -> bool:
    """Whether the same peers serve the same stages, so that nobody refuses a hop."""
    return (before.peers, before.stages, before.pipeline.stages) == (
        now.peers,
        now.stages,
        now.pipeline.stages,
    )


def _hops(table: NetworkSnapshot, route: Route) -> tuple[Hop, ...]:
    """What of a route lies behind its origin."""
    stage_of, peers = table.pipeline.stage_of, table.peers
    return tuple(Hop(table.stages[stage_of[peer]], peers[peer]) for peer in route.peers[1:])


def planned_rules(config: StagesConfig, table: NetworkSnapshot, iteration: int) -> Rules:
    """The iteration's rules, for the stages that have a replica."""
    stages = len(table.stages)
    whole = config.rules(iteration)
    fewest = 1 + -(-(stages - 1) // MAX_JUMP)  # what is left may be too little to skip as much
    visited = max(fewest, stages - (whole.stages - whole.visited))
    spread = min(whole.spread, visited - fewest, stages - visited)
    return Rules(stages=stages, visited=visited, spread=spread)
