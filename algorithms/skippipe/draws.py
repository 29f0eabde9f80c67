"""Seeded draws, and the equal coverage that routes in flight together are drawn to keep.

Coverage says how often each stage and each peer is visited. The draws are the same on every machine
and Python version.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Rules, stage_refusals

T = TypeVar("T")


class Draws:
    """Only `Random.random` is promised to stay as it is, so all else is made of it."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def below(self, bound: int) -> int:
        """A number in 0..bound-1."""
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
    """How often each stage is visited by a batch of routes; equally often, or as near as it goes.

    Where the visits do not divide evenly, some stages get one more; which ones turns with the seed,
    so that over seeds in a row the coverage is equal.
    """
    if rules.stages == 1:
        return (routes,)
    others = rules.stages - 1
    each, more = divmod(routes * (rules.visited - 1), others)
    # Of n places in a circle, those with (place * more) mod n < more are `more`, evenly spread.
    extra = ((stage - seed) * more % others < more for stage in range(others))
    return (routes, *(each + one for one in extra))


def peer_limits(pipeline: Pipeline, quota: Sequence[int]) -> tuple[int, ...]:
    """How many routes may visit each peer: its memory, or its even share if that is too little;
    never more than visit its stage.

    Beyond its memory a peer defers what arrives, and so it does on stage 0, where all begin.
    """
    limits = list(pipeline.memory)
    for stage, replicas in enumerate(pipeline.stages):
        for peer in replicas:
            limits[peer] = min(limits[peer], quota[stage])
        short = quota[stage] - sum(limits[peer] for peer in replicas)
        for extra in range(short):
            limits[replicas[extra % len(replicas)]] += 1
    return tuple(limits)


def even_stage_sets(routes: int, rules: Rules, seed: int = 0) -> list[tuple[int, ...]]:
    """Ascending stages of each route that meet the quota and the rules, drawn by the seed.

    Where routes are unequal and few, some may stay nearer to the mean than the rules allow.
    """
    draws = Draws(seed)
    quota = stage_quota(routes, rules, seed)
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
    if any(stage_refusals(stages, rules) for stages in chosen):
        chosen = _mixed(_striped(quota, routes), rules, draws)
    return _unequal(chosen, rules, draws) if rules.spread else chosen


def _unequal(chosen: list[tuple[int, ...]], rules: Rules, draws: Draws) -> list[tuple[int, ...]]:
    """After one half of the routes has taken stages over from the other, where the rules allow."""
    half = len(chosen) // 2
    order = draws.shuffled(range(len(chosen)))
    takers, givers = order[:half] * rules.spread, order[half : 2 * half] * rules.spread
    for _ in range(_TRADES * len(takers)):
        if not takers:
            break
        at, of = draws.below(len(takers)), draws.below(len(givers))
        mine, theirs = set(chosen[takers[at]]), set(chosen[givers[of]])
        if not theirs - mine:
            continue
        moved = draws.one_of(sorted(theirs - mine))
        left = tuple(sorted(theirs - {moved}))
        if not stage_refusals(left, rules):
            chosen[takers.pop(at)], chosen[givers.pop(of)] = tuple(sorted(mine | {moved})), left
    return chosen


def _striped(quota: Sequence[int], routes: int) -> list[tuple[int, ...]]:
    """All visits in order of their stages, dealt to the routes in turns.

    No stage has more visits than there are routes, so no route gets one twice; and jumps are as
    even as they can be, so that none is longer than rules that reach the last stage allow.
    """
    visits = [stage for stage, count in enumerate(quota) for _ in range(count)]
    return [tuple(visits[route::routes]) for route in range(routes)]


def _mixed(chosen: list[tuple[int, ...]], rules: Rules, draws: Draws) -> list[tuple[int, ...]]:
    """After random trades of stages between routes, where the rules allow them."""
    for _ in range(_TRADES * len(chosen)):
        one, other = draws.below(len(chosen)), draws.below(len(chosen))
        mine, theirs = set(chosen[one]), set(chosen[other])
        if mine == theirs:
            continue
        gives, gets = draws.one_of(sorted(mine - theirs)), draws.one_of(sorted(theirs - mine))
        pair = tuple(sorted(mine - {gives} | {gets})), tuple(sorted(theirs - {gets} | {gives}))
        if not any(stage_refusals(stages, rules) for stages in pair):
            chosen[one], chosen[other] = pair
    return draws.shuffled(chosen)
