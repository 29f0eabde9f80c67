"""Route search for SkipPipe: equal coverage, bounded memory, few collisions.

    root  every slot's best route by itself
    A     stages: surplus visits are banned until every stage is visited equally often
    B     memory: the same for peers, within the stages that A chose
    C     steps: routes trade replicas, stages or ways, or move a visit (local_search.py)

Each microbatch of an origin takes one of its slots in turn: as many as it has memory for. Waves of
microbatches repeat the slots' routes. The event simulator judges. Nothing is measured by a clock:
the same arguments give the same routes everywhere.

A and B: where a limit is exceeded, the surplus is banned from there and planned again. The fastest
routes go first, as they can best afford a detour; in a second branch those whose detour is least.
The best few drafts are followed.

Ref: arXiv:2502.19913.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from murmuration.algorithms.skippipe.local_search import (
    Budget,
    LocalSearch,
    Scores,
    plan_effort_s,
    slots_of,
)
from murmuration.algorithms.skippipe.pipeline import Floats, Pipeline
from murmuration.algorithms.skippipe.route import (
    Route,
    Rules,
    even_stage_sets,
    peer_limits,
    stage_quota,
)


class Planner:
    """Finds ascending routes of an exact length.

    Both halves of a hop and of a visit are counted: what goes forward comes back. Extends the best
    routes to each peer by one visit at a time; exact, as a loop's cost is a sum over its hops.
    """

    def __init__(self, pipeline: Pipeline, rules: Rules) -> None:
        costs, stage = pipeline.costs, np.array(pipeline.stage_of)
        self._rules = rules
        self._return_s = costs.edge_s + costs.edge_s.T
        jump = stage[None, :] - stage[:, None]
        allowed = (jump > 0) & (jump <= rules.max_jump)
        self._hop_s: Floats = np.where(allowed, self._return_s, np.inf)
        self._visit_s = costs.forward_s + costs.backward_s
        self._loss_s = costs.loss_s
        self._everyone = np.arange(pipeline.peers)
        self._visits: list[float] = self._visit_s.tolist()
        self._returns: list[list[float]] = self._return_s.tolist()

    def best(self, origin: int, banned: Iterable[int] = ()) -> Route | None:
        """The route of the fastest loop; of equal ones, that by the lowest peers.

        Args:
            origin: a replica of stage 0.
            banned: peers that it may not visit.

        Returns:
            None if those that are left allow no route.
        """
        visit_s = self._visit_s.copy()
        visit_s[list(banned)] = np.inf
        loop_s = np.full(len(visit_s), np.inf)
        loop_s[origin] = 0.0
        came_from = []
        for _ in range(self._rules.visited - 1):
            extended_s = loop_s[:, None] + self._hop_s
            before = extended_s.argmin(axis=0)
            loop_s = extended_s[before, self._everyone] + visit_s
            came_from.append(before)
        loop_s = loop_s + self._return_s[:, origin]
        peer = int(loop_s.argmin())
        if not np.isfinite(loop_s[peer]):
            return None
        peers = [peer]
        for before in reversed(came_from):
            peers.append(int(before[peers[-1]]))
        return Route(tuple(reversed(peers)))

    def loop_s(self, route: Route) -> float:
        """A route's time if nobody else used its peers."""
        peers, returns = route.peers, self._returns
        hops_s = sum(returns[here][there] for here, there in pairwise(peers))
        visits_s = sum(self._visits[peer] for peer in peers)
        loss_s = float(self._loss_s[route.origin])
        return hops_s + returns[peers[-1]][route.origin] + visits_s + loss_s


EFFORT_S = 2.0
WIDTH = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer of a search.

    Args:
        routes: of each microbatch, in the order of the origins that were asked for.
        iteration_s: simulated.
        first_s: simulated, of the first routes that kept all limits.
        spent_s: effort, in seconds of one usual core, about; counted, not measured.
    """

    routes: tuple[Route, ...]
    iteration_s: float
    first_s: float
    spent_s: float


@dataclass(frozen=True)
class Limit:
    """Args: peers: whose visits count. most: how many of the routes may visit."""

    peers: frozenset[int]
    most: int


@dataclass(frozen=True)
class Draft:
    """A route for each slot, and the peers that each may not visit."""

    routes: tuple[Route, ...]
    banned: tuple[frozenset[int], ...]


def search_routes(
    pipeline: Pipeline,
    rules: Rules,
    origins: Sequence[int],
    *,
    seed: int = 0,
    effort_s: float = EFFORT_S,
    shared_uplinks: bool = False,
) -> Found:
    """Searches routes for one iteration.

    Args:
        origins: of each microbatch, replicas of stage 0.
        seed: of the choices among equals and of the trades.
        effort_s: where to stop; the answer is complete even at 0.
        shared_uplinks: as in `simulate`, for the times that decide.

    Raises:
        ValueError: other stages than the pipeline's, or an origin that is not on stage 0.
    """
    _check(pipeline, rules, origins)
    budget = Budget(effort_s)
    slots, slot_origins = slots_of(origins, pipeline)
    scores = Scores(pipeline, slots, budget, shared_uplinks=shared_uplinks)
    planner = Planner(pipeline, rules)
    quota = stage_quota(len(slot_origins), rules, seed)
    limits = peer_limits(pipeline, quota)
    drafts = _drafts(pipeline, rules, slot_origins, quota, limits, planner, budget, seed)
    first = min(drafts, key=lambda draft: scores.score(draft.routes))
    routes = LocalSearch(pipeline, rules, scores, slots, limits, budget, seed).run(first.routes)
    return Found(
        routes=tuple(routes[slot] for slot in slots),
        iteration_s=scores.score(routes)[0],
        first_s=scores.score(first.routes)[0],
        spent_s=budget.spent_s,
    )


def _check(pipeline: Pipeline, rules: Rules, origins: Sequence[int]) -> None:
    if rules.stages != len(pipeline.stages):
        raise ValueError(f"rules for {rules.stages} stages, a pipeline of {len(pipeline.stages)}")
    if not origins:
        raise ValueError("there is no microbatch to find a route for")
    if strange := set(origins) - set(pipeline.stages[0]):
        raise ValueError(f"peer {min(strange)} does not serve stage 0: no microbatch begins there")


def _drafts(
    pipeline: Pipeline,
    rules: Rules,
    slot_origins: Sequence[int],
    quota: Sequence[int],
    limits: Sequence[int],
    planner: Planner,
    budget: Budget,
    seed: int,
) -> list[Draft]:
    """Phases A and B; where they find nothing, visits are dealt out evenly."""
    free = frozenset[int]()
    plan_s = plan_effort_s(pipeline, rules.visited)
    stage_limits = [
        Limit(frozenset(pipeline.stages[stage]), quota[stage]) for stage in range(1, rules.stages)
    ]
    peer_loads = [
        Limit(frozenset([peer]), limits[peer])
        for replicas in pipeline.stages[1:]
        for peer in replicas
    ]
    drawn = even_stage_sets(len(slot_origins), rules, seed)
    alone = [planner.best(origin) for origin in slot_origins]
    root = Draft(tuple(route for route in alone if route), (free,) * len(alone))
    assert len(root.routes) == len(alone), "rules admit a route from every origin"
    equally_visited = keep_limits(
        [root], stage_limits, planner, budget, plan_effort_s=plan_s, share=0.25
    )
    chosen = [[route.stages(pipeline) for route in draft.routes] for draft in equally_visited]
    chosen.append(drawn)
    frozen = [_frozen(slot_origins, stages, pipeline, planner) for stages in chosen]
    held = keep_limits(frozen, peer_loads, planner, budget, plan_effort_s=plan_s, share=0.5)
    return held or [_dealt(draft, pipeline, limits) for draft in frozen]


def _frozen(
    origins: Sequence[int],
    chosen: Sequence[tuple[int, ...]],
    pipeline: Pipeline,
    planner: Planner,
) -> Draft:
    """Every slot by its best route within its stages."""
    everyone = frozenset(range(pipeline.peers))
    banned = []
    routes = []
    for origin, stages in zip(origins, chosen, strict=True):
        allowed = {peer for stage in stages for peer in pipeline.stages[stage]}
        banned.append(everyone - allowed)
        route = planner.best(origin, banned[-1])
        assert route is not None, "its stages keep the rules"
        routes.append(route)
    return Draft(tuple(routes), tuple(banned))


def _dealt(draft: Draft, pipeline: Pipeline, limits: Sequence[int]) -> Draft:
    """The same stages; on each, the nearest replica that has room."""
    left = list(limits)
    routes = []
    for route in draft.routes:
        peers = [route.origin]
        for stage in route.stages(pipeline)[1:]:
            edges_s = pipeline.edges[peers[-1]]
            room = [peer for peer in pipeline.stages[stage] if left[peer] > 0]
            peers.append(min(room, key=lambda peer: (edges_s[peer], peer)))
            left[peers[-1]] -= 1
        routes.append(Route(tuple(peers)))
    return Draft(tuple(routes), draft.banned)


def keep_limits(
    drafts: Sequence[Draft],
    limits: Sequence[Limit],
    planner: Planner,
    budget: Budget,
    *,
    plan_effort_s: float,
    share: float,
) -> list[Draft]:
    """Drafts that keep all limits, best first; empty if none was found within the effort."""
    frontier = list(drafts)
    kept: list[Draft] = []
    while frontier and not kept and budget.has_left(share):
        children: dict[tuple[Route, ...], Draft] = {}
        for draft in frontier:
            over = _worst(draft, limits)
            if over is None:
                kept.append(draft)
                continue
            for child in _branches(draft, over, planner, budget, plan_effort_s):
                children.setdefault(child.routes, child)
        ranked = sorted(children.values(), key=lambda draft: _cost(draft, planner))
        frontier = ranked[:WIDTH]
    return sorted(kept, key=lambda draft: _cost(draft, planner))


def _cost(draft: Draft, planner: Planner) -> tuple[float, float]:
    """(slowest route, sum of all routes)."""
    loops_s = [planner.loop_s(route) for route in draft.routes]
    return max(loops_s), sum(loops_s)


def _visitors(draft: Draft, limit: Limit) -> list[int]:
    return [i for i, route in enumerate(draft.routes) if not limit.peers.isdisjoint(route.peers)]


def _worst(draft: Draft, limits: Sequence[Limit]) -> Limit | None:
    """The limit that is exceeded by most; the first of equal ones."""
    surplus = [len(_visitors(draft, limit)) - limit.most for limit in limits]
    most = max(surplus, default=0)
    return limits[surplus.index(most)] if most > 0 else None


def _branches(
    draft: Draft,
    over: Limit,
    planner: Planner,
    budget: Budget,
    plan_effort_s: float,
) -> Iterator[Draft]:
    visitors = _visitors(draft, over)
    detours: dict[int, Route] = {}
    for index in visitors:
        route, banned = draft.routes[index], draft.banned[index] | over.peers
        detour = planner.best(route.origin, banned)
        budget.spend(plan_effort_s)
        if detour is not None:
            detours[index] = detour
    surplus = len(visitors) - over.most
    if len(detours) < surplus:
        return
    before_s = {index: planner.loop_s(draft.routes[index]) for index in detours}
    fastest = sorted(detours, key=lambda index: (before_s[index], index))
    least = sorted(
        detours, key=lambda index: (planner.loop_s(detours[index]) - before_s[index], index)
    )
    for order in (fastest, least):
        routes, banned_peers = list(draft.routes), list(draft.banned)
        for index in order[:surplus]:
            routes[index] = detours[index]
            banned_peers[index] |= over.peers
        yield Draft(tuple(routes), tuple(banned_peers))
