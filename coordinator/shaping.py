"""What a link does to bytes, as decisions on a clock that is handed in: no sockets, no waiting.

A chunk of bytes passes the sender's upward bucket and the receiver's downward one, then waits in a
delay line. Times are seconds of any monotonic clock.
"""

import math
import random
from dataclasses import dataclass, field

from murmuration.algorithms.link import Link

BURST_S = 0.02  # of the rate: makes up for timers that fire late
_CHUNK_S = 0.004  # of the rate
_CHUNK_BYTES = (4 * 1024, 128 * 1024)  # least and most


class Bucket:
    """One direction of a link, first come first served. In any T seconds at most
    rate * (T + BURST_S) bytes pass.

    Args:
        rate_bytes_s: infinite lets everything pass at once.
    """

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate = rate_bytes_s
        self._free_at_s = -math.inf

    def take(self, n_bytes: int, now_s: float) -> float:
        """Books the next bytes; returns when the last has passed, `now_s` or before if at once."""
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + n_bytes / self._rate
        return self._free_at_s


class DelayLine:
    """The way through the air for one direction of one connection: later, never out of order."""

    def __init__(self, delay_s: float, jitter_s: float, chance: random.Random) -> None:
        self._delay_s, self._jitter_s, self._chance = delay_s, jitter_s, chance
        self._last_s = -math.inf

    def due(self, sent_s: float) -> float:
        """When bytes arrive that were sent at `sent_s`; never before those sent earlier."""
        jitter_s = self._chance.uniform(-self._jitter_s, self._jitter_s) if self._jitter_s else 0.0
        self._last_s = max(self._last_s, sent_s + self._delay_s + jitter_s)
        return self._last_s


@dataclass(eq=False)
class LinkedPeer:
    """One worker's link: its two buckets, and what has gone through.

    Args: link: None for a worker that is not shaped.
    """

    name: str
    link: Link | None
    sent_bytes: int = 0
    received_bytes: int = 0
    up: Bucket = field(init=False)
    down: Bucket = field(init=False)

    def __post_init__(self) -> None:
        self.up, self.down = Bucket(self.rate_bytes_s), Bucket(self.rate_bytes_s)

    @property
    def rate_bytes_s(self) -> float:
        """What the link carries."""
        return math.inf if self.link is None else self.link.rate_mbps * 1e6 / 8

    @property
    def delay_s(self) -> float:
        return 0.0 if self.link is None else self.link.delay_s


class ShapedPipe:
    """One direction of one connection, from `source` to `target`.

    It holds what is under way, bounded by what fits on such a link, so that a faster sender is
    held back.
    """

    def __init__(self, source: LinkedPeer, target: LinkedPeer, chance: random.Random) -> None:
        self._source, self._target = source, target
        delay_s, jitter_s = source.delay_s, source.link.jitter_s if source.link else 0.0
        self._line = DelayLine(delay_s, jitter_s, chance)
        rate = min(source.rate_bytes_s, target.rate_bytes_s)
        least, most = _CHUNK_BYTES
        self.chunk_bytes = round(min(most, max(least, rate * _CHUNK_S)))
        in_flight = rate * (delay_s + jitter_s) if delay_s else 0.0
        self._most_bytes = in_flight + 4 * self.chunk_bytes
        self._held_bytes = 0

    def enter(self, n_bytes: int, now_s: float) -> tuple[float, float]:
        """Books bytes that were read.

        Returns:
            (when more may be read as far as the rates go, when these are to be delivered).
        """
        ways = self._source.up.take(n_bytes, now_s), self._target.down.take(n_bytes, now_s)
        self._source.sent_bytes += n_bytes
        self._target.received_bytes += n_bytes
        passed_s = max(now_s, *ways)
        self._held_bytes += n_bytes
        return passed_s, self._line.due(passed_s)

    def leave(self, n_bytes: int) -> None:
        """Bytes were delivered."""
        self._held_bytes -= n_bytes

    @property
    def full(self) -> bool:
        """Whether nothing more may be read until some bytes were delivered."""
        return self._held_bytes >= self._most_bytes


def next_break_s(loss: float, chance: random.Random) -> float:
    """Seconds to a worker's next broken connection, `loss` a minute on average."""
    return chance.expovariate(loss / 60) if loss else math.inf
