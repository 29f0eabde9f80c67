"""What a peer has measured of its links and its stage, as it travels in its card.

Figures are rounded to two digits, and told anew only when one has changed by a quarter, and not
every moment: each change makes all peers plan their routes again.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import msgpack

_FORGET = 0.2  # how much a new computing time counts against those before
_REMEMBERED = 20  # round trips, of which the shortest is the link's, and rates
_OLD_S = 900.0  # of both: links change, and an idle one is measured three times in this
_ENOUGH = 5  # rates of messages that had the uplink alone, to go by them only
_UPPER = 0.8  # of the rates seen, the one to go by: other messages share the link now and then
_CHANGE = 1.25
_NEWS_S = 2.0
_MOST_MEMORY = 1_000_000  # visits: more than an iteration has
_MOST_RATE = 1.25e9  # bytes/s: what arrives at once says nothing more

_Kept = dict[str, deque[tuple[float, float]]]  # (when, what) by peer


@dataclass(frozen=True)
class Profile:
    """One peer's measurements; what is not known is left out, or 0.

    Attributes:
        latency_s: one way, by peer.
        rate_bytes_per_s: of what is sent to each peer.
        forward_s, backward_s, loss_s: of a visit here.
        visit_bytes: of the activations of a microbatch, encoded.
        memory: how many visits fit here at once.
        gradient_norm: of the stage's last gradient.
    """

    latency_s: Mapping[str, float] = field(default_factory=dict)
    rate_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    forward_s: float = 0.0
    backward_s: float = 0.0
    loss_s: float = 0.0
    visit_bytes: int = 0
    memory: int = 0
    gradient_norm: float = 0.0

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @property
    def visits_per_s(self) -> float:
        """What the peer could do on its stage; 0 where it has not measured that."""
        if not (self.forward_s and self.backward_s):
            return 0.0
        return 1 / (self.forward_s + self.backward_s + self.loss_s)

    @classmethod
    @lru_cache(maxsize=256)  # all cards are read again and again, and few have changed
    def unpack(cls, raw: bytes) -> "Profile":
        """An empty one for what is none: a peer that measures nonsense harms its own routes."""
        try:
            plain = msgpack.unpackb(raw) if raw else {}
            return cls(
                latency_s=_numbers(plain.get("latency_s", {})),
                rate_bytes_per_s=_numbers(plain.get("rate_bytes_per_s", {})),
                forward_s=_number(plain.get("forward_s", 0.0)),
                backward_s=_number(plain.get("backward_s", 0.0)),
                loss_s=_number(plain.get("loss_s", 0.0)),
                visit_bytes=int(_number(plain.get("visit_bytes", 0))),
                memory=min(_MOST_MEMORY, int(_number(plain.get("memory", 0)))),
                gradient_norm=_number(plain.get("gradient_norm", 0.0)),
            )
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
            return cls()


def visit_held(activation_bytes: int) -> int:
    """What a visit holds here: its input, its output, and the gradient that comes back."""
    return 3 * activation_bytes


@dataclass(eq=False)
class Transfer:
    """A message on its way to another peer; `alone` while nothing else of this peer's is."""

    alone: bool


class Measuring:
    """Collects this peer's measurements. io thread only.

    Args:
        limit_bytes: what visits may hold here.
        clock: monotonic seconds.
    """

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes, self._clock = limit_bytes, clock
        self._round_trips: _Kept = {}
        self._rates: _Kept = {}
        self._shared_rates: _Kept = {}
        self._under_way: list[Transfer] = []
        self._epochs: Mapping[str, int] = {}
        self._times: dict[str, float] = {}
        self._visit_bytes = 0
        self.gradient_norm = 0.0  # told along with the rest, and no news by itself
        self._told, self._told_at = Profile(), -math.inf

    def round_trip(self, peer: str, seconds: float) -> None:
        """A small call and its answer."""
        self._remember(self._round_trips, peer, seconds)

    @contextmanager
    def transfer(self) -> Iterator[Transfer]:
        """Around what is sent, until the other side has said that it is there."""
        transfer = Transfer(alone=not self._under_way)
        for other in self._under_way:
            other.alone = False
        self._under_way.append(transfer)
        try:
            yield transfer
        finally:
            self._under_way.remove(transfer)

    def sent(self, peer: str, size: int, seconds: float, *, alone: bool = True) -> None:
        """So many bytes went to the peer, and it has said so; `seconds` has both ways in it.

        Nothing is learned of a rate before there is a round trip to take off.

        Args:
            alone: whether they had this peer's uplink to themselves. Schedules let the messages of
                a peer leave one after another: by the rate of one that shared it with others they
                would count the others twice. So such a rate counts only while there is no better.
        """
        if peer in self._round_trips:
            trip_s = min(_values(self._round_trips[peer]))
            rate = min(_MOST_RATE, size / max(seconds - trip_s, 1e-9))
            self._remember(self._rates if alone else self._shared_rates, peer, rate)

    def measured_at(self, peer: str) -> float | None:
        """When something was last sent there whose rate is known."""
        kept = [rates[peer] for rates in (self._rates, self._shared_rates) if peer in rates]
        return max((values[-1][0] for values in kept), default=None)

    def present(self, epochs: Mapping[str, int]) -> None:
        """Forgets who is gone or has started again, maybe elsewhere. Args: epochs: by peer."""
        for peer in [peer for peer, epoch in self._epochs.items() if epochs.get(peer) != epoch]:
            for kept in (self._round_trips, self._rates, self._shared_rates):
                kept.pop(peer, None)
        self._epochs = epochs

    def computed(self, what: str, seconds: float) -> None:
        """`what`: forward_s, backward_s or loss_s."""
        self._times[what] = _blend(self._times.get(what), seconds)

    def visit_bytes(self, size: int) -> None:
        """A visit's activations take so many bytes, encoded."""
        self._visit_bytes = size

    @property
    def _memory(self) -> int:
        """How many visits fit here; 0 while none has shown its size."""
        if not self._visit_bytes:
            return 0
        return max(1, self._limit_bytes // visit_held(self._visit_bytes))

    def news(self, now_s: float) -> Profile | None:
        """What is to be told, if it differs enough from what was."""
        if now_s < self._told_at + _NEWS_S:
            return None
        for kept in (self._round_trips, self._rates, self._shared_rates):
            self._forget(kept)
        now = Profile(
            latency_s={
                peer: _rounded(min(_values(trips)) / 2) for peer, trips in self._round_trips.items()
            },
            rate_bytes_per_s={
                peer: _rounded(_upper(self._rates_to(peer)))
                for peer in self._rates.keys() | self._shared_rates.keys()
            },
            **{what: _rounded(seconds) for what, seconds in self._times.items()},
            visit_bytes=self._visit_bytes,
            memory=self._memory,
            gradient_norm=_rounded(self.gradient_norm),
        )
        if not (self._has_forgotten(now) or _differs(self._told, now)):
            return None
        self._told, self._told_at = now, now_s
        return now

    def _rates_to(self, peer: str) -> list[float]:
        """Those to go by (bytes/s)."""
        alone, shared = (_values(kept.get(peer, ())) for kept in (self._rates, self._shared_rates))
        return alone if len(alone) >= _ENOUGH else [*alone, *shared]

    def _remember(self, kept: _Kept, peer: str, value: float) -> None:
        kept.setdefault(peer, deque(maxlen=_REMEMBERED)).append((self._clock(), value))

    def _has_forgotten(self, now: Profile) -> bool:
        """Whether a link was told of that is not known any more, to a peer that is there."""
        links = (
            (self._told.latency_s, now.latency_s),
            (self._told.rate_bytes_per_s, now.rate_bytes_per_s),
        )
        return any(before.keys() & self._epochs.keys() - after.keys() for before, after in links)

    def _forget(self, kept: _Kept) -> None:
        """What is old, and the peers of whom nothing is left."""
        since_s = self._clock() - _OLD_S
        for peer, values in list(kept.items()):
            while values and values[0][0] < since_s:
                values.popleft()
            if not values:
                del kept[peer]


def _differs(told: Profile, now: Profile) -> bool:
    pairs = [
        *((told.latency_s.get(p, 0.0), s) for p, s in now.latency_s.items() if s > 1e-3),
        *((told.rate_bytes_per_s.get(p, 0.0), r) for p, r in now.rate_bytes_per_s.items()),
        *((getattr(told, n), getattr(now, n)) for n in ("forward_s", "backward_s", "loss_s")),
        (told.visit_bytes, now.visit_bytes),
        (told.memory, now.memory),
    ]
    return any(max(a, b) > _CHANGE * min(a, b) for a, b in pairs if max(a, b) > 0)


def _values(kept: Iterable[tuple[float, float]]) -> list[float]:
    return [value for _, value in kept]


def _upper(values: Sequence[float]) -> float:
    return sorted(values)[round(_UPPER * (len(values) - 1))]


def _blend(before: float | None, now: float) -> float:
    return now if before is None else before + _FORGET * (now - before)


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _numbers(plain: object) -> dict[str, float]:
    if not isinstance(plain, dict):
        raise TypeError("not numbers by name")
    return {str(name): _number(value) for name, value in plain.items()}


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no measurement")
    return float(value)
