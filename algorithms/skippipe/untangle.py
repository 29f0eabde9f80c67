"""Phase C of the search: no two microbatches are planned on one peer at the same time.

Follows the tree of conflict-based search from one draft. A node is a choice of routes with waits;
of its collisions, the one of the slowest slot is resolved. If one of the two visits returns, the
later one waits; if both go forward, the faster slot waits, with a branch in which the slower does.
A slot that would wait may also go by another replica that has room, or trade replicas with another.
Nodes are judged by the simulated iteration, in which peers take what arrives in order: waits only
say where it is crowded.

Ref: arXiv:2502.19913; Sharon et al., Conflict-based search, 2015.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Route, trade_replica
from algorithms.skippipe.scores import Journal, Score, Scores, plan_effort_s

GOOD_ENOUGH = 0.88  # of the first draft's time
SOLUTIONS = 8
_DROPPED = 1.15  # of the best time
_ROUNDING_S = 1e-9
_NODE_EFFORT_S = 3e-6  # per planned visit, for a timetable and its collisions

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


@dataclass(frozen=True)
class _Node:
    routes: tuple[Route, ...]
    waits: Mapping[tuple[int, int, bool], float]


class Untangling:
    """The search tree of one draft.

    Args:
        limits: of each peer, how many of the slots may visit it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        planner: Planner,
        scores: Scores,
        limits: Sequence[int],
        journal: Journal,
    ) -> None:
        self._pipeline, self._planner, self._scores = pipeline, planner, scores
        self._limits, self._journal = limits, journal

    def run(self, routes: tuple[Route, ...], banned: Sequence[frozenset[int]]) -> tuple[Route, ...]:
        """The best routes met, until one is free of collisions and good enough.

        Args:
            routes: of each slot, to begin with.
            banned: of each slot, the peers that it may not visit.
        """
        first = best = self._scores.score(routes)
        best_routes, solutions, serial = routes, 0, 0
        heap: list[tuple[Score, int, int, _Node, Timetable]] = []
        root = _Node(routes, {})
        seen = {self._key(root)}
        self._push(heap, first, serial, root)
        while heap and self._journal.has_left(0.75):
            score, _, _, node, timetable = heappop(heap)
            if score < best:
                best, best_routes = score, node.routes
            collisions = timetable.collisions()
            if not collisions:
                solutions += 1
                if best[0] < GOOD_ENOUGH * first[0] or solutions == SOLUTIONS:
                    break
                continue
            for child in self._children(node, timetable, collisions, banned):
                if self._key(child) in seen:
                    continue
                seen.add(self._key(child))
                child_score = self._scores.score(child.routes)
                if child_score[0] > _DROPPED * best[0]:
                    self._journal.reject(
                        "collisions",
                        f"{child_score[0]:.3f} s is far above the best, {best[0]:.3f} s",
                    )
                    continue
                serial += 1
                self._push(heap, child_score, serial, child)
        return best_routes

    def _push(
        self,
        heap: list[tuple[Score, int, int, _Node, Timetable]],
        score: Score,
        serial: int,
        node: _Node,
    ) -> None:
        timetable = Timetable(self._pipeline, node.routes, node.waits)
        self._journal.spend(_NODE_EFFORT_S * sum(map(len, timetable.visits)))
        # Of equal scores, the newest: deeper nodes have fewer collisions left.
        heappush(heap, (score, -serial, serial, node, timetable))

    @staticmethod
    def _key(
        node: _Node,
    ) -> tuple[tuple[Route, ...], frozenset[tuple[tuple[int, int, bool], float]]]:
        return node.routes, frozenset(node.waits.items())

    def _children(
        self,
        node: _Node,
        timetable: Timetable,
        collisions: list[Collision],
        banned: Sequence[frozenset[int]],
    ) -> Iterator[_Node]:
        def slowest(collision: Collision) -> float:
            both = (collision.first.slot, collision.second.slot)
            return -max(timetable.length_s(slot) for slot in both)

        collision = min(collisions, key=slowest)
        pair = collision.first, collision.second
        if collision.first.returning or collision.second.returning:
            yield from self._yielding(node, pair[1], pair[0], banned)
            return
        faster = min(pair, key=lambda visit: (timetable.length_s(visit.slot), visit.slot))
        slower = pair[1] if faster is pair[0] else pair[0]
        yield from self._yielding(node, faster, slower, banned)
        yield from self._yielding(node, slower, faster, banned)

    def _yielding(
        self, node: _Node, waiter: Planned, goes: Planned, banned: Sequence[frozenset[int]]
    ) -> Iterator[_Node]:
        """The ways in which one visit makes room for another."""
        waits = dict(node.waits)
        waits[waiter.slot, waiter.peer, waiter.returning] = goes.end_s
        yield _Node(node.routes, waits)
        if self._pipeline.stage_of[waiter.peer] == 0:
            return  # its origin is where it has to be
        waited_s = goes.end_s - waiter.start_s
        around = self._around(node, waiter, waited_s, banned[waiter.slot])
        if around is not None:
            yield self._changed(node, {waiter.slot: around})
        stage = self._pipeline.stage_of[waiter.peer]
        trades = []
        for other, route in enumerate(node.routes):
            pair = trade_replica(node.routes[waiter.slot], route, stage, self._pipeline)
            if pair is not None:
                cost_s = sum(map(self._planner.loop_s, pair)) - self._planner.loop_s(route)
                trades.append((cost_s, other, pair))
        if trades:
            _, other, pair = min(trades, key=lambda trade: trade[:2])
            yield self._changed(node, {waiter.slot: pair[0], other: pair[1]})

    def _around(
        self, node: _Node, waiter: Planned, waited_s: float, banned: frozenset[int]
    ) -> Route | None:
        """The slot's best route by peers with room, if it is not the one that it has."""
        route = node.routes[waiter.slot]
        loads = Counter(peer for each in node.routes for peer in each.peers)
        taken = {peer for peer, load in loads.items() if load >= self._limits[peer]}
        barred = banned | (taken - set(route.peers))
        self._journal.spend(plan_effort_s(self._pipeline, len(route.peers)))
        penalty_s = {waiter.peer: waited_s}
        around = self._planner.best(route.origin, barred, penalty_s, visited=len(route.peers))
        return None if around == route else around

    @staticmethod
    def _changed(node: _Node, changes: Mapping[int, Route]) -> _Node:
        """With other routes for some slots, whose waits are forgotten."""
        routes = tuple(changes.get(slot, route) for slot, route in enumerate(node.routes))
        waits = {key: start_s for key, start_s in node.waits.items() if key[0] not in changes}
        return _Node(routes, waits)
