"""What each peer computes in a simulated iteration, and when; or why the iteration never ends."""

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
class Deadlock:
    """Args: cycle: (peer, microbatch that it holds and that the next peer defers), closed."""

    cycle: tuple[tuple[int, int], ...]

    @property
    def reason(self) -> str:
        peers = [peer for peer, _ in self.cycle]
        waits = (
            f"peer {peer} is full and holds microbatch {microbatch}, which waits for peer {next_}"
            for (peer, microbatch), next_ in zip(self.cycle, [*peers[1:], peers[0]], strict=True)
        )
        return "; ".join(waits)


@dataclass(frozen=True)
class Timeline:
    """What happened.

    Args:
        spans: of each peer, in order of time.
        finish_s: of each microbatch, the end of its last backward; None where it never ended.
        peak: of each peer, the most microbatches that it held at once.
        deadlock: why the rest never ended.
    """

    spans: tuple[tuple[Span, ...], ...]
    finish_s: tuple[float | None, ...]
    peak: tuple[int, ...]
    deadlock: Deadlock | None

    @property
    def iteration_s(self) -> float:
        """Until the last microbatch has finished.

        Raises:
            ValueError: it never does.
        """
        if self.deadlock is not None:
            raise ValueError(f"the iteration never ends: {self.deadlock.reason}")
        return max((end_s for end_s in self.finish_s if end_s is not None), default=0.0)

    def busy_s(self, peer: int) -> float:
        """How long a peer computes; the rest of the iteration it is idle."""
        return sum(span.end_s - span.start_s for span in self.spans[peer])


def simulate(
    pipeline: Pipeline, routes: Sequence[Route], *, shared_uplinks: bool = False
) -> Timeline:
    """Runs one iteration. Args: as `finish_times`."""
    run = IterationRun(pipeline, routes, shared_uplinks)
    spans: list[list[Span]] = [[] for _ in range(pipeline.peers)]

    def started(peer: int, microbatch: int, step: int, start_s: float, end_s: float) -> None:
        kind = _kind(step, len(routes[microbatch].peers))
        spans[peer].append(Span(peer, microbatch, kind, start_s, end_s))

    run.run(started)
    finish_s = tuple(None if end_s < 0 else end_s for end_s in run.finish_s)
    deadlock = None if None not in finish_s else _deadlock(run)
    return Timeline(tuple(map(tuple, spans)), finish_s, tuple(map(_peak, spans)), deadlock)


def _peak(spans: Sequence[Span]) -> int:
    """The most microbatches that a peer held at once: from a forward to the end of its backward."""
    changes = [(span.start_s, 1) for span in spans if span.kind is Kind.FORWARD]
    changes += [(span.end_s, -1) for span in spans if span.kind is Kind.BACKWARD]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def _deadlock(run: IterationRun) -> Deadlock:
    """The peers that wait for each other in a circle, once nothing happens any more."""
    # All that is left are forwards that full peers defer. Each full peer holds microbatches
    # that are deferred elsewhere, so following them leads back to where one was.
    waits_for = {
        run.path[microbatch][at]: (microbatch, peer)
        for peer, queue in enumerate(run.deferred)
        for microbatch, step in reversed(queue)
        for at in range(step)
    }
    here = next(peer for peer, queue in enumerate(run.deferred) if queue)
    walked: list[tuple[int, int]] = []
    while here not in [peer for peer, _ in walked]:
        microbatch, there = waits_for[here]
        walked.append((here, microbatch))
        here = there
    first = [peer for peer, _ in walked].index(here)
    return Deadlock(tuple(walked[first:]))


def _kind(step: int, visited: int) -> Kind:
    if step == visited:
        return Kind.LOSS
    return Kind.FORWARD if step < visited else Kind.BACKWARD
