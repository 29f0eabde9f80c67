"""Ctrl-C and its kin, remembered instead of obeyed on the spot."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_PRESS_S = 0.3  # `timeout` and some shells send one Ctrl-C twice


class Interrupts:
    """While entered, signals that ask this process to end are only counted. Main thread only."""

    def __init__(self) -> None:
        self._pressed: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}

    @property
    def first(self) -> int | None:
        """The first signal; None before there is one."""
        return self._pressed[0][0] if self._pressed else None

    @property
    def insistent(self) -> bool:
        """Whether another one has come since."""
        return bool(self._pressed) and (self._pressed[-1][1] - self._pressed[0][1] > _SAME_PRESS_S)

    def __enter__(self) -> "Interrupts":
        self._before = {number: signal.signal(number, self._press) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # After one, this process is about to end: another must not spoil its exit code.
            signal.signal(number, signal.SIG_IGN if self._pressed else handler)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._pressed = [*self._pressed[:1], (number, time.monotonic())]
