"""One iteration, event by event: which peer computes what when, and what waits.

Every peer computes one visit at a time. Backwards (and the loss) go first, in order of arrival, and
always may run: they free memory. A forward starts when nothing else is ready and the peer holds
fewer microbatches than its memory; else it is deferred, in order of arrival. A microbatch is held
from the start of its forward to the end of its backward. The messages of a peer leave one after
another, by its own line.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from murmuration.algorithms.skippipe.pipeline import Pipeline
from murmuration.algorithms.skippipe.route import Route

Started = Callable[[int, int, int, float, float], None]
"""(peer, microbatch, step, when it starts, when it ends)"""


def finish_times(pipeline: Pipeline, routes: Sequence[Route]) -> list[float]:
    """The end of each microbatch's last backward (s); origins begin them in this order."""
    run = IterationRun(pipeline, routes)
    run.run()
    assert min(run.finish_s, default=0.0) >= 0, "the schedule deadlocks"
    return run.finish_s


class IterationRun:
    """The state of a simulation. A microbatch that visits k stages takes steps 0..2k: k forwards,
    the loss, k backwards; `path` has the peer of each. `deferred` wait for memory, by peer;
    `finish_s` is when each microbatch has ended, -1 before."""

    def __init__(self, pipeline: Pipeline, routes: Sequence[Route]) -> None:
        self._memory = pipeline.memory
        costs = self._costs = pipeline.costs
        times_s = [each.tolist() for each in (costs.forward_s, costs.loss_s, costs.backward_s)]
        forward_s, loss_s, backward_s = times_s
        self._visited = [len(route.peers) for route in routes]
        self.path = [(*route.peers, *route.peers[:1], *route.peers[::-1]) for route in routes]
        self._lasts_s = [  # of each step
            [
                *(forward_s[peer] for peer in route.peers),
                loss_s[route.origin],
                *(backward_s[peer] for peer in reversed(route.peers)),
            ]
            for route in routes
        ]
        peers = pipeline.peers
        self._returning = [deque[tuple[int, int]]() for _ in range(peers)]
        self.deferred, self._holds = [deque[tuple[int, int]]() for _ in range(peers)], [0] * peers
        self._busy, self._uplink_free_s = [False] * peers, [0.0] * peers
        self.finish_s = [-1.0] * len(routes)

    def run(self, started: Started | None = None) -> None:
        """Goes on until nothing happens any more; `started` is told of each step as it starts."""
        path, lasts_s, visited = self.path, self._lasts_s, self._visited
        # (time, serial number: ties in order of cause, microbatch, step, whether it ends there)
        events = [(0.0, index, index, 0, False) for index in range(len(path))]
        heapify(events)
        serial = len(events)
        while events:
            now_s, touched = events[0][0], []
            # All that happens at one time is known before anyone chooses what to do next.
            while events and events[0][0] == now_s:
                _, _, microbatch, step, ended = heappop(events)
                peer = path[microbatch][step]
                touched.append(peer)
                if not ended:
                    arrived = self.deferred if step < visited[microbatch] else self._returning
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
                if (chosen := self._start(peer)) is None:
                    continue
                microbatch, step = chosen
                end_s = now_s + lasts_s[microbatch][step]
                heappush(events, (end_s, serial, microbatch, step, True))
                serial += 1
                if started is not None:
                    started(peer, microbatch, step, now_s, end_s)

    def _send(self, sender: int, receiver: int, now_s: float) -> float:
        if sender == receiver:
            return now_s
        leaves_s = max(now_s, self._uplink_free_s[sender])
        free_s = leaves_s + float(self._costs.transfer_s[sender, receiver])
        self._uplink_free_s[sender] = free_s
        return free_s + float(self._costs.delay_s[sender, receiver])

    def _start(self, peer: int) -> tuple[int, int] | None:
        if self._busy[peer]:
            return None
        if self._returning[peer]:
            chosen = self._returning[peer].popleft()
        elif self.deferred[peer] and self._holds[peer] < self._memory[peer]:
            chosen = self.deferred[peer].popleft()
            self._holds[peer] += 1
        else:
            return None
        self._busy[peer] = True
        return chosen
