"""Peers that live, say that they train, and have let a round wait for nothing."""

from dataclasses import dataclass

from murmuration.worker.membership.member import MAX_UNREACHABLE

_MARKED_S = 60.0  # doubles each time
_MOST_DOUBLINGS = 3
_FORGIVEN_S = 600.0  # after a mark has ended, the next one is a first one


@dataclass
class _Mark:
    """Args: until: when rounds may wait for the peer again, in s."""

    until: float
    times: int
    stands: bool = True


class IdlePeers:
    """Whom this peer has waited for in vain, not long ago."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}

    def waited_for(self, peer: str, now: float) -> None:
        """A round has waited for the peer's part, which never came: for a while none waits for it.

        To begin again, in another epoch too, ends it no sooner: else a peer could make every round
        wait."""
        mark = self._marks.get(peer)
        if mark is None or not mark.stands:
            times = 0 if mark is None else mark.times
            stays_s = _MARKED_S * 2 ** min(times, _MOST_DOUBLINGS)
            self._marks[peer] = _Mark(now + stays_s, times + 1)

    def tick(self, now: float) -> None:
        """Ends marks at monotonic time `now` (s)."""
        for peer, mark in [*self._marks.items()]:
            mark.stands = now < mark.until
            if now > mark.until + _FORGIVEN_S:
                del self._marks[peer]

    @property
    def peers(self) -> tuple[str, ...]:
        """Sorted; as many as a member may name."""
        return tuple(sorted(p for p, mark in self._marks.items() if mark.stands))[:MAX_UNREACHABLE]
