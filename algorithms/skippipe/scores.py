"""How long an iteration takes with given routes: the slots' routes, simulated wave after wave."""

from collections.abc import Sequence

from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.route import Route
from algorithms.skippipe.search import Journal
from algorithms.skippipe.simulator import finish_times

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
        journal: where the effort is counted.
        shared_uplinks: as in `simulate`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        slots: Sequence[int],
        journal: Journal,
        *,
        shared_uplinks: bool = False,
    ) -> None:
        self._pipeline, self._slots, self._journal = pipeline, slots, journal
        self._shared_uplinks = shared_uplinks
        self._known: dict[tuple[Route, ...], list[float]] = {}

    def knows(self, routes: tuple[Route, ...]) -> bool:
        """Whether these were simulated before."""
        return routes in self._known

    def finish_s(self, routes: tuple[Route, ...]) -> list[float]:
        """Of each microbatch, when its last backward ends."""
        known = self._known.get(routes)
        if known is None:
            steps = sum(2 * len(routes[slot].peers) + 1 for slot in self._slots)
            self._journal.spend(_VISIT_EFFORT_S * steps)
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
