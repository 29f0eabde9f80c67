"""What each peer computes in a simulated iteration, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Route
from murmuration.algorithms.skippipe.simulator import IterationRun


class Kind(Enum):
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Span:
    """One visit of one microbatch on one peer."""

    peer: int
    microbatch: int
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What happened.

    Args:
        spans: of each peer, in order of time.
        finish_s: of each microbatch, the end of its last backward; -1 where it never ended.
    """

    spans: tuple[tuple[Span, ...], ...]
    finish_s: tuple[float, ...]


def simulate(pipeline: Pipeline, routes: Sequence[Route]) -> Timeline:
    """Runs one iteration."""
    run = IterationRun(pipeline, routes, False)
    spans: list[list[Span]] = [[] for _ in range(pipeline.peers)]

    def started(peer: int, microbatch: int, step: int, start_s: float, end_s: float) -> None:
        kind = _kind(step, len(routes[microbatch].peers))
        spans[peer].append(Span(peer, microbatch, kind, start_s, end_s))

    run.run(started)
    return Timeline(tuple(map(tuple, spans)), tuple(run.finish_s))


def _kind(step: int, visited: int) -> Kind:
    if step == visited:
        return Kind.LOSS
    return Kind.FORWARD if step < visited else Kind.BACKWARD
