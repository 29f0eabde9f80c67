"""Routes change by small steps while the simulated iteration gets shorter: phase C of the search.

A step exchanges replicas, stages or ways between two routes, or moves one visit to another replica
of the stage that has room: the limits hold after it as before. Where no step has helped for long, a
few are made blindly from the best routes so far (iterated local search).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Draws, Route, Routes, Rules, keeps_rules
from murmuration.algorithms.skippipe.simulator import finish_times


@dataclass
class Budget:
    """Effort in seconds of one usual core, counted from operations: all machines stop alike."""

    effort_s: float
    spent_s: float = 0.0

    def has_left(self, share: float = 1.0) -> bool:
        return self.spent_s < share * self.effort_s


_VISIT_EFFORT_S = 2.5e-6  # of simulating half a visit
_DRAW_EFFORT_S = 3e-5
_PATIENCE = 15  # draws per slot
_BLIND_STEPS = 3

Pair = tuple[Route, Route]


def slots_of(origins: Sequence[int], pipeline: Pipeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The microbatches that an origin has in flight: (slot of each, origin of each slot)."""
    slot_at: dict[tuple[int, int], int] = {}
    begun, slots = Counter[int](), []
    for origin in origins:
        key = (origin, begun[origin] % pipeline.memory[origin])
        begun[origin] += 1
        slots.append(slot_at.setdefault(key, len(slot_at)))
    return tuple(slots), tuple(origin for origin, _ in slot_at)


class Scores:
    """Simulates an iteration with the slots' routes; each choice of routes once. Args: slots: of
    each microbatch; budget: counts the effort."""

    def __init__(self, pipeline: Pipeline, slots: Sequence[int], budget: Budget) -> None:
        self._pipeline, self._slots, self._budget = pipeline, slots, budget
        self._known: dict[Routes, list[float]] = {}

    def finish_s(self, routes: Routes) -> list[float]:
        if routes not in self._known:
            each = [routes[slot] for slot in self._slots]
            self._budget.spent_s += _VISIT_EFFORT_S * sum(2 * len(r.peers) + 1 for r in each)
            self._known[routes] = finish_times(self._pipeline, each)
        return self._known[routes]

    def score(self, routes: Routes) -> tuple[float, float]:
        """(iteration time, mean time until a microbatch has finished), in seconds."""
        finish_s = self.finish_s(routes)
        return max(finish_s), sum(finish_s) / len(finish_s)


def local_search(
    routes: Routes,
    pipeline: Pipeline,
    rules: Rules,
    scores: Scores,
    slots: Sequence[int],
    limits: Sequence[int],
    budget: Budget,
    seed: int,
) -> Routes:
    draws = Draws(seed)

    def changed(routes: Routes) -> Routes:
        """After one drawn step; half of them are tried on the slot that finishes last."""
        budget.spent_s += _DRAW_EFFORT_S
        finish_s = scores.finish_s(routes)
        last = slots[max(range(len(finish_s)), key=finish_s.__getitem__)]
        index = last if draws.below(2) else draws.below(len(routes))
        changes = random_step(routes, index, pipeline, rules, limits, draws)
        return tuple(changes.get(slot, route) for slot, route in enumerate(routes))

    best_routes, best = routes, scores.score(routes)
    here, failed = best, 0
    while budget.has_left():
        tried = changed(routes)
        score = scores.score(tried)
        failed += 1
        if score < here:
            routes, here, failed = tried, score, 0
        elif score == here:
            routes = tried
        if here < best:
            best_routes, best = routes, here
        if failed > _PATIENCE * len(routes):
            routes, failed = best_routes, 0
            for _ in range(_BLIND_STEPS):
                routes = changed(routes)
            here = scores.score(routes)
    return best_routes


def random_step(
    routes: Sequence[Route],
    index: int,
    pipeline: Pipeline,
    rules: Rules,
    limits: Sequence[int],
    draws: Draws,
) -> dict[int, Route]:
    """The routes that a drawn step changes, if it is allowed. Args: limits: of visits, by peer."""
    if rules.stages == 1:
        return {}
    other = draws.below(len(routes))
    one, partner = routes[index], routes[other]
    kinds: list[Callable[[], Pair | None]] = []
    if other != index:
        kinds = [
            lambda: trade_replica(one, partner, 1 + draws.below(rules.stages - 1), pipeline),
            # Each takes the other's way, from its own origin.
            lambda: (
                Route((*one.peers[:1], *partner.peers[1:])),
                Route((*partner.peers[:1], *one.peers[1:])),
            ),
        ]
        if rules.visited < rules.stages:
            kinds.append(lambda: trade_stage(one, partner, pipeline, rules, draws))
    loads = Counter(peer for route in routes for peer in route.peers)
    moves = [  # to peers with room on the stages of the route
        peer
        for stage in one.stages(pipeline)[1:]
        for peer in pipeline.stages[stage]
        if peer not in one.peers and loads[peer] < limits[peer]
    ]
    if not kinds and not moves:
        return {}
    kind = draws.below(len(kinds) + bool(moves))
    if kind == len(kinds):
        to = draws.one_of(moves)
        return {index: _replaced(one, _by_stage(one, pipeline)[pipeline.stage_of[to]], to)}
    pair = kinds[kind]()
    return {} if pair is None or pair == (one, partner) else {index: pair[0], other: pair[1]}


def trade_replica(one: Route, other: Route, stage: int, pipeline: Pipeline) -> Pair | None:
    """Both visit the stage, each by the other's replica from now on."""
    mine, theirs = _by_stage(one, pipeline).get(stage), _by_stage(other, pipeline).get(stage)
    if mine is None or theirs is None or mine == theirs:
        return None
    return _replaced(one, mine, theirs), _replaced(other, theirs, mine)


def trade_stage(
    one: Route, other: Route, pipeline: Pipeline, rules: Rules, draws: Draws
) -> Pair | None:
    """Each visits a stage of the other's, by the other's replica, instead of one of its own."""
    mine, theirs = _by_stage(one, pipeline), _by_stage(other, pipeline)
    here, there = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if not here or not there:
        return None
    gives, gets = draws.one_of(here), draws.one_of(there)
    mine[gets], theirs[gives] = theirs.pop(gets), mine.pop(gives)
    pair = _route(mine), _route(theirs)
    return pair if all(keeps_rules(each.stages(pipeline), rules) for each in pair) else None


def _by_stage(route: Route, pipeline: Pipeline) -> dict[int, int]:
    return {pipeline.stage_of[peer]: peer for peer in route.peers}


def _route(by_stage: dict[int, int]) -> Route:
    return Route(tuple(by_stage[stage] for stage in sorted(by_stage)))


def _replaced(route: Route, old: int, new: int) -> Route:
    return Route(tuple(new if peer == old else peer for peer in route.peers))
