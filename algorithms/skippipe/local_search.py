"""Phase C of the search: routes change by small steps while the simulated iteration gets shorter.

A step either exchanges replicas, stages or ways between two routes, which leaves every stage and
peer as often visited as before; or it moves one visit to another replica of the stage that has
room. Whatever keeps the limits goes on keeping them, so a search may take steps without end.

An iterated local search: where no step has helped for long, a few are made blindly from the best
routes so far, and it goes on from there.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from murmuration.algorithms.skippipe.draws import Draws
from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import (
    Pair,
    Route,
    Rules,
    move_visit,
    trade_all,
    trade_replica,
    trade_stage,
)
from murmuration.algorithms.skippipe.scores import Budget, Scores

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
