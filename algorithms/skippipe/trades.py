"""Exchanges between two routes that leave every stage and peer as often visited as before.

So whatever keeps the limits goes on keeping them, and a search may trade without end.
"""

from collections.abc import Callable, Sequence

from algorithms.skippipe.draws import Draws
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.route import Route, Rules, stage_refusals
from algorithms.skippipe.scores import Journal, Scores

Pair = tuple[Route, Route]


def trade_replica(one: Route, other: Route, stage: int, pipeline: Pipeline) -> Pair | None:
    """Both visit the stage, each by the other's replica from now on."""
    mine, theirs = _by_stage(one, pipeline).get(stage), _by_stage(other, pipeline).get(stage)
    if mine is None or theirs is None or mine == theirs:
        return None
    return _replaced(one, mine, theirs), _replaced(other, theirs, mine)


def trade_stage(
    one: Route, other: Route, gives: int, gets: int, pipeline: Pipeline, rules: Rules
) -> Pair | None:
    """The one visits stage `gets` instead of `gives`, the other the reverse."""
    mine, theirs = _by_stage(one, pipeline), _by_stage(other, pipeline)
    if gives not in mine or gives in theirs or gets not in theirs or gets in mine:
        return None
    given, got = mine.pop(gives), theirs.pop(gets)
    mine[gets], theirs[gives] = got, given
    pair = _route(mine), _route(theirs)
    if any(stage_refusals(route.stages(pipeline), rules) for route in pair):
        return None
    return pair


def trade_all(one: Route, other: Route) -> Pair:
    """Each takes the other's way, from its own origin."""
    return (
        Route((one.origin, *other.peers[1:])),
        Route((other.origin, *one.peers[1:])),
    )


def random_trade(
    routes: Sequence[Route], index: int, pipeline: Pipeline, rules: Rules, draws: Draws
) -> tuple[int, Pair] | None:
    """(index of the other route, both after the trade), or None if what was drawn is none."""
    other = draws.below(len(routes))
    one, partner = routes[index], routes[other]
    if other == index or rules.stages == 1:
        return None
    kinds: list[Callable[[], Pair | None]] = [
        lambda: trade_replica(one, partner, 1 + draws.below(rules.stages - 1), pipeline),
        lambda: trade_all(one, partner),
    ]
    if rules.visited < rules.stages:
        kinds.append(lambda: _random_stage_trade(one, partner, pipeline, rules, draws))
    pair = draws.one_of(kinds)()
    if pair is None or pair == (one, partner):
        return None
    return other, pair


def _random_stage_trade(
    one: Route, other: Route, pipeline: Pipeline, rules: Rules, draws: Draws
) -> Pair | None:
    mine, theirs = set(one.stages(pipeline)), set(other.stages(pipeline))
    if mine <= theirs or theirs <= mine:
        return None
    gives, gets = draws.one_of(sorted(mine - theirs)), draws.one_of(sorted(theirs - mine))
    return trade_stage(one, other, gives, gets, pipeline, rules)


def _by_stage(route: Route, pipeline: Pipeline) -> dict[int, int]:
    return {pipeline.stage_of[peer]: peer for peer in route.peers}


def _route(by_stage: dict[int, int]) -> Route:
    return Route(tuple(by_stage[stage] for stage in sorted(by_stage)))


def _replaced(route: Route, old: int, new: int) -> Route:
    return Route(tuple(new if peer == old else peer for peer in route.peers))


_DRAW_EFFORT_S = 3e-5
_PATIENCE = 15  # draws per slot
_BLIND_TRADES = 3


class LocalSearch:
    """Args: slots: of each microbatch of the iteration. seed: of the draws."""

    def __init__(
        self,
        pipeline: Pipeline,
        rules: Rules,
        scores: Scores,
        slots: Sequence[int],
        journal: Journal,
        seed: int,
    ) -> None:
        self._pipeline, self._rules, self._scores = pipeline, rules, scores
        self._slots, self._journal, self._draws = slots, journal, Draws(seed)

    def run(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The best routes met until the effort is spent."""
        best_routes, best = routes, self._scores.score(routes)
        here, failed = best, 0
        while self._journal.has_left():
            changed = self._traded(routes)
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
                for _ in range(_BLIND_TRADES):
                    routes = self._traded(routes)
                here = self._scores.score(routes)
        return best_routes

    def _traded(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """After one drawn trade; half of them are tried on the slot that finishes last."""
        self._journal.spend(_DRAW_EFFORT_S)
        finish_s = self._scores.finish_s(routes)
        last = self._slots[max(range(len(finish_s)), key=finish_s.__getitem__)]
        index = last if self._draws.below(2) else self._draws.below(len(routes))
        drawn = random_trade(routes, index, self._pipeline, self._rules, self._draws)
        if drawn is None:
            return routes
        other, (mine, theirs) = drawn
        changed = list(routes)
        changed[index], changed[other] = mine, theirs
        result = tuple(changed)
        if not self._scores.knows(result):
            more_s = self._scores.score(result)[0] - self._scores.score(routes)[0]
            if more_s > 0:
                self._journal.reject("trades", f"routes {index} and {other}: {more_s:+.3f} s")
        return result
