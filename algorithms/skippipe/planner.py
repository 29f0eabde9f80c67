"""The best route of one microbatch alone."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from murmuration.algorithms.skippipe.pipeline import Floats, Pipeline
from murmuration.algorithms.skippipe.route import Route, Rules


class Planner:
    """Finds ascending routes of an exact length.

    Both halves of a hop and of a visit are counted: what goes forward comes back. Extends the best
    routes to each peer by one visit at a time; exact, as a loop's cost is a sum over its hops.
    """

    def __init__(self, pipeline: Pipeline, rules: Rules) -> None:
        costs, stage = pipeline.costs, np.array(pipeline.stage_of)
        self._rules = rules
        self._return_s = costs.edge_s + costs.edge_s.T
        jump = stage[None, :] - stage[:, None]
        allowed = (jump > 0) & (jump <= rules.max_jump)
        self._hop_s: Floats = np.where(allowed, self._return_s, np.inf)
        self._visit_s = costs.forward_s + costs.backward_s
        self._loss_s = costs.loss_s
        self._everyone = np.arange(pipeline.peers)
        self._visits: list[float] = self._visit_s.tolist()
        self._returns: list[list[float]] = self._return_s.tolist()

    def best(
        self,
        origin: int,
        banned: Iterable[int] = (),
        *,
        visited: int | None = None,
    ) -> Route | None:
        """The route of the fastest loop; of equal ones, that by the lowest peers.

        Args:
            origin: a replica of stage 0.
            banned: peers that it may not visit.
            visited: how many stages; the mean of the rules if it is not given.

        Returns:
            None if those that are left allow no route.
        """
        visit_s = self._visit_s.copy()
        visit_s[list(banned)] = np.inf
        loop_s = np.full(len(visit_s), np.inf)
        loop_s[origin] = 0.0
        came_from = []
        for _ in range((visited or self._rules.visited) - 1):
            extended_s = loop_s[:, None] + self._hop_s
            before = extended_s.argmin(axis=0)
            loop_s = extended_s[before, self._everyone] + visit_s
            came_from.append(before)
        loop_s = loop_s + self._return_s[:, origin]
        peer = int(loop_s.argmin())
        if not np.isfinite(loop_s[peer]):
            return None
        peers = [peer]
        for before in reversed(came_from):
            peers.append(int(before[peers[-1]]))
        return Route(tuple(reversed(peers)))

    def loop_s(self, route: Route) -> float:
        """A route's time if nobody else used its peers."""
        peers, returns = route.peers, self._returns
        hops_s = sum(returns[here][there] for here, there in pairwise(peers))
        visits_s = sum(self._visits[peer] for peer in peers)
        loss_s = float(self._loss_s[route.origin])
        return hops_s + returns[peers[-1]][route.origin] + visits_s + loss_s
