"""One direction of a link, whose rate all that is under way shares equally."""

import heapq

from murmuration.worker.simulation.clock import Act, Clock

_CLOSE_BYTES = 1e-6  # what is as good as through


class Load:
    """Bytes in one direction of a link; through when everyone has had `end` bytes served."""

    __slots__ = ("done", "end", "gone")

    def __init__(self, end: float, done: Act) -> None:
        self.end, self.done, self.gone = end, done, False


def _nothing() -> None:
    pass


class Pipe:
    """One direction of a link: equal shares for all loads, kept by the bytes each has been served.

    Args:
        clock: virtual time.
        bytes_per_s: its rate.
    """

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock, self._rate = clock, bytes_per_s
        self._served, self._at = 0.0, 0.0
        self._loads: list[tuple[float, int, Load]] = []
        self._active = self._added = self._plans = 0

    def add(self, size: float, done: Act) -> Load:
        """Begins to carry this many bytes; calls `done` when they are through."""
        self._advance()
        load = Load(self._served + size, done)
        self._added += 1
        heapq.heappush(self._loads, (load.end, self._added, load))
        self._active += 1
        self._plan()
        return load

    def remove(self, load: Load) -> float:
        """Takes a load off; returns the bytes that had not passed, 0 if it was through."""
        if load.gone:
            return 0.0
        self._advance()
        left = max(0.0, load.end - self._served)
        load.gone, load.done = True, _nothing
        self._active -= 1
        self._plan()
        return left

    def _advance(self) -> None:
        now = self._clock.now
        if self._active:
            self._served += (now - self._at) * self._rate / self._active
        self._at = now

    def _plan(self) -> None:
        """For when the next load is through, as things are."""
        self._plans += 1
        while self._loads and self._loads[0][2].gone:
            heapq.heappop(self._loads)
        if not self._loads:
            self._served = 0.0
            return
        left = max(0.0, self._loads[0][0] - self._served)
        plan = self._plans
        self._clock.after(left * self._active / self._rate, lambda: self._complete(plan))

    def _complete(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._advance()
        self._served = max(self._served, self._loads[0][0])
        through: list[Load] = []
        while self._loads and self._loads[0][0] <= self._served + _CLOSE_BYTES:
            load = heapq.heappop(self._loads)[2]
            if not load.gone:
                load.gone = True
                self._active -= 1
                through.append(load)
        self._plan()
        for load in through:
            done, load.done = load.done, _nothing  # which refers to the load
            done()
