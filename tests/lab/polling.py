"""For benchmarks that watch processes from outside, which tell nobody what they have come to."""

import time
from collections.abc import Callable


def seconds_until(
    reached: Callable[[], bool], patience_s: float, every_s: float = 0.1
) -> float | None:
    """How long it took; None where it has not come to that in time. It is asked at least once."""
    began = time.monotonic()
    while not reached():
        if time.monotonic() - began > patience_s:
            return None
        time.sleep(every_s)
    return time.monotonic() - began
