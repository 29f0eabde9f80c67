"""One iteration, event by event: which peer computes what when, what waits, and whether it ends.

Every peer computes one visit at a time. Backwards (and the loss) go first, in order of arrival, and
always may run: they free memory. A forward starts when nothing else is ready and the peer holds
fewer microbatches than its memory; else it is deferred, and deferred forwards start in order of
arrival. A microbatch is held from the start of its forward to the end of its backward.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Route


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
    """Runs one iteration.

    Args:
        routes: of the microbatches, in the order in which their origins begin them.
        shared_uplinks: whether the messages of a peer leave one after another, as they do where
            its own line is what limits the rate, rather than each as if it were alone.
    """
    run = _IterationRun(pipeline, routes, shared_uplinks)
    spans: list[list[Span]] = [[] for _ in range(pipeline.peers)]
    run.run(spans)
    finish_s = tuple(None if end_s < 0 else end_s for end_s in run.finish_s)
    deadlock = None if None not in finish_s else run.deadlock()
    return Timeline(tuple(map(tuple, spans)), finish_s, tuple(run.peak), deadlock)


def finish_times(
    pipeline: Pipeline, routes: Sequence[Route], *, shared_uplinks: bool = False
) -> list[float]:
    """Of each microbatch, as `simulate` gives them, but faster. Routes must not deadlock."""
    run = _IterationRun(pipeline, routes, shared_uplinks)
    run.run(None)
    assert min(run.finish_s, default=0.0) >= 0, "the schedule deadlocks"
    return run.finish_s


class _IterationRun:
    """The state of a simulation.

    A microbatch that visits k stages takes steps 0..2k: k forwards, the loss, k backwards.
    """

    def __init__(self, pipeline: Pipeline, routes: Sequence[Route], shared_uplinks: bool) -> None:
        self._shared, self._memory = shared_uplinks, pipeline.memory
        costs = pipeline.costs
        times_s = [each.tolist() for each in (costs.forward_s, costs.loss_s, costs.backward_s)]
        self._costs, self._edges = costs, pipeline.edges
        self._visited = [len(route.peers) for route in routes]
        self._path = [(*route.peers, *route.peers[:1], *route.peers[::-1]) for route in routes]
        self._lasts_s = [_durations(route, times_s) for route in routes]
        peers = pipeline.peers
        self._returning = [deque[tuple[int, int]]() for _ in range(peers)]
        self._deferred = [deque[tuple[int, int]]() for _ in range(peers)]
        self._holds = [0] * peers
        self._busy = [False] * peers
        self._uplink_free_s = [0.0] * peers
        self.peak = [0] * peers
        self.finish_s = [-1.0] * len(routes)

    def run(self, spans: list[list[Span]] | None) -> None:
        """Until nothing happens any more; records the spans unless they are None."""
        path, lasts_s, visited = self._path, self._lasts_s, self._visited
        # (time, serial number: ties in order of cause, microbatch, step, whether it ends there)
        events = [(0.0, index, index, 0, False) for index in range(len(path))]
        heapify(events)
        serial = len(events)
        while events:
            now_s = events[0][0]
            touched = []
            # All that happens at one time is known before anyone chooses what to do next.
            while events and events[0][0] == now_s:
                _, _, microbatch, step, ended = heappop(events)
                peer = path[microbatch][step]
                touched.append(peer)
                if not ended:
                    arrived = self._deferred if step < visited[microbatch] else self._returning
                    arrived[peer].append((microbatch, step))
                    continue
                self._busy[peer] = False
                if step > visited[microbatch]:
                    self._holds[peer] -= 1
                if step == 2 * visited[microbatch]:
                    self.finish_s[microbatch] = now_s
                    continue
                there_s = self._send(peer, path[microbatch][step + 1], now_s)
                heappush(events, (there_s, serial, microbatch, step + 1, False))
                serial += 1
            for peer in touched:
                if (started := self._start(peer)) is None:
                    continue
                microbatch, step = started
                end_s = now_s + lasts_s[microbatch][step]
                heappush(events, (end_s, serial, microbatch, step, True))
                serial += 1
                if spans is not None:
                    kind = _kind(step, visited[microbatch])
                    spans[peer].append(Span(peer, microbatch, kind, now_s, end_s))

    def _send(self, sender: int, receiver: int, now_s: float) -> float:
        """When a message that is ready now has arrived."""
        if not self._shared or sender == receiver:
            return now_s + self._edges[sender][receiver]
        leaves_s = max(now_s, self._uplink_free_s[sender])
        free_s = leaves_s + float(self._costs.transfer_s[sender, receiver])
        self._uplink_free_s[sender] = free_s
        return free_s + float(self._costs.delay_s[sender, receiver])

    def _start(self, peer: int) -> tuple[int, int] | None:
        """The visit that a peer takes up now, if any."""
        if self._busy[peer]:
            return None
        if self._returning[peer]:
            chosen = self._returning[peer].popleft()
        elif self._deferred[peer] and self._holds[peer] < self._memory[peer]:
            chosen = self._deferred[peer].popleft()
            self._holds[peer] += 1
            self.peak[peer] = max(self.peak[peer], self._holds[peer])
        else:
            return None
        self._busy[peer] = True
        return chosen

    def deadlock(self) -> Deadlock:
        """The peers that wait for each other in a circle, once nothing happens any more."""
        # All that is left are forwards that full peers defer. Each full peer holds microbatches
        # that are deferred elsewhere, so following them leads back to where one was.
        waits_for = {
            self._path[microbatch][at]: (microbatch, peer)
            for peer, queue in enumerate(self._deferred)
            for microbatch, step in reversed(queue)
            for at in range(step)
        }
        here = next(peer for peer, queue in enumerate(self._deferred) if queue)
        walked: list[tuple[int, int]] = []
        while here not in [peer for peer, _ in walked]:
            microbatch, there = waits_for[here]
            walked.append((here, microbatch))
            here = there
        first = [peer for peer, _ in walked].index(here)
        return Deadlock(tuple(walked[first:]))


def _durations(route: Route, times_s: Sequence[Sequence[float]]) -> list[float]:
    """Of each step of a microbatch. Args: times_s: forward, loss and backward of each peer."""
    forward_s, loss_s, backward_s = times_s
    return [
        *(forward_s[peer] for peer in route.peers),
        loss_s[route.origin],
        *(backward_s[peer] for peer in reversed(route.peers)),
    ]


def _kind(step: int, visited: int) -> Kind:
    if step == visited:
        return Kind.LOSS
    return Kind.FORWARD if step < visited else Kind.BACKWARD
