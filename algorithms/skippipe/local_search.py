"""Routes change by small steps while the simulated iteration gets shorter: phase C of the search.

A step either exchanges replicas, stages or ways between two routes, which leaves every stage and
peer as often visited as before; or it moves one visit to another replica of the stage that has
room. Whatever keeps the limits goes on keeping them, so a search may take steps without end.

An iterated local search: where no step has helped for long, a few are made blindly from the best
routes so far, and it goes on from there. What decides is the time of an iteration with the slots'
routes, simulated wave after wave.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import (
    Draws,
    Pair,
    Route,
    Rules,
    move_visit,
    trade_all,
    trade_replica,
    trade_stage,
)
from murmuration.algorithms.skippipe.simulator import finish_times


@dataclass
class Budget:
    """Effort is counted from operations and not by a clock: all machines stop at the same place.

    Args:
        effort_s: what may be spent, in seconds of one usual core, about.
        spent_s: what was spent.
    """

    effort_s: float
    spent_s: float = 0.0

    def spend(self, effort_s: float) -> None:
        self.spent_s += effort_s

    def has_left(self, share: float = 1.0) -> bool:
        """Whether less than this share of the effort is spent."""
        return self.spent_s < share * self.effort_s


_VISIT_EFFORT_S = 2.5e-6  # of simulating half a visit

Score = tuple[float, float]
"""(iteration time, mean time until a microbatch has finished), in seconds."""


def slots_of(origins: Sequence[int], pipeline: Pipeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What each origin has in flight at once, and takes in turns.

    Args:
        origins: of each microbatch of the iteration.

    Returns:
        (the slot of each microbatch, the origin of each slot).
    """
    slot_at: dict[tuple[int, int], int] = {}
    begun: dict[int, int] = {}
    slots = []
    for origin in origins:
        turn = begun.get(origin, 0)
        begun[origin] = turn + 1
        key = (origin, turn % pipeline.memory[origin])
        slots.append(slot_at.setdefault(key, len(slot_at)))
    return tuple(slots), tuple(origin for origin, _ in slot_at)


class Scores:
    """Simulates each choice of routes once.

    Args:
        slots: of each microbatch of the iteration.
        budget: where the effort is counted.
        shared_uplinks: as in `simulate`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        slots: Sequence[int],
        budget: Budget,
        *,
        shared_uplinks: bool = False,
    ) -> None:
        self._pipeline, self._slots, self._budget = pipeline, slots, budget
        self._shared_uplinks = shared_uplinks
        self._known: dict[tuple[Route, ...], list[float]] = {}

    def finish_s(self, routes: tuple[Route, ...]) -> list[float]:
        """Of each microbatch, when its last backward ends."""
        known = self._known.get(routes)
        if known is None:
            steps = sum(2 * len(routes[slot].peers) + 1 for slot in self._slots)
            self._budget.spend(_VISIT_EFFORT_S * steps)
            known = finish_times(
                self._pipeline,
                [routes[slot] for slot in self._slots],
                shared_uplinks=self._shared_uplinks,
            )
            self._known[routes] = known
        return known

    def score(self, routes: tuple[Route, ...]) -> Score:
        """Lower is better."""
        finish_s = self.finish_s(routes)
        return max(finish_s), sum(finish_s) / len(finish_s)


def plan_effort_s(pipeline: Pipeline, visited: int) -> float:
    """What one call of `Planner.best` takes."""
    return 1e-5 + (visited - 1) * (8e-6 + 1e-9 * pipeline.peers**2)


_DRAW_EFFORT_S = 3e-5
_PATIENCE = 15  # draws per slot
_BLIND_STEPS = 3


class LocalSearch:
    """Args: slots: of each microbatch. limits: see `random_step`. seed: of the draws."""

    def __init__(
        self,
        pipeline: Pipeline,
        rules: Rules,
        scores: Scores,
        slots: Sequence[int],
        limits: Sequence[int],
        budget: Budget,
        seed: int,
    ) -> None:
        self._pipeline, self._rules, self._scores = pipeline, rules, scores
        self._slots, self._limits = slots, limits
        self._budget, self._draws = budget, Draws(seed)

    def run(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The best routes met until the effort is spent."""
        best_routes, best = routes, self._scores.score(routes)
        here, failed = best, 0
        while self._budget.has_left():
            changed = self._changed(routes)
            score = self._scores.score(changed)
            failed += 1
            if score < here:
                routes, here, failed = changed, score, 0
            elif score == here:
                routes = changed
            if here < best:
                best_routes, best = routes, here
            if failed > _PATIENCE * len(routes):
                routes, failed = best_routes, 0
                for _ in range(_BLIND_STEPS):
                    routes = self._changed(routes)
                here = self._scores.score(routes)
        return best_routes

    def _changed(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """After one drawn step; half of them are tried on the slot that finishes last."""
        self._budget.spend(_DRAW_EFFORT_S)
        finish_s = self._scores.finish_s(routes)
        last = self._slots[max(range(len(finish_s)), key=finish_s.__getitem__)]
        index = last if self._draws.below(2) else self._draws.below(len(routes))
        changes = random_step(routes, index, self._pipeline, self._rules, self._limits, self._draws)
        if not changes:
            return routes
        return tuple(changes.get(slot, route) for slot, route in enumerate(routes))


def random_step(
    routes: Sequence[Route],
    index: int,
    pipeline: Pipeline,
    rules: Rules,
    limits: Sequence[int],
    draws: Draws,
) -> dict[int, Route]:
    """The routes that a drawn step changes; none if what was drawn is not allowed.

    Args:
        index: of the route to change, beside another one in a trade.
        limits: of each peer, how many of the routes may visit it.
    """
    if rules.stages == 1:
        return {}
    other = draws.below(len(routes))
    one, partner = routes[index], routes[other]
    kinds: list[Callable[[], Pair | None]] = []
    if other != index:
        kinds = [
            lambda: trade_replica(one, partner, 1 + draws.below(rules.stages - 1), pipeline),
            lambda: trade_all(one, partner),
        ]
        if rules.visited < rules.stages:
            kinds.append(lambda: _random_stage_trade(one, partner, pipeline, rules, draws))
    moves = _moves(routes, index, pipeline, limits)
    if not kinds and not moves:
        return {}
    kind = draws.below(len(kinds) + bool(moves))
    if kind == len(kinds):
        return {index: move_visit(one, draws.one_of(moves), pipeline)}
    pair = kinds[kind]()
    return {} if pair is None or pair == (one, partner) else {index: pair[0], other: pair[1]}


def _moves(
    routes: Sequence[Route], index: int, pipeline: Pipeline, limits: Sequence[int]
) -> list[int]:
    """The peers with room on the stages of a route, but for its own."""
    loads = Counter(peer for route in routes for peer in route.peers)
    route = routes[index]
    return [
        peer
        for stage in route.stages(pipeline)[1:]
        for peer in pipeline.stages[stage]
        if peer not in route.peers and loads[peer] < limits[peer]
    ]


def _random_stage_trade(
    one: Route, other: Route, pipeline: Pipeline, rules: Rules, draws: Draws
) -> Pair | None:
    mine, theirs = set(one.stages(pipeline)), set(other.stages(pipeline))
    if mine <= theirs or theirs <= mine:
        return None
    gives, gets = draws.one_of(sorted(mine - theirs)), draws.one_of(sorted(theirs - mine))
    return trade_stage(one, other, gives, gets, pipeline, rules)
