"""The stages and peers that one microbatch visits, and what a route may not do.

A route is a closed loop: stage 0, the chosen stages, stage 0 again for the loss, the same stages in
reverse, stage 0. It is written as its forward half.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from algorithms.skippipe.pipeline import Pipeline

MAX_SWAPS = 2  # each steps one stage back, so their total distance is at most 2 as well
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
        swaps: whether a route may step back, by one stage and at most twice. Such schedules can
            deadlock where memory is short; ascending ones cannot.

    Raises:
        ValueError: rules that no route, or no equal coverage, can keep.
    """

    stages: int
    visited: int
    spread: int = 0
    max_jump: int = MAX_JUMP
    swaps: bool = False

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
    steps = [(here, there) for here, there in pairwise(stages)]
    reasons += [
        f"it jumps from stage {here} to {there}, more than {rules.max_jump}"
        for here, there in steps
        if there - here > rules.max_jump
    ]
    back = [(here, there) for here, there in steps if there < here]
    if back and not rules.swaps:
        reasons.append(f"it goes back from stage {back[0][0]} to {back[0][1]}")
    elif len(back) > MAX_SWAPS:
        reasons.append(f"it goes back {len(back)} times, more than {MAX_SWAPS}")
    reasons += [
        f"it goes back from stage {here} to {there}, more than one stage"
        for here, there in back
        if rules.swaps and here - there > 1
    ]
    return tuple(reasons)
