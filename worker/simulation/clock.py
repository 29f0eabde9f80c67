"""Virtual time: what is to be done, in one heap."""

import heapq
from collections.abc import Callable

Act = Callable[[], None]


class Clock:
    """Runs acts in the order of their times; of those at one time the first that was asked for.

    Attributes: settle: is done after each act, before time goes on.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Act]] = []
        self._asked = 0
        self.settle: Act = lambda: None

    def after(self, delay_s: float, act: Act) -> None:
        """Does `act` this many seconds from now."""
        self.at(self.now + delay_s, act)

    def at(self, time_s: float, act: Act) -> None:
        """Does `act` at that time, which is not past."""
        self._asked += 1
        heapq.heappush(self._heap, (time_s, self._asked, act))

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Goes on until that holds, nothing is left to do, or the time is over."""
        self.settle()
        while self._heap and not until():
            if self._heap[0][0] > limit_s:
                return
            self.now, _, act = heapq.heappop(self._heap)
            self.events += 1
            act()
            self.settle()
