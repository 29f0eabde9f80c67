"""How far in the schedule one inner step takes this peer (DyLU).

A peer at half the speed of the fastest makes half as many inner steps in a period, each of which
counts for two in the schedule; so rounds are due everywhere at about the same time.

Ref: arXiv:2401.09135: steps_w = floor(v_w / v_max * H).
"""

import math
import statistics
from collections import deque

_REMEMBERED_STEPS = 16
_FIRST_STEPS = 4  # slower than the rest: the machine warms up
_ALIKE = 0.9  # of the fastest peer's speed, and above, is as fast: speeds are measured with noise
_NEWS = 0.1  # a change of the own step time that others are told of


class Pace:
    """Args: inner_steps: H; unequal: whether peers may differ, else every step counts for one."""

    def __init__(self, inner_steps: int, *, unequal: bool) -> None:
        self._inner_steps, self._unequal = inner_steps, unequal
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._seen = 0
        self._fastest_s = self._told_s = self._rest = 0.0

    @property
    def step_s(self) -> float:
        """What others are told that an inner step takes here; 0 at first."""
        own_s = self._own_s
        if abs(own_s - self._told_s) > _NEWS * self._told_s:
            self._told_s = own_s
        return self._told_s

    @property
    def steps_per_period(self) -> int:
        """H of this peer."""
        own_s = self._own_s
        if not (self._unequal and own_s and self._fastest_s):
            return self._inner_steps
        speed = self._fastest_s / own_s
        return self._inner_steps if speed >= _ALIKE else max(1, int(speed * self._inner_steps))

    def stepped(self, seconds: float) -> None:
        """An inner step has taken so long."""
        self._seen += 1
        if self._seen > _FIRST_STEPS:
            self._seconds.append(seconds)

    def told(self, fastest_s: float) -> None:
        """The fastest peer's inner step takes so long."""
        self._fastest_s = fastest_s

    def stride(self) -> int:
        """Steps of the schedule that the next inner step counts for, at least 1."""
        ahead = self._inner_steps / self.steps_per_period + self._rest
        whole = math.floor(ahead + 1e-9)
        self._rest = max(0.0, ahead - whole)
        return whole

    @property
    def _own_s(self) -> float:
        return statistics.median(self._seconds) if self._seconds else 0.0
