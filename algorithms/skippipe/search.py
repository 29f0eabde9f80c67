"""Who takes a microbatch through the stages: `full`, `random`, `stochastic`, and `skip` by search.

The search, for equal coverage, bounded memory and few collisions:

    root  every slot's best route by itself
    A     stages: surplus visits are banned until every stage is visited equally often
    B     memory: the same for peers, within the stages that A chose
    C     steps: routes trade replicas, stages or ways, or move a visit (local_search.py)

Each microbatch of an origin takes one of its slots in turn: as many as it has memory for. Waves of
microbatches repeat the slots' routes. The same arguments give the same routes everywhere.

Ref: arXiv:2506.10911 (random), arXiv:2502.19913 (skip), arXiv:2301.11913 section 3.2 (stochastic).
Ours in `stochastic`: all of an iteration are shared out before it begins, by averaged times; ties
go to the lower peer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise

import numpy as np

from murmuration.algorithms.skippipe import route as routing
from murmuration.algorithms.skippipe.local_search import Budget, Scores, local_search, slots_of
from murmuration.algorithms.skippipe.pipeline import Floats, Pipeline
from murmuration.algorithms.skippipe.route import Draws, Route, Routes, Rules

Routing = Callable[[Pipeline, Rules, Sequence[int], int], list[Route]]
"""(pipeline, rules, origins, seed) -> a route for each origin, which stands for one microbatch."""


class Planner:
    """Finds ascending routes of an exact length; a loop is each hop and visit there and back. It
    extends the best routes to each peer by one visit at a time, which is exact."""

    def __init__(self, pipeline: Pipeline, rules: Rules) -> None:
        costs, stage = pipeline.costs, np.array(pipeline.stage_of)
        self._rules = rules
        self.effort_s = 1e-5 + (rules.visited - 1) * (8e-6 + 1e-9 * pipeline.peers**2)
        self._return_s, jump = costs.edge_s + costs.edge_s.T, stage[None, :] - stage[:, None]
        allowed = (jump > 0) & (jump <= rules.max_jump)
        self._hop_s: Floats = np.where(allowed, self._return_s, np.inf)
        self._visit_s, self._loss_s = costs.forward_s + costs.backward_s, costs.loss_s
        self._everyone = np.arange(pipeline.peers)
        self._visits: list[float] = self._visit_s.tolist()
        self._returns: list[list[float]] = self._return_s.tolist()

    def best(self, origin: int, banned: Iterable[int] = ()) -> Route | None:
        """The route of the fastest loop without banned peers, if any; of equals by the lowest."""
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


EFFORT_S = 0.5  # of the train thread's time
WIDTH = 3

Limit = tuple[frozenset[int], int]
"""(peers, how many of the routes may visit one of them at most)"""


@dataclass(frozen=True)
class Draft:
    """A route for each slot, and the peers that each may not visit."""

    routes: Routes
    banned: tuple[frozenset[int], ...]


def search_routes(
    pipeline: Pipeline,
    rules: Rules,
    origins: Sequence[int],
    *,
    seed: int = 0,
    effort_s: float = EFFORT_S,
) -> list[Route]:
    """Searches routes for one iteration: one for each microbatch. Args: origins: of each
    microbatch; seed: of choices among equals and of trades; effort_s: where to stop, 0 gives an
    answer too."""
    budget, planner = Budget(effort_s), Planner(pipeline, rules)
    slots, slot_origins = slots_of(origins, pipeline)
    scores = Scores(pipeline, slots, budget)
    quota = routing.stage_quota(len(slot_origins), rules, seed)
    limits = routing.peer_limits(pipeline, quota)
    drawn = routing.even_stage_sets(len(slot_origins), rules, seed)
    alone = [planner.best(origin) for origin in slot_origins]
    root = Draft(tuple(route for route in alone if route), (frozenset(),) * len(alone))
    assert len(root.routes) == len(alone), "rules admit a route from every origin"
    others = list(enumerate(pipeline.stages))[1:]
    of_stages = [(frozenset(replicas), quota[stage]) for stage, replicas in others]
    of_peers = [(frozenset([peer]), limits[peer]) for _, each in others for peer in each]
    # A, and another draft whose stages are drawn.
    equally_visited = keep_limits([root], of_stages, planner, budget, share=0.25)
    chosen = [[route.stages(pipeline) for route in draft.routes] for draft in equally_visited]
    frozen = [_frozen(slot_origins, each, pipeline, planner) for each in (*chosen, drawn)]
    # B; where it finds nothing, visits are dealt out evenly.
    drafts = keep_limits(frozen, of_peers, planner, budget, share=0.5)
    candidates = [draft.routes for draft in drafts] or [
        _dealt(draft.routes, pipeline, limits) for draft in frozen
    ]
    first = min(candidates, key=scores.score)
    routes = local_search(first, pipeline, rules, scores, slots, limits, budget, seed)
    return [routes[slot] for slot in slots]


def _frozen(
    origins: Sequence[int], chosen: Sequence[tuple[int, ...]], pipeline: Pipeline, planner: Planner
) -> Draft:
    everyone = frozenset(range(pipeline.peers))
    routes, banned = [], []
    for origin, stages in zip(origins, chosen, strict=True):
        allowed = {peer for stage in stages for peer in pipeline.stages[stage]}
        banned.append(everyone - allowed)
        route = planner.best(origin, banned[-1])
        assert route is not None, "its stages keep the rules"
        routes.append(route)
    return Draft(tuple(routes), tuple(banned))


def _dealt(given: Routes, pipeline: Pipeline, limits: Sequence[int]) -> Routes:
    """The same stages; on each, the nearest replica that has room."""
    left, routes = list(limits), []
    for route in given:
        peers = [route.origin]
        for stage in route.stages(pipeline)[1:]:
            edges_s = pipeline.edges[peers[-1]]
            room = [peer for peer in pipeline.stages[stage] if left[peer] > 0]
            peers.append(min(room, key=lambda peer: (edges_s[peer], peer)))
            left[peers[-1]] -= 1
        routes.append(Route(tuple(peers)))
    return tuple(routes)


def keep_limits(
    drafts: Sequence[Draft],
    limits: Sequence[Limit],
    planner: Planner,
    budget: Budget,
    *,
    share: float,
) -> list[Draft]:
    """Drafts that keep all limits, best first. The surplus of the limit that is exceeded by most is
    banned first. The best few are followed."""

    def cost(draft: Draft) -> tuple[float, float]:
        loops_s = [planner.loop_s(route) for route in draft.routes]
        return max(loops_s), sum(loops_s)

    frontier = list(drafts)
    kept: list[Draft] = []
    while frontier and not kept and budget.has_left(share):
        children: dict[Routes, Draft] = {}
        for draft in frontier:
            surplus = [len(_visitors(draft, peers)) - most for peers, most in limits]
            if (most := max(surplus, default=0)) <= 0:
                kept.append(draft)
                continue
            for child in _branches(draft, limits[surplus.index(most)], planner, budget):
                children.setdefault(child.routes, child)
        frontier = sorted(children.values(), key=cost)[:WIDTH]
    return sorted(kept, key=cost)


def _visitors(draft: Draft, peers: frozenset[int]) -> list[int]:
    return [i for i, route in enumerate(draft.routes) if not peers.isdisjoint(route.peers)]


def _branches(draft: Draft, over: Limit, planner: Planner, budget: Budget) -> Iterator[Draft]:
    """Without the surplus: the fastest routes make a detour, or those whose detour is least."""
    peers, most = over
    visitors = _visitors(draft, peers)
    detours: dict[int, Route] = {}
    for index in visitors:
        route, banned = draft.routes[index], draft.banned[index] | peers
        budget.spent_s += planner.effort_s
        if (detour := planner.best(route.origin, banned)) is not None:
            detours[index] = detour
    surplus = len(visitors) - most
    if len(detours) < surplus:
        return
    before_s = {index: planner.loop_s(draft.routes[index]) for index in detours}
    more_s = {index: planner.loop_s(detours[index]) - before_s[index] for index in detours}
    for cost_s in (before_s, more_s):
        routes, banned_peers = list(draft.routes), list(draft.banned)
        for index in sorted(detours, key=lambda index: (cost_s[index], index))[:surplus]:
            routes[index] = detours[index]
            banned_peers[index] |= peers
        yield Draft(tuple(routes), tuple(banned_peers))


def full(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Fixed lanes: the n-th microbatch always goes by the n-th replica of a stage, in turns."""
    return [
        Route((origin, *(stage[lane % len(stage)] for stage in pipeline.stages[1:])))
        for lane, origin in enumerate(origins)
    ]


def random(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Every replica in turn, in drawn orders (NoLoCo); skips at random, but evenly."""
    draws = Draws(seed)
    limits = routing.peer_limits(pipeline, routing.stage_quota(len(origins), rules, seed))
    chosen, decks = routing.even_stage_sets(len(origins), rules, seed), []
    for replicas in pipeline.stages:  # each as often as its limit allows, dealt from the end
        turns = [
            draws.shuffled([peer for peer in replicas if limits[peer] > turn])
            for turn in range(max(limits[peer] for peer in replicas))
        ]
        decks.append([peer for turn in reversed(turns) for peer in turn])
    return [
        Route((origin, *(decks[stage].pop() for stage in stages[1:])))
        for origin, stages in zip(origins, chosen, strict=True)
    ]


def stochastic(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Each hop to the replica with the least accumulated expected time (SWARM)."""
    visit_s = (pipeline.costs.forward_s + pipeline.costs.backward_s).tolist()
    # For each stage a heap of (accumulated time, replica).
    queues = [[(0.0, peer) for peer in sorted(replicas)] for replicas in pipeline.stages[1:]]

    def choose(queue: list[tuple[float, int]]) -> int:
        accumulated_s, peer = queue[0]
        heapreplace(queue, (accumulated_s + visit_s[peer], peer))
        return peer

    return [Route((origin, *map(choose, queues))) for origin in origins]


def skip(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    return search_routes(pipeline, rules, origins, seed=seed)


ROUTINGS: dict[str, Routing] = {each.__name__: each for each in (full, random, stochastic, skip)}


def origins_in_turns(pipeline: Pipeline, microbatches: int) -> list[int]:
    """The origins of an iteration: the replicas of stage 0 in turns, each so many times."""
    return [*pipeline.stages[0]] * microbatches
