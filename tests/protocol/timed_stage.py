"""A stage on the virtual clock."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from murmuration.worker.pipeline.stage_replica import StageReplica
from murmuration.worker.training.mailbox import JobKind, StageJob

_FORWARDS = {
    JobKind.ENTER: 1.0,
    JobKind.FORWARD: 1.0,
    JobKind.LOSS: 0.25,
    JobKind.BACKWARD: 2.0,
    JobKind.LEAVE: 2.0,
}


@dataclass(frozen=True)
class Iterated:
    """One iteration of a stage's replica: what was counted, and the mean gradient that it gave."""

    iteration: int
    at_s: float
    counted: frozenset[int]
    gradient: Mapping[str, Tensor]
    discarded: bool


class TimedStage(StageReplica):
    """A stage whose jobs take virtual time, and which remembers its iterations."""

    def __init__(
        self,
        *args: Any,
        clock: Callable[[], float],
        forward_s: float,
        computes: Callable[[float], None],
        **jobs: Any,
    ) -> None:
        super().__init__(*args, clock=clock, **jobs)
        self._forward_s, self._computes, self._time = forward_s, computes, clock
        self.iterations: list[Iterated] = []
        self.jobs: Counter[tuple[JobKind, int, int]] = Counter()  # kind, iteration, microbatch
        self.begun = 0
        self._summed: set[int] = set()

    def begin(self, iteration: int) -> None:
        self.begun += 1
        self._summed.clear()
        super().begin(iteration)

    def backward(self, step: int) -> Mapping[str, Tensor]:
        discarded = self._over is not None and self._over.discard
        counted = frozenset() if discarded else frozenset(self._summed)
        mean = super().backward(step)
        assert self.visits == len(counted)
        told = Iterated(
            step,
            self._time(),
            counted,
            {name: value.clone() for name, value in mean.items()},
            discarded,
        )
        self.iterations.append(told)
        return mean

    def _do(self, work: StageJob) -> tuple[memoryview, tuple[int, ...]]:
        self._computes(_FORWARDS[work.kind] * self._forward_s)
        self.jobs[work.kind, work.iteration, work.microbatch] += 1
        done = super()._do(work)
        if work.kind in (JobKind.BACKWARD, JobKind.LEAVE):
            self._summed.add(work.microbatch)
        return done
