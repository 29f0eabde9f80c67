"""The best route of one microbatch alone, and lower bounds of an iteration that follow from it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from algorithms.skippipe.draws import fewest_visits
from algorithms.skippipe.pipeline import Floats, Pipeline
from algorithms.skippipe.route import Route, Rules


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
        penalty_s: Mapping[int, float] | None = None,
        *,
        visited: int | None = None,
    ) -> Route | None:
        """The route of the fastest loop; of equal ones, that by the lowest peers.

        Args:
            origin: a replica of stage 0.
            banned: peers that it may not visit.
            penalty_s: what a visit of a peer takes more, such as waiting for another microbatch.
            visited: how many stages; the mean of the rules if it is not given.

        Returns:
            None if those that are left allow no route.
        """
        visit_s = self._visit_s.copy()
        visit_s[list(banned)] = np.inf
        for peer, more_s in (penalty_s or {}).items():
            visit_s[peer] += more_s
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


def lower_bound_s(pipeline: Pipeline, rules: Rules, origins: Sequence[int]) -> float:
    """The largest of three bounds, each of which leaves out what the others count.

    1. An origin holds at most its memory of microbatches, each for at least its best loop.
    2. An origin computes all of its own microbatches' forwards, losses and backwards.
    3. The replicas of a stage share its visits, between the first hop to and the last hop from it.

    Args:
        origins: of each microbatch of the iteration.

    Raises:
        ValueError: an origin from which no route leads through the stages.
    """
    costs = pipeline.costs
    visit_s = costs.forward_s + costs.backward_s
    planner = Planner(pipeline, rules)
    bounds = [0.0]
    for origin, microbatches in sorted(Counter(origins).items()):
        route = planner.best(origin, visited=rules.shortest)
        if route is None:
            raise ValueError(f"no route from peer {origin}, which is not on stage 0")
        waves = -(-microbatches // pipeline.memory[origin])
        bounds.append(waves * planner.loop_s(route))
        bounds.append(microbatches * float(visit_s[origin] + costs.loss_s[origin]))
    hops_s = costs.edge_s + np.diag(np.full(pipeline.peers, np.inf))
    ends_s = float(min(costs.forward_s[origin] + costs.backward_s[origin] for origin in origins))
    visits = fewest_visits(pipeline, rules, origins)
    for stage in pipeline.stages[1:]:
        replicas = list(stage)
        work_s = visits / float((1.0 / visit_s[replicas]).sum())
        there_s, back_s = hops_s[:, replicas].min(), hops_s[replicas, :].min()
        bounds.append(work_s + float(there_s + back_s) + ends_s)
    return max(bounds)


def uplink_bound_s(pipeline: Pipeline, rules: Rules, origins: Sequence[int]) -> float:
    """A lower bound of the iteration time with shared uplinks, beside `lower_bound_s`.

    Every visit sends two messages: onward, and a gradient back; an origin sends the first hop and
    the gradient of the loss. Each takes the line for at least the time to the nearest other stage,
    between what must come before the first and after the last of them.

    Args:
        origins: of each microbatch of the iteration.
    """
    if rules.visited == 1:
        return 0.0
    costs = pipeline.costs
    stage = np.array(pipeline.stage_of)
    apart = stage[:, None] != stage[None, :]
    message_s = np.where(apart, costs.transfer_s, np.inf).min(axis=1)
    delay_s = np.where(apart, costs.delay_s, np.inf).min(axis=1)
    arrives_s = np.where(apart, costs.edge_s, np.inf).min(axis=0)
    begins_s = min(float(costs.forward_s[origin]) for origin in origins)
    ends_s = min(float(costs.backward_s[origin]) for origin in origins)
    bounds = []
    for origin, microbatches in Counter(origins).items():
        sends_s = 2 * microbatches * message_s[origin]
        # After its last message another stage's backward and the way back are still to come.
        back_s = delay_s[origin] + costs.backward_s[stage > 0].min() + arrives_s[origin]
        bounds.append(costs.forward_s[origin] + sends_s + back_s + costs.backward_s[origin])
    visits = fewest_visits(pipeline, rules, origins)
    for each in pipeline.stages[1:]:
        replicas = list(each)
        sends_s = visits / (1.0 / (2 * message_s[replicas])).sum() if visits else 0.0
        there_s = (arrives_s + costs.forward_s)[replicas].min()
        bounds.append(begins_s + there_s + sends_s + delay_s[replicas].min() + ends_s)
    return float(max(bounds))
