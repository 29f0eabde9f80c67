"""When each visit of a first wave would happen if nobody waited, and where two of them collide."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.route import Route

_ROUNDING_S = 1e-9

Waits = Mapping[tuple[int, int, bool], float]
"""(slot, peer, whether its backward) -> not before, in seconds from the beginning."""


@dataclass(frozen=True)
class Planned:
    """One planned visit. Args: returning: whether it is the loss or a backward."""

    slot: int
    peer: int
    returning: bool
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Collision:
    """Two visits that overlap on a peer; the first begins first."""

    first: Planned
    second: Planned


class Timetable:
    """The visits of one microbatch per slot; slot k of an origin begins after k forwards."""

    def __init__(self, pipeline: Pipeline, routes: Sequence[Route], waits: Waits) -> None:
        self._pipeline, self._waits = pipeline, waits
        costs = pipeline.costs
        self._forward_s, self._loss_s = costs.forward_s.tolist(), costs.loss_s.tolist()
        self._backward_s = costs.backward_s.tolist()
        begun: dict[int, int] = {}
        self.visits: list[list[Planned]] = []
        for slot, route in enumerate(routes):
            before = begun.get(route.origin, 0)
            begun[route.origin] = before + 1
            begins_s = before * self._forward_s[route.origin]
            self.visits.append(list(self._visits(slot, route, begins_s)))

    def length_s(self, slot: int) -> float:
        """From the beginning of the iteration to the end of a slot's first microbatch."""
        return self.visits[slot][-1].end_s

    def collisions(self) -> list[Collision]:
        """By time, those of neighbours on a peer."""
        by_peer: list[list[Planned]] = [[] for _ in range(self._pipeline.peers)]
        for visits in self.visits:
            for visit in visits:
                by_peer[visit.peer].append(visit)
        found = []
        for visits in by_peer:
            visits.sort(key=lambda visit: (visit.start_s, visit.slot))
            found += [
                Collision(first, second)
                for first, second in pairwise(visits)
                if second.start_s < first.end_s - _ROUNDING_S and first.slot != second.slot
            ]
        return sorted(found, key=lambda each: (each.second.start_s, each.second.peer))

    def _visits(self, slot: int, route: Route, begins_s: float) -> Iterator[Planned]:
        edges, origin = self._pipeline.edges, route.origin
        now_s, here = begins_s, origin
        steps = [(peer, False, self._forward_s[peer]) for peer in route.peers]
        steps.append((origin, True, self._loss_s[origin]))
        steps += [(peer, True, self._backward_s[peer]) for peer in reversed(route.peers)]
        for peer, returning, lasts_s in steps:
            arrives_s = now_s + edges[here][peer]
            start_s = max(arrives_s, self._waits.get((slot, peer, returning), 0.0))
            now_s, here = start_s + lasts_s, peer
            yield Planned(slot, peer, returning, start_s, now_s)
