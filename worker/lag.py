"""How late the I/O loop runs: what a peer on the network feels of this process's load."""

import asyncio
import random
from collections.abc import Callable

_PERIOD_S = 0.05
_SAMPLES = 20_000


class LagMonitor:
    """Sleeps 50 ms again and again and keeps a uniform sample of how much later it wakes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples_s: list[float] = []
        self._seen = 0
        self._max_s = 0.0
        self._rng = random.Random(0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            before = self._clock()
            await asyncio.sleep(_PERIOD_S)
            self._add(max(0.0, self._clock() - before - _PERIOD_S))

    def summary_ms(self) -> dict[str, float]:
        """p50, p99 and max so far, milliseconds; zeros before the first sample."""
        ordered = sorted(self._samples_s) or [0.0]
        return {
            "p50": round(1000 * ordered[len(ordered) // 2], 3),
            "p99": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 3),
            "max": round(1000 * self._max_s, 3),
        }

    def _add(self, lag_s: float) -> None:
        self._max_s = max(self._max_s, lag_s)
        self._seen += 1
        if len(self._samples_s) < _SAMPLES:
            self._samples_s.append(lag_s)
        elif (slot := self._rng.randrange(self._seen)) < _SAMPLES:
            self._samples_s[slot] = lag_s
