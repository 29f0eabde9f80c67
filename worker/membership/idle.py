"""Peers that live, say that they train, and have let rounds wait for them again and again."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from murmuration.worker.membership.member import MAX_UNREACHABLE

_MARKED_S = 60.0  # doubles each time
_MOST_DOUBLINGS = 3
_FORGIVEN_S = 600.0  # after a mark has ended, the next one is a first one
_REMEMBERED = 8  # rounds of a fragment
_STRIKES = 3


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
        self._late: dict[int, deque[Counter[str]]] = {}

    def round_ended(self, fragment: int, late: Sequence[str], now: float) -> None:
        """A round of a fragment is over.

        Args: late: the peers that it has waited for in vain, once for each part of theirs.
        """
        recent = self._late.setdefault(fragment, deque(maxlen=_REMEMBERED))
        recent.append(Counter(late))
        for peer in set(late):
            # One that has been marked not long ago is waited for once more.
            if peer in self._marks or sum(each[peer] for each in recent) >= _STRIKES:
                self.waited_for(peer, now)

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
