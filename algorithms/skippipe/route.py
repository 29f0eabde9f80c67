"""The stages and peers that one microbatch visits, what a route may not do, and how two trade.

A route is a closed loop: stage 0, the chosen stages, stage 0 again for the loss, the same stages in
reverse, stage 0. It is written as its forward half, which goes up the stages: schedules of such
routes cannot deadlock, however short memory is.

Trades of two routes leave every stage and peer as often visited as before.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        """The visited stages in order."""
        return tuple(pipeline.stage_of[peer] for peer in self.peers)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What every route keeps to.

    Args:
        stages: S, of the model.
        visited: stages that a route visits, stage 0 counted; of unequal routes the mean.
        spread: how many stages more half of the routes visit, and the other half fewer.
        max_jump: longest step forward between two visited stages.

    Raises:
        ValueError: rules that no route, or no equal coverage, can keep.
    """

    stages: int
    visited: int
    spread: int = 0
    max_jump: int = MAX_JUMP

    def __post_init__(self) -> None:
        if self.stages < 1 or not 1 <= self.visited <= self.stages:
            raise ValueError(f"a route cannot visit {self.visited} of {self.stages} stages")
        if self.visited == 1 and self.stages > 1:
            raise ValueError(
                f"routes of stage 0 alone leave {self.stages - 1} stages untrained: skip less"
            )
        if self.spread < 0 or self.longest > self.stages or (self.spread and self.shortest < 2):
            raise ValueError(
                f"routes of {self.visited} of {self.stages} stages cannot be unequal by "
                f"{self.spread}: each visits at least 2 and at most {self.stages}"
            )
        if self.max_jump < 1 or (self.shortest - 1) * self.max_jump < self.stages - 1:
            raise ValueError(
                f"{self.shortest - 1} steps of at most {self.max_jump} stages do not reach stage "
                f"{self.stages - 1}: visit more stages or allow longer jumps"
            )

    @property
    def shortest(self) -> int:
        """The fewest stages that a route visits."""
        return self.visited - self.spread

    @property
    def longest(self) -> int:
        """The most stages that a route visits."""
        return self.visited + self.spread

    @property
    def skip_ratio(self) -> float:
        return 1 - self.visited / self.stages


def visited_stages(stages: int, skip: float) -> int:
    """How many of the stages a route visits at a skip ratio; 0.33 of 6 are 4.

    Raises:
        ValueError: a ratio out of range.
    """
    if not 0 <= skip < 1:
        raise ValueError(f"a skip ratio of {skip:g}; it must be at least 0 and below 1")
    return max(min(2, stages), round(stages * (1 - skip)))


def stage_refusals(stages: Sequence[int], rules: Rules) -> tuple[str, ...]:
    """Why an order of stages is not allowed; empty if it is."""
    reasons = []
    if not stages or stages[0] != 0:
        reasons.append("it does not begin on stage 0, which is never skipped")
    reasons += [
        f"stage {stage} is visited {times} times"
        for stage, times in sorted(Counter(stages).items())
        if times > 1
    ]
    if not rules.shortest <= len(stages) <= rules.longest:
        unequal = f" to {rules.longest}" if rules.spread else ""
        reasons.append(f"it visits {len(stages)} stages instead of {rules.shortest}{unequal}")
    steps = list(pairwise(stages))
    reasons += [
        f"it jumps from stage {here} to {there}, more than {rules.max_jump}"
        for here, there in steps
        if there - here > rules.max_jump
    ]
    reasons += [
        f"it goes back from stage {here} to {there}" for here, there in steps if there < here
    ]
    return tuple(reasons)


Pair = tuple[Route, Route]


def trade_replica(one: Route, other: Route, stage: int, pipeline: Pipeline) -> Pair | None:
    """Both visit the stage, each by the other's replica from now on."""
    mine, theirs = _by_stage(one, pipeline).get(stage), _by_stage(other, pipeline).get(stage)
    if mine is None or theirs is None or mine == theirs:
        return None
    return _replaced(one, mine, theirs), _replaced(other, theirs, mine)


def trade_stage(
    one: Route, other: Route, gives: int, gets: int, pipeline: Pipeline, rules: Rules
) -> Pair | None:
    """The one visits stage `gets` instead of `gives`, the other the reverse."""
    mine, theirs = _by_stage(one, pipeline), _by_stage(other, pipeline)
    if gives not in mine or gives in theirs or gets not in theirs or gets in mine:
        return None
    given, got = mine.pop(gives), theirs.pop(gets)
    mine[gets], theirs[gives] = got, given
    pair = _route(mine), _route(theirs)
    if any(stage_refusals(route.stages(pipeline), rules) for route in pair):
        return None
    return pair


def trade_all(one: Route, other: Route) -> Pair:
    """Each takes the other's way, from its own origin."""
    return (
        Route((one.origin, *other.peers[1:])),
        Route((other.origin, *one.peers[1:])),
    )


def move_visit(route: Route, to: int, pipeline: Pipeline) -> Route:
    """Visits the stage of peer `to`, which is one of its own, by that peer from now on."""
    return _replaced(route, _by_stage(route, pipeline)[pipeline.stage_of[to]], to)


def _by_stage(route: Route, pipeline: Pipeline) -> dict[int, int]:
    return {pipeline.stage_of[peer]: peer for peer in route.peers}


def _route(by_stage: dict[int, int]) -> Route:
    return Route(tuple(by_stage[stage] for stage in sorted(by_stage)))


def _replaced(route: Route, old: int, new: int) -> Route:
    return Route(tuple(new if peer == old else peer for peer in route.peers))
