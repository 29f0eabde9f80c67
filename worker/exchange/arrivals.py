"""How fast the payloads of rounds come in from each peer, as their receiver sees it.

A sender cannot tell: what the network has taken may lie in a buffer. Where several payloads of one
peer come at a time, their seconds count once.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _FromPeer:
    """Args: under_way: payloads that are coming; at_s: up to when their time is counted."""

    under_way: int = 0
    at_s: float = 0.0
    payload_bytes: int = 0
    seconds: float = 0.0


class Arrivals:
    """Of one peer, from all others. io thread only.

    Args: clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._from: dict[str, _FromPeer] = {}

    def payload(self) -> "Arrival":
        """One that is to come; use it as a context manager, so that it ends."""
        return Arrival(self)

    def taken(self) -> dict[str, tuple[int, float]]:
        """(bytes, seconds) by sender, since this was last asked; of what has come only."""
        found = {
            peer: (each.payload_bytes, each.seconds)
            for peer, each in self._from.items()
            if each.payload_bytes
        }
        self._from = {peer: each for peer, each in self._from.items() if each.under_way}
        for each in self._from.values():
            each.payload_bytes, each.seconds = 0, 0.0
        return found

    def begun(self, peer: str) -> None:
        """A payload was announced: its sender gives it now."""
        each = self._from.setdefault(peer, _FromPeer())
        if not each.under_way:
            each.at_s = self._clock()
        each.under_way += 1

    def came(self, peer: str, payload_bytes: int) -> None:
        """A frame of one that has begun."""
        if (each := self._from.get(peer)) is not None:
            now = self._clock()
            each.payload_bytes += payload_bytes
            each.seconds += now - each.at_s
            each.at_s = now

    def ended(self, peer: str) -> None:
        """One that had begun is here, or is given up."""
        if (each := self._from.get(peer)) is not None:
            each.under_way -= 1


class Arrival:
    """One payload on its way. io thread only."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals, self._peer = arrivals, ""

    def begins(self, peer: str) -> None:
        """Its sender gives it from now on."""
        if not self._peer:
            self._peer = peer
            self._arrivals.begun(peer)

    def came(self, payload_bytes: int) -> None:
        """A frame is here; it counts once the payload has begun."""
        if self._peer:
            self._arrivals.came(self._peer, payload_bytes)

    def ends(self) -> None:
        """All of it is here, or nothing more comes."""
        if self._peer:
            self._arrivals.ended(self._peer)
            self._peer = ""

    def __enter__(self) -> "Arrival":
        return self

    def __exit__(self, *_: object) -> None:
        self.ends()
