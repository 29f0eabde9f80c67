"""Phases A and B of the search: no stage and no peer is visited more often than its limit.

Every microbatch begins with its own best route. Where a limit is exceeded, the surplus is banned
from there and planned anew: the fastest first, as they can best afford a detour, and in a second
branch those whose detour is least. The best few drafts are followed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from algorithms.skippipe.planner import Planner
from algorithms.skippipe.route import Route
from algorithms.skippipe.scores import Journal

WIDTH = 3


@dataclass(frozen=True)
class Limit:
    """Args: what: in words. peers: whose visits count. most: how many of the routes may visit."""

    what: str
    peers: frozenset[int]
    most: int


@dataclass(frozen=True)
class Draft:
    """A route for each slot, and the peers that each may not visit."""

    routes: tuple[Route, ...]
    banned: tuple[frozenset[int], ...]


def settle(
    drafts: Sequence[Draft],
    limits: Sequence[Limit],
    planner: Planner,
    journal: Journal,
    *,
    phase: str,
    plan_effort_s: float,
    share: float,
) -> list[Draft]:
    """Drafts that keep all limits, best first; empty if none was found within the effort."""
    frontier = list(drafts)
    settled: list[Draft] = []
    while frontier and not settled and journal.has_left(share):
        children: dict[tuple[Route, ...], Draft] = {}
        for draft in frontier:
            over = _worst(draft, limits)
            if over is None:
                settled.append(draft)
                continue
            for child in _branches(draft, over, planner, journal, phase, plan_effort_s):
                children.setdefault(child.routes, child)
        ranked = sorted(children.values(), key=lambda draft: _cost(draft, planner))
        for draft in ranked[WIDTH:]:
            journal.reject(phase, f"{WIDTH} better drafts than {_cost(draft, planner)[0]:.3f} s")
        frontier = ranked[:WIDTH]
    return sorted(settled, key=lambda draft: _cost(draft, planner))


def _cost(draft: Draft, planner: Planner) -> tuple[float, float]:
    """(slowest route, sum of all routes)."""
    loops_s = [planner.loop_s(route) for route in draft.routes]
    return max(loops_s), sum(loops_s)


def _visitors(draft: Draft, limit: Limit) -> list[int]:
    return [i for i, route in enumerate(draft.routes) if not limit.peers.isdisjoint(route.peers)]


def _worst(draft: Draft, limits: Sequence[Limit]) -> Limit | None:
    """The limit that is exceeded by most; the first of equal ones."""
    surplus = [len(_visitors(draft, limit)) - limit.most for limit in limits]
    most = max(surplus, default=0)
    return limits[surplus.index(most)] if most > 0 else None


def _branches(
    draft: Draft,
    over: Limit,
    planner: Planner,
    journal: Journal,
    phase: str,
    plan_effort_s: float,
) -> Iterator[Draft]:
    visitors = _visitors(draft, over)
    detours: dict[int, Route] = {}
    for index in visitors:
        route, banned = draft.routes[index], draft.banned[index] | over.peers
        detour = planner.best(route.origin, banned, visited=len(route.peers))
        journal.spend(plan_effort_s)
        if detour is None:
            journal.reject(phase, f"route {index} has no other way than by {over.what}")
        else:
            detours[index] = detour
    surplus = len(visitors) - over.most
    if len(detours) < surplus:
        journal.reject(
            phase, f"{over.what}: {surplus} visits too many, {len(detours)} routes can do without"
        )
        return
    before_s = {index: planner.loop_s(draft.routes[index]) for index in detours}
    fastest = sorted(detours, key=lambda index: (before_s[index], index))
    least = sorted(
        detours, key=lambda index: (planner.loop_s(detours[index]) - before_s[index], index)
    )
    for order in (fastest, least):
        routes, banned_peers = list(draft.routes), list(draft.banned)
        for index in order[:surplus]:
            routes[index] = detours[index]
            banned_peers[index] |= over.peers
        yield Draft(tuple(routes), tuple(banned_peers))
