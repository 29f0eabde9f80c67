"""Who takes a microbatch through the stages: `full`, `random`, `stochastic` and `skip`.

All peers that know the arguments find the same routes. Ref: arXiv:2506.10911 (random),
arXiv:2502.19913 (skip), arXiv:2301.11913 section 3.2 (stochastic). Ours in `stochastic`: all of an
iteration are shared out before it begins, by averaged times; ties go to the lower peer.
"""

from collections.abc import Callable, Sequence
from heapq import heapreplace

from murmuration.algorithms.skippipe import route
from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Draws, Route, Rules
from murmuration.algorithms.skippipe.search import search_routes

Routing = Callable[[Pipeline, Rules, Sequence[int], int], list[Route]]
"""(pipeline, rules, origins, seed) -> a route for each origin, which stands for one microbatch."""


def full(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Fixed lanes: the n-th microbatch always goes by the n-th replica of a stage, in turns."""
    return [
        Route((origin, *(stage[lane % len(stage)] for stage in pipeline.stages[1:])))
        for lane, origin in enumerate(origins)
    ]


def random(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Every replica in turn, in drawn orders (NoLoCo); skips at random, but evenly."""
    draws = Draws(seed)
    limits = route.peer_limits(pipeline, route.stage_quota(len(origins), rules, seed))
    chosen, decks = route.even_stage_sets(len(origins), rules, seed), []
    for replicas in pipeline.stages:  # each as often as its limit allows, dealt from the end
        turns = [
            draws.shuffled([peer for peer in replicas if limits[peer] > turn])
            for turn in range(max(limits[peer] for peer in replicas))
        ]
        decks.append([peer for turn in reversed(turns) for peer in turn])
    return [
        Route((origin, *(decks[stage].pop() for stage in stages[1:])))
        for origin, stages in zip(origins, chosen, strict=True)
    ]


def stochastic(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Each hop to the replica with the least accumulated expected time (SWARM)."""
    visit_s = (pipeline.costs.forward_s + pipeline.costs.backward_s).tolist()
    # For each stage a heap of (accumulated time, replica).
    queues = [[(0.0, peer) for peer in sorted(replicas)] for replicas in pipeline.stages[1:]]

    def choose(queue: list[tuple[float, int]]) -> int:
        accumulated_s, peer = queue[0]
        heapreplace(queue, (accumulated_s + visit_s[peer], peer))
        return peer

    return [Route((origin, *map(choose, queues))) for origin in origins]


def skip(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    return search_routes(pipeline, rules, origins, seed=seed)


ROUTINGS: dict[str, Routing] = {each.__name__: each for each in (full, random, stochastic, skip)}


def origins_in_turns(pipeline: Pipeline, microbatches: int) -> list[int]:
    """The origins of an iteration: the replicas of stage 0 in turns, each so many times."""
    return [*pipeline.stages[0]] * microbatches
