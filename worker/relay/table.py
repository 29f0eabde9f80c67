"""What a relay carries, and for whom: places, limits, counts. Without I/O; time is given.

A relay dials nobody. It joins two streams that two peers of the run have opened to it, and only
where one of them has reserved a place before.
"""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

_UNKNOWN_S = 10.0  # that a peer may have a place before it is a member: it joins through it
_UNACCEPTED, _UNACCEPTED_EACH = 16, 4  # dials to one peer that it has not accepted yet, by one
_ACTIVE_S = 1.0  # that a peer has its share of the rate after it has sent something
_BURST_S = 0.25  # of the rate: what goes at once after a pause


class NoRelay(Exception):
    """This peer does not relay that. The message says why, and goes to the caller."""


@dataclass(frozen=True, kw_only=True)
class RelayLimits:
    """Args:
    rate_mbps: that all tunnels together may carry, each direction counted; those that send at
        a time have equal shares of it, however many tunnels they have. 0: it is no relay.
    places: peers that it relays for at once.
    """

    rate_mbps: float = 100.0
    places: int = 32


@dataclass
class _Dial:
    by: str
    to: str
    accepted: bool = False


class RelayTable:
    """One peer's, as a relay.

    Attributes:
        carried_bytes: for each peer that has had a place.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self._limits = limits
        self._places: dict[str, float] = {}  # since when
        self._dials: dict[int, _Dial] = {}
        self._last = 0
        self._free_at: dict[str, float] = {}  # by peer: when its share is free again
        self.carried_bytes: Counter[str] = Counter()

    @property
    def tunnels(self) -> int:
        """That are open."""
        return sum(dial.accepted for dial in self._dials.values())

    def document(self) -> dict[str, object]:
        """For the status: plain values."""
        return {
            "for": list(self._places),
            "tunnels": self.tunnels,
            "relayed_bytes": dict(self.carried_bytes),
        }

    def reserve(self, peer: str, now: float, *, relayed: bool) -> None:
        """Gives a place, or keeps it. Args: relayed: whether this peer is itself reached through a
        relay. Raises NoRelay."""
        if not self._limits.rate_mbps:
            raise NoRelay("it relays for nobody (--relay-mbps 0)")
        if relayed:
            raise NoRelay("it is itself reached through a relay")
        if peer not in self._places and len(self._places) >= self._limits.places:
            raise NoRelay(f"it relays for {self._limits.places} peers already")
        self._places[peer] = now

    def release(self, peer: str) -> None:
        self._places.pop(peer, None)

    def dial(self, by: str, to: str, *, known: bool) -> int:
        """The number of a dial that `to` is to accept. Args: known: whether the caller is one of
        the run. Raises NoRelay."""
        if not known:
            raise NoRelay("it relays between members only")
        if to not in self._places:
            raise NoRelay("that peer is not reached through it")
        waiting = [each for each in self._dials.values() if each.to == to and not each.accepted]
        if (
            len(waiting) >= _UNACCEPTED
            or sum(each.by == by for each in waiting) >= _UNACCEPTED_EACH
        ):
            raise NoRelay(f"{len(waiting)} dials wait for that peer")
        self._last += 1
        self._dials[self._last] = _Dial(by, to)
        return self._last

    def accept(self, number: int, by: str) -> None:
        """Raises NoRelay: nobody dials the peer by that number."""
        dial = self._dials.get(number)
        if dial is None or dial.to != by or dial.accepted:
            raise NoRelay("nobody dials it by that number")
        dial.accepted = True

    def end(self, number: int) -> None:
        """A dial has failed, or its tunnel has ended."""
        self._dials.pop(number, None)

    def carry(self, number: int, sender: str, size_bytes: int, now: float) -> float:
        """Counts bytes of a tunnel; how many seconds they wait for their sender's share."""
        self.carried_bytes[self._dials[number].to] += size_bytes
        self._free_at = {
            peer: at for peer, at in self._free_at.items() if peer == sender or at > now - _ACTIVE_S
        }
        free_at = max(self._free_at.get(sender, 0.0), now - _BURST_S)
        others = len(self._free_at.keys() - {sender})
        free_at += 8e-6 * size_bytes * (1 + others) / self._limits.rate_mbps
        self._free_at[sender] = free_at
        return max(0.0, free_at - now)

    def strangers(self, now: float, members: Container[str]) -> list[str]:
        """Peers that have a place, are no live members, and have had the time to become some."""
        return [
            peer
            for peer, since in self._places.items()
            if peer not in members and now - since > _UNKNOWN_S
        ]
