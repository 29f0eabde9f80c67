"""Phase C of the search: no two microbatches are planned on one peer at the same time.

Follows the tree of conflict-based search from one draft. A node is a choice of routes with waits;
of its collisions, the one of the slowest slot is resolved. If one of the two visits returns, the
later one waits; if both go forward, the faster slot waits, with a branch in which the slower does.
Who would wait may also go by another replica that has room, or trade replicas with another slot.
Nodes are judged by the simulated iteration, in which peers take what arrives in order: waits only
say where it is crowded.

Ref: arXiv:2502.19913; Sharon et al., Conflict-based search, 2015.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from algorithms.skippipe.pipeline import Pipeline
from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Route
from algorithms.skippipe.scores import Journal, Score, Scores
from algorithms.skippipe.settle import Draft
from algorithms.skippipe.timetable import Collision, Planned, Timetable
from algorithms.skippipe.trades import trade_replica

GOOD_ENOUGH = 0.88  # of the first draft's time
SOLUTIONS = 8
_DROPPED = 1.15  # of the best time
_NODE_EFFORT_S = 3e-6  # per planned visit, for a timetable and its collisions


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

    def run(self, draft: Draft) -> tuple[Route, ...]:
        """The best routes met, until one is free of collisions and good enough."""
        first = best = self._scores.score(draft.routes)
        best_routes, solutions, serial = draft.routes, 0, 0
        heap: list[tuple[Score, int, int, _Node, Timetable]] = []
        root = _Node(draft.routes, {})
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
            for child in self._children(node, timetable, collisions, draft.banned):
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


def plan_effort_s(pipeline: Pipeline, visited: int) -> float:
    """What one call of `Planner.best` takes."""
    return 1e-5 + (visited - 1) * (8e-6 + 1e-9 * pipeline.peers**2)
