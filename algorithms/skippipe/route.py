"""The stages and peers that one microbatch visits, the rules of a route, and equal coverage.

A route is a closed loop: stage 0, the chosen stages, stage 0 again for the loss, the same stages in
reverse, stage 0. It is written as its forward half, which goes up the stages: such schedules cannot
deadlock, however short memory is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TypeVar

from murmuration.algorithms.skippipe.pipeline import Pipeline

MAX_JUMP = 4


@dataclass(frozen=True)
class Route:
    """Args: peers: those of the forward half in order; the first is the microbatch's origin."""

    peers: tuple[int, ...]

    @property
    def origin(self) -> int:
        """The replica of stage 0 that has the microbatch and its labels."""
        return self.peers[0]

    def stages(self, pipeline: Pipeline) -> tuple[int, ...]:
        return tuple(pipeline.stage_of[peer] for peer in self.peers)


Routes = tuple[Route, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of all routes. Raises ValueError: no route, or no equal coverage, can keep them."""

    stages: int
    visited: int  # stages that a route visits, stage 0 counted
    max_jump: int = MAX_JUMP  # longest step forward between two

    def __post_init__(self) -> None:
        if self.stages < 1 or not 1 <= self.visited <= self.stages:
            raise ValueError(f"a route cannot visit {self.visited} of {self.stages} stages")
        if self.visited == 1 and self.stages > 1:
            raise ValueError(
                f"routes of stage 0 alone leave {self.stages - 1} stages untrained: skip less"
            )
        if self.max_jump < 1 or (self.visited - 1) * self.max_jump < self.stages - 1:
            raise ValueError(
                f"{self.visited - 1} steps of at most {self.max_jump} stages do not reach stage "
                f"{self.stages - 1}: visit more stages or allow longer jumps"
            )


def visited_stages(stages: int, skip: float) -> int:
    """The number of stages that a route visits at a skip ratio; 0.33 of 6 are 4."""
    return max(min(2, stages), round(stages * (1 - skip)))


def keeps_rules(stages: Sequence[int], rules: Rules) -> bool:
    """Tells whether stages begin at 0 and go up to as many as are visited, in short jumps."""
    steps = [there - here for here, there in pairwise(stages)]
    begins = tuple(stages[:1]) == (0,) and len(stages) == rules.visited
    return begins and all(1 <= step <= rules.max_jump for step in steps)


T = TypeVar("T")


class Draws:
    """Only `Random.random` is promised to stay as it is, so all else is made of it."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, bound: int) -> int:
        return int(self._random.random() * bound)

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        result = list(values)
        for end in range(len(result) - 1, 0, -1):
            other = self.below(end + 1)
            result[end], result[other] = result[other], result[end]
        return result


_TRADES = 10  # per route, where routes are mixed


def stage_quota(routes: int, rules: Rules, seed: int = 0) -> tuple[int, ...]:
    """How often routes visit each stage, as equally as can be; the seed says which get more."""
    if rules.stages == 1:
        return (routes,)
    others = rules.stages - 1
    each, more = divmod(routes * (rules.visited - 1), others)
    # Of n places in a circle, those with (place * more) mod n < more are `more`, evenly spread.
    extra = ((stage - seed) * more % others < more for stage in range(others))
    return (routes, *(each + one for one in extra))


def peer_limits(pipeline: Pipeline, quota: Sequence[int]) -> tuple[int, ...]:
    """How many routes may visit each peer: its memory, or its even share if that is too little.
    Beyond its memory a peer defers what arrives."""
    limits = list(pipeline.memory)
    for stage, replicas in enumerate(pipeline.stages):
        for peer in replicas:
            limits[peer] = min(limits[peer], quota[stage])
        short = quota[stage] - sum(limits[peer] for peer in replicas)
        for extra in range(short):
            limits[replicas[extra % len(replicas)]] += 1
    return tuple(limits)


def even_stage_sets(routes: int, rules: Rules, seed: int = 0) -> list[tuple[int, ...]]:
    """Ascending stages of each route that meet the quota and the rules, drawn by the seed."""
    draws, quota = Draws(seed), stage_quota(routes, rules, seed)
    left = list(quota)
    chosen: list[tuple[int, ...]] = []
    for _ in range(routes):
        # Those with the most visits left first: then none is left with more than there are routes.
        order = sorted(draws.shuffled(range(1, rules.stages)), key=lambda stage: -left[stage])
        stages = (0, *sorted(order[: rules.visited - 1]))
        for stage in stages:
            left[stage] -= 1
        chosen.append(stages)
    assert not any(left)
    if all(keeps_rules(stages, rules) for stages in chosen):
        return chosen
    # All visits in order of their stages, dealt to the routes in turns: no route gets a stage
    # twice, and jumps are as even as can be. Then random trades, where the rules allow them.
    visits = [stage for stage, count in enumerate(quota) for _ in range(count)]
    chosen = [tuple(visits[route::routes]) for route in range(routes)]
    for _ in range(_TRADES * routes):
        one, other = draws.below(routes), draws.below(routes)
        mine, theirs = set(chosen[one]), set(chosen[other])
        if mine == theirs:
            continue
        gives, gets = draws.one_of(sorted(mine - theirs)), draws.one_of(sorted(theirs - mine))
        pair = tuple(sorted(mine - {gives} | {gets})), tuple(sorted(theirs - {gets} | {gives}))
        if all(keeps_rules(stages, rules) for stages in pair):
            chosen[one], chosen[other] = pair
    return draws.shuffled(chosen)
