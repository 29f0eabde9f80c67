"""How long an iteration takes with given routes: the slots' routes, simulated wave after wave."""

from collections.abc import Sequence
from dataclasses import dataclass

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Route
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
