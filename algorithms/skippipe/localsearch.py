"""Phase D of the search: pairs of routes trade as long as the simulated iteration gets shorter.

An iterated local search: where no trade has helped for long, a few are made blindly from the best
routes so far, and it goes on from there. What all phases respect, trades leave as it is.
"""

from collections.abc import Sequence

from algorithms.skippipe.draws import Draws
from algorithms.skippipe.journal import Journal
from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.route import Route, Rules
from algorithms.skippipe.scores import Scores
from algorithms.skippipe.trades import random_trade

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
