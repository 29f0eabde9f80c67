"""What an iteration of a model in stages takes by each routing, and a good placement for it.

Placements are judged by a quick search of routes, and simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from murmuration.algorithms.link import Link
from murmuration.algorithms.skippipe.pipeline import Costs, Floats, Links, Pipeline
from murmuration.algorithms.skippipe.route import Draws, Route, Rules
from murmuration.algorithms.skippipe.routing import ROUTINGS, origins_in_turns
from murmuration.algorithms.skippipe.search import EFFORT_S, Found, search_routes
from tests.lab.timeline import Timeline, simulate

NEVER_SKIP = ("full", "stochastic")
_BYTES_PER_S = 125e3  # in 1 Mbit/s
_FAST_MBPS = 10_000.0


def links_of_lines(lines: Sequence[Link | None]) -> Links:
    """Of peers that each have a line of their own; None is a fast one.

    Two have the slower of their rates. A line delays what its peer sends, so a hop takes half of
    both delays: half of a round trip, which is what is measured in a run.
    """
    rate = np.array([line.rate_mbps if line else _FAST_MBPS for line in lines]) * _BYTES_PER_S
    delay_s = np.array([line.delay_s if line else 0.0 for line in lines])
    return Links(
        latency_s=(delay_s[:, None] + delay_s) / 2,
        rate_bytes_per_s=np.minimum(rate[:, None], rate),
    )


@dataclass(frozen=True, kw_only=True)
class RoutingPrediction:
    """One iteration.

    Args:
        routing: the preset's name.
        rules: those that its routes keep.
        routes: of each microbatch, in the order of the origins.
        timeline: what each peer computes, and when.
        found: what the search says of its answer, if there was one.
    """

    routing: str
    rules: Rules
    routes: tuple[Route, ...]
    timeline: Timeline
    found: Found | None = None

    @cached_property
    def iteration_s(self) -> float:
        """Until the last microbatch has finished."""
        return self.timeline.iteration_s

    @cached_property
    def utilization(self) -> tuple[float, ...]:
        """Of each peer, the share of the iteration in which it computes."""
        peers = range(len(self.timeline.spans))
        return tuple(self.timeline.busy_s(peer) / self.iteration_s for peer in peers)


def predict(
    pipeline: Pipeline,
    rules: Rules,
    origins: Sequence[int],
    routing: str,
    seed: int = 0,
    *,
    shared_uplinks: bool = False,
    effort_s: float = EFFORT_S,
) -> RoutingPrediction:
    """Routes the microbatches of one iteration and simulates it.

    An origin begins its microbatches in order, as many as it has memory for at once; the rest
    follow as others end.

    Args:
        rules: of `random` and `skip`; the others visit all stages whatever the rules let out.
        origins: of each microbatch, replicas of stage 0; several for each as a rule.
        routing: a name in `ROUTINGS`.
        seed: of the routes; draw it from the iteration's number where they shall differ.
        shared_uplinks: as in `simulate`.
        effort_s: of the search of `skip`.

    Raises:
        ValueError: an unknown routing, no microbatch, or rules that do not fit.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"no routing {routing!r}; use one of {', '.join(ROUTINGS)}")
    if not origins:
        raise ValueError("there is no microbatch to predict an iteration of")
    kept = rules_of(routing, rules)
    found = None
    if routing == "skip":
        found = search_routes(
            pipeline, kept, origins, seed=seed, effort_s=effort_s, shared_uplinks=shared_uplinks
        )
        routes = found.routes
    else:
        routes = tuple(ROUTINGS[routing](pipeline, kept, origins, seed))
    return RoutingPrediction(
        routing=routing,
        rules=kept,
        routes=routes,
        timeline=simulate(pipeline, routes, shared_uplinks=shared_uplinks),
        found=found,
    )


def rules_of(routing: str, rules: Rules) -> Rules:
    """The rules as a routing keeps them: some never skip."""
    return replace(rules, visited=rules.stages, spread=0) if routing in NEVER_SKIP else rules


Groups = tuple[tuple[int, ...], ...]

_DRAWN, _SWAPS = 16, 32
_JUDGING_EFFORT_S = 0.02


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCandidates:
    """P peers that could serve any of S stages.

    Args:
        links: between them.
        message_bytes: of one microbatch's activations, and of their gradient.
        memory: of each peer, how many microbatches it may hold.
        forward_s, backward_s: of a visit of each stage on each peer, shape (P, S).
        loss_s: on each peer, shape (P,).
    """

    links: Links
    message_bytes: float
    memory: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    loss_s: Floats

    def pipeline(self, stages: Groups) -> Pipeline:
        """With these peers on each stage. Raises ValueError as Pipeline does."""
        stage_of = np.zeros(self.links.peers, dtype=np.int64)
        for stage, replicas in enumerate(stages):
            stage_of[list(replicas)] = stage
        everyone = np.arange(self.links.peers)
        costs = Costs(
            delay_s=self.links.delay_s(),
            transfer_s=self.links.transfer_s(self.message_bytes),
            forward_s=self.forward_s[everyone, stage_of],
            backward_s=self.backward_s[everyone, stage_of],
            loss_s=self.loss_s,
        )
        return Pipeline(stages=stages, memory=self.memory, costs=costs)


def propose_placement(
    candidates: StageCandidates,
    sizes: Sequence[int],
    rules: Rules,
    microbatches: int,
    *,
    routing: str = "skip",
    seed: int = 0,
    shared_uplinks: bool = False,
) -> Groups:
    """The peers of each stage: the best of some drawn placements, then of swaps of two peers.

    Each is judged by its predicted iteration, after a quick search where routes are searched.

    Args:
        sizes: replicas of each stage.
        rules: of the routes by which placements are judged.
        microbatches: of each replica of stage 0.
        routing: by which they go.

    Raises:
        ValueError: sizes that do not add up to the peers.
    """
    peers = range(candidates.links.peers)
    if sum(sizes) != len(peers) or min(sizes) < 1:
        raise ValueError(f"stages of sizes {tuple(sizes)} do not share out {len(peers)} peers")

    def judged(stages: Groups) -> tuple[float, Groups]:
        pipeline = candidates.pipeline(stages)
        told = predict(
            pipeline,
            rules,
            origins_in_turns(pipeline, microbatches),
            routing,
            seed,
            shared_uplinks=shared_uplinks,
            effort_s=_JUDGING_EFFORT_S,
        )
        return told.iteration_s, stages

    draws = Draws(seed)
    best = min(judged(_cut(draws.shuffled(peers), sizes)) for _ in range(_DRAWN))
    for _ in range(_SWAPS if len(sizes) > 1 else 0):
        best = min(best, judged(_swapped(best[1], draws)))
    return best[1]


def _cut(peers: Sequence[int], sizes: Sequence[int]) -> Groups:
    groups, begin = [], 0
    for size in sizes:
        groups.append(tuple(sorted(peers[begin : begin + size])))
        begin += size
    return tuple(groups)


def _swapped(groups: Groups, draws: Draws) -> Groups:
    """Two peers of two groups change places."""
    one = draws.below(len(groups))
    other = (one + 1 + draws.below(len(groups) - 1)) % len(groups)
    mine, theirs = draws.one_of(groups[one]), draws.one_of(groups[other])
    changed = list(groups)
    changed[one] = tuple(sorted({*groups[one], theirs} - {mine}))
    changed[other] = tuple(sorted({*groups[other], mine} - {theirs}))
    return tuple(changed)
