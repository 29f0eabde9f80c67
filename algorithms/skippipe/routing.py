"""Who takes a microbatch through the stages: `full`, `random`, `stochastic` and `skip`.

full        every stage, fixed lanes
random      a seeded permutation of each stage's replicas for every batch (NoLoCo)
stochastic  every stage; each hop to the replica with the least accumulated expected time (SWARM)
skip        searched routes (SkipPipe)

All peers that know the arguments find the same routes.

Ref: arXiv:2506.10911 (random), arXiv:2502.19913 (skip), arXiv:2301.11913 section 3.2 (stochastic).
Ours in `stochastic`: all microbatches of an iteration are shared out before it begins, by times
that the caller has averaged, so nobody joins, fails or is measured meanwhile; ties go to the lower
peer.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heapreplace

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import (
    Draws,
    Route,
    Rules,
    even_stage_sets,
    peer_limits,
    stage_quota,
)
from murmuration.algorithms.skippipe.search import search_routes

Routing = Callable[[Pipeline, Rules, Sequence[int], int], list[Route]]
"""(pipeline, rules, origins, seed) -> a route for each origin, which stands for one microbatch.

Every peer that knows the arguments finds the same routes.
"""


def full(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Fixed lanes: the n-th microbatch always goes by the n-th replica of a stage, in turns.

    Raises:
        ValueError: rules that skip.
    """
    _refuse_skips("full", rules)
    return [
        Route((origin, *(stage[lane % len(stage)] for stage in pipeline.stages[1:])))
        for lane, origin in enumerate(origins)
    ]


def random(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """Every replica in turn, in an order drawn for each turn; skips at random, but evenly."""
    draws = Draws(seed)
    quota = stage_quota(len(origins), rules, seed)
    limits = peer_limits(pipeline, quota)
    chosen = even_stage_sets(len(origins), rules, seed)
    decks = [_deck(stage, limits, draws) for stage in pipeline.stages]
    return [
        Route((origin, *(decks[stage].pop() for stage in stages[1:])))
        for origin, stages in zip(origins, chosen, strict=True)
    ]


def stochastic(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """What peers choose that know each replica's time for a microbatch and nothing of the links.

    Raises:
        ValueError: rules that skip.
    """
    _refuse_skips("stochastic", rules)
    costs = pipeline.costs
    visit_s = (costs.forward_s + costs.backward_s).tolist()
    queues = [
        ReplicaQueue({peer: visit_s[peer] for peer in replicas}) for replicas in pipeline.stages[1:]
    ]
    return [Route((origin, *(queue.choose() for queue in queues))) for origin in origins]


def skip(pipeline: Pipeline, rules: Rules, origins: Sequence[int], seed: int) -> list[Route]:
    """The routes that the search finds."""
    return list(search_routes(pipeline, rules, origins, seed=seed).routes)


ROUTINGS: dict[str, Routing] = {
    "full": full,
    "random": random,
    "stochastic": stochastic,
    "skip": skip,
}


def _refuse_skips(name: str, rules: Rules) -> None:
    if rules.visited != rules.stages:
        raise ValueError(
            f"routing {name!r} visits all {rules.stages} stages, not {rules.visited}: "
            "use 'skip' or 'random' to skip stages"
        )


def _deck(replicas: Sequence[int], limits: Sequence[int], draws: Draws) -> list[int]:
    """Each replica as often as its limit allows, in shuffled turns; dealt from the end."""
    turns = [
        draws.shuffled([peer for peer in replicas if limits[peer] > turn])
        for turn in range(max(limits[peer] for peer in replicas))
    ]
    return [peer for turn in reversed(turns) for peer in turn]


class ReplicaQueue:
    """The replicas of one stage. Args: expected_s: of each, the time that a microbatch takes."""

    def __init__(self, expected_s: Mapping[int, float]) -> None:
        self._expected_s = expected_s
        self._heap = [(0.0, peer) for peer in expected_s]
        heapify(self._heap)

    def choose(self) -> int:
        """The replica for the next microbatch, which is charged for it."""
        accumulated_s, peer = self._heap[0]
        heapreplace(self._heap, (accumulated_s + self._expected_s[peer], peer))
        return peer


def origins_in_turns(pipeline: Pipeline, microbatches: int) -> list[int]:
    """Of an iteration: the replicas of stage 0 in turns, each for that many microbatches."""
    return [origin for _ in range(microbatches) for origin in pipeline.stages[0]]
