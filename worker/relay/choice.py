"""Chooses through which peers this one is reached, where nobody can dial it: rules without I/O.

Two relays are kept. The peer that was called first is asked first, then those that answer soonest.
One that is lost is replaced at once, and asked again after a pause that doubles. Each is tried now
and then, by a call to this peer itself: one that leads nowhere several times is replaced too.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

KEPT = 2  # relays at a time
RETRY_S, MOST_RETRY_S = 1.0, 60.0  # the pause before a peer is asked again that has failed
TRY_S = 15.0  # between two tries of a relay
_MOST_FAILED_TRIES = 3  # in a row, then it is replaced
_LONG_PAUSE = 10  # failures: after as many the pause is the longest


class _State(Enum):
    IDLE = auto()
    ASKED = auto()
    HELD = auto()


@dataclass
class _Known:
    address: str
    peer: str = ""
    rtt_s: float = math.inf
    state: _State = _State.IDLE
    failures: int = 0
    failed_tries: int = 0  # in a row, of one that is held
    retry_at: float = field(default=-math.inf)


class RelayChoice:
    """The relays of one peer. Times are monotonic seconds. Args: reserve: begins to ask the peer at
    an address to be a relay; then `reserved` or `lost`; release: a relay is needed no more; check:
    begins to call this peer itself through a relay, over a new connection; then `tried`;
    advertise: others are to reach this peer through these, the first before the second."""

    def __init__(
        self,
        reserve: Callable[[str], None],
        release: Callable[[str], None],
        check: Callable[[str], None],
        advertise: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._reserve, self._release = reserve, release
        self._check, self._tell_others = check, advertise
        self._known: dict[str, _Known] = {}
        self._try_at = math.inf
        self._advertised: tuple[str, ...] = ()
        self.wanted = False

    @property
    def relays(self) -> tuple[str, ...]:
        """Names of the relays there are, in the order in which others try them."""
        held = [self._known[a] for a in self._advertised if a in self._known]
        return tuple(known.peer for known in held if known.state is _State.HELD)

    def want(self, address: str) -> None:
        """Nobody reaches this peer: it wants relays from now on, and first the one at `address`."""
        self.wanted = True
        known = self._known.setdefault(address, _Known(address))
        if known.state is _State.IDLE:
            self._ask([known])

    def seen(
        self, there: Mapping[str, tuple[str, float | None]], gone: Collection[str], now: float
    ) -> None:
        """Members as they are now. Args: there: by address, the name of each that can be dialled,
        and the seconds that a small call takes, if known; gone: addresses of those that ended."""
        for address, known in list(self._known.items()):
            if known.state is _State.IDLE and address not in there:
                del self._known[address]
        for address, (peer, rtt_s) in there.items():
            known = self._known.setdefault(address, _Known(address))
            known.peer, known.rtt_s = peer, math.inf if rtt_s is None else rtt_s
        for each in self._in(_State.HELD):
            if each.address in gone:
                self._replaced(each.address, now)

    def is_of_another(self, address: str, asked: str, peer: str) -> bool:
        """Tells whether the peer that was asked at `asked` has no right to this name and address.
        It would take over the place of the relay, or of the candidate, that these are of."""
        was, known = self._known.get(asked), self._known.get(address)
        if was is not None and was.peer not in ("", peer):
            return True
        if known is None or known is was:
            return False
        return known.state is not _State.IDLE or known.peer not in ("", peer)

    def reserved(self, asked: str, peer: str, address: str, now: float) -> None:
        """The peer that was asked at `asked` is a relay now, which is advertised at `address`."""
        was = self._known.pop(asked, None)
        known = self._known.setdefault(address, was or _Known(address))
        known.address, known.peer = address, peer
        known.state, known.failures, known.failed_tries = _State.HELD, 0, 0
        self._try_at = min(self._try_at, now + TRY_S)
        needless = self._in(_State.HELD)[KEPT:]
        for worst in needless:
            worst.state = _State.IDLE
        self._advertise()
        for worst in needless:
            self._release(worst.address)

    def lost(self, address: str, now: float) -> None:
        known = self._known.get(address)
        if known is None or known.state is _State.IDLE:
            return
        known.retry_at = now + min(MOST_RETRY_S, RETRY_S * 2 ** min(known.failures, _LONG_PAUSE))
        known.failures, known.state = known.failures + 1, _State.IDLE
        self._advertise()
        self._replace(now)

    def tried(self, address: str, now: float, *, leads_here: bool) -> None:
        """Notes whether the relay at this address has led a call to this peer itself."""
        known = self._known.get(address)
        if known is None or known.state is not _State.HELD:
            return
        known.failed_tries = 0 if leads_here else known.failed_tries + 1
        others = [each for each in self._in(_State.HELD, _State.IDLE) if each is not known]
        if known.failed_tries >= _MOST_FAILED_TRIES and others:
            known.failures = _LONG_PAUSE
            self._replaced(address, now)

    def tick(self, now: float) -> None:
        if not self.wanted:
            return
        self._replace(now)
        if now >= self._try_at:
            self._try_at = now + TRY_S
            for known in self._in(_State.HELD):
                self._check(known.address)

    def _replaced(self, address: str, now: float) -> None:
        self._release(address)
        self.lost(address, now)

    def _in(self, *states: _State) -> list[_Known]:
        return sorted(
            (known for known in self._known.values() if known.state in states),
            key=lambda known: (known.rtt_s, known.address),
        )

    def _ask(self, relays: Sequence[_Known]) -> None:
        for known in relays:
            known.state = _State.ASKED
            self._reserve(known.address)

    def _replace(self, now: float) -> None:
        missing = KEPT - len(self._in(_State.HELD, _State.ASKED))
        ready = [known for known in self._in(_State.IDLE) if known.retry_at <= now]
        self._ask(ready[: max(0, missing)])

    def _advertise(self) -> None:
        """Their order alone is no news: others would dial anew."""
        now = tuple(known.address for known in self._in(_State.HELD))
        if now and set(now) != set(self._advertised):
            self._advertised = now
            self._tell_others(now)
