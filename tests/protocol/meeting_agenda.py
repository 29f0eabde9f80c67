"""What is still to happen in a schedule of rounds in small groups, on one heap."""

import heapq
from collections.abc import Callable
from itertools import count

from tests.protocol.meeting_parts import SimPeer


class Agenda:
    """Acts in the order of their time, and of two at the same time the one put down first.

    `now` is the time of the act under way (s).
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def next(self) -> Callable[[], None]:
        """The act whose time has come."""
        self.now, _, act = heapq.heappop(self._heap)
        return act

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), act))

    def after(self, delay_s: float, peer: SimPeer, act: Callable[[], None]) -> None:
        """Something that the peer does; a frozen one does it later, a dead one never."""
        self.at(self.now + delay_s, lambda: self._do(peer, act))

    def _do(self, peer: SimPeer, act: Callable[[], None]) -> None:
        if peer.frozen:
            peer.piled_up.append(act)
        elif not peer.dead:
            act()
