"""Measures a peer's links and its stage: how, when, and what of it gossip carries.

Every change makes all peers plan their routes again. So figures are rounded to two digits, and a
profile is published again only when a figure has changed by a quarter, at most every 2 s.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import msgpack
import xxhash

from murmuration.protos.documents import PROFILE_BYTES, unpack_plain
from murmuration.worker.membership import Member
from murmuration.worker.pipeline.stage_call import call_bytes, serves

_FORGET = 0.2  # how much a new computing time counts against those before
_REMEMBERED = 20  # round trips, of which the shortest is the link's, and rates
_OLD_S = 900.0  # of both: links change, and an idle one is measured three times in this
_ENOUGH = 5  # rates of messages that had the uplink alone, to go by them only
_UPPER = 0.8  # of the rates seen, the one to go by: other messages share the link now and then
_CHANGE = 1.25
_PUBLISH_S = 2.0
_MOST_MEMORY = 1_000_000  # calls: more than an iteration has
_MOST_RATE = 1.25e9  # bytes/s: what arrives at once says nothing more
_LEAST, _MOST = 1e-9, 1e12  # of any figure: sums and ratios of such are finite; below, not known

PROBE_BYTES = 48 * 1024  # 0.08 s on a line of 5 Mbit/s
_GAP_S = 1.0  # between two probes
_MOST_PEERS = 32
# To all 32 every five minutes: 5 kB/s, under 1 % of 5 Mbit/s. Plans for links that change faster
# would be out of date when they are found.
_AGAIN_S = 300.0
_RETRY_S = 30.0  # after a failure; a peer that is gone is known to be so by then

_TIMES = ("forward_s", "backward_s", "loss_s")

_Kept = dict[str, deque[tuple[float, float]]]  # (when, what) by peer


@dataclass(frozen=True)
class Profile:
    """One peer's measurements as gossip carries them; what is not known is left out, or 0."""

    latency_s: Mapping[str, float] = field(default_factory=dict)  # one way, by peer
    rate_bytes_per_s: Mapping[str, float] = field(default_factory=dict)  # sent to each peer
    forward_s: float = 0.0  # of a microbatch here, as the next two
    backward_s: float = 0.0
    loss_s: float = 0.0
    activation_bytes: int = 0  # of a microbatch, encoded
    memory: int = 0  # calls that fit here at once
    gradient_norm: float = 0.0  # of the stage's last gradient

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @classmethod
    @lru_cache(maxsize=256)  # all profiles are read often, and few change
    def unpack(cls, raw: bytes) -> "Profile":
        """An empty one for what is none: a peer that measures nonsense harms its own routes."""
        try:
            plain = unpack_plain(raw, PROFILE_BYTES) if raw else {}
            return cls(
                latency_s=_numbers(plain.get("latency_s", {})),
                rate_bytes_per_s=_numbers(plain.get("rate_bytes_per_s", {})),
                activation_bytes=int(_number(plain.get("activation_bytes", 0))),
                memory=min(_MOST_MEMORY, int(_number(plain.get("memory", 0)))),
                **{name: _number(plain.get(name, 0.0)) for name in (*_TIMES, "gradient_norm")},
            )
        except (ValueError, TypeError, AttributeError, OverflowError):
            return cls()


@dataclass(eq=False)
class LinkSample:
    """A message on its way to another peer; `alone` while nothing else of this peer's is."""

    alone: bool


class StageMeasurements:
    """Collects what this peer measures; `limit_bytes` is what calls may hold. io thread only."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes, self._clock = limit_bytes, clock
        self._round_trips: _Kept = {}
        self._rates: _Kept = {}
        self._shared_rates: _Kept = {}
        self._under_way: list[LinkSample] = []
        self._starts: Mapping[str, int] = {}
        self._times: dict[str, float] = {}
        self.activation_bytes = 0  # of a microbatch, encoded; 0 while not known
        self.gradient_norm = 0.0  # published along with the rest, and no reason to publish
        self._published, self._published_s = Profile(), -math.inf
        self._same_until_s = -math.inf  # all was looked at, and the first is too old after that

    def round_trip(self, peer: str, seconds: float) -> None:
        self._remember(self._round_trips, peer, seconds)

    @contextmanager
    def sending(self) -> Iterator[LinkSample]:
        """Around what is sent, until the other side has said that it is there."""
        sample = LinkSample(alone=not self._under_way)
        for other in self._under_way:
            other.alone = False
        self._under_way.append(sample)
        try:
            yield sample
        finally:
            self._under_way.remove(sample)

    def sent(self, peer: str, size: int, seconds: float, *, alone: bool = True) -> None:
        """This many bytes went to the peer, and it has said so; `seconds` has both ways in it, so
        nothing is learned before the first round trip. A rate that was not `alone` on this peer's
        uplink counts only while there is no better one: plans send one after another."""
        if peer in self._round_trips:
            trip_s = min(_values(self._round_trips[peer]))
            rate = min(_MOST_RATE, size / max(seconds - trip_s, 1e-9))
            self._remember(self._rates if alone else self._shared_rates, peer, rate)

    def measured_at(self, peer: str) -> float | None:
        """When something was last sent there whose rate is known."""
        kept = [rates[peer] for rates in (self._rates, self._shared_rates) if peer in rates]
        return max((values[-1][0] for values in kept), default=None)

    def on_view(self, starts: Mapping[str, int]) -> None:
        """Forgets peers that are gone or have started again. Args: starts: of those that live."""
        if starts == self._starts:
            return
        for peer in [peer for peer, start in self._starts.items() if starts.get(peer) != start]:
            for kept in (self._round_trips, self._rates, self._shared_rates):
                kept.pop(peer, None)
        self._starts, self._same_until_s = starts, -math.inf

    def computed(self, what: str, seconds: float) -> None:
        """`what`: forward_s, backward_s or loss_s."""
        before = self._times.get(what, seconds)
        self._times[what] = before + _FORGET * (seconds - before)
        self._same_until_s = -math.inf

    def poll(self, now_s: float) -> Profile | None:
        """The profile to publish now, if it differs enough from the last."""
        measured_s = self._clock()
        if now_s < self._published_s + _PUBLISH_S or measured_s <= self._same_until_s:
            return None
        since_s, self._same_until_s = measured_s - _OLD_S, math.inf
        for kept in (self._round_trips, self._rates, self._shared_rates):
            for peer, values in list(kept.items()):
                while values and values[0][0] < since_s:
                    values.popleft()
                if values:
                    self._same_until_s = min(self._same_until_s, values[0][0] + _OLD_S)
                else:
                    del kept[peer]
        size = self.activation_bytes
        now = Profile(
            latency_s={p: _rounded(min(_values(s)) / 2) for p, s in self._round_trips.items()},
            rate_bytes_per_s={p: self._rate_to(p) for p in {*self._rates, *self._shared_rates}},
            **{what: _rounded(seconds) for what, seconds in self._times.items()},
            activation_bytes=size,
            memory=max(1, self._limit_bytes // call_bytes(size)) if size else 0,
            gradient_norm=_rounded(self.gradient_norm),
        )
        before, there = self._published, self._starts.keys()
        forgotten = there & before.latency_s.keys() - now.latency_s.keys()
        forgotten |= there & before.rate_bytes_per_s.keys() - now.rate_bytes_per_s.keys()
        if not (forgotten or _differs(before, now)):
            return None
        self._published, self._published_s = now, now_s
        return now

    def _rate_to(self, peer: str) -> float:
        alone, shared = (_values(kept.get(peer, ())) for kept in (self._rates, self._shared_rates))
        rates = sorted(alone if len(alone) >= _ENOUGH else [*alone, *shared])
        return _rounded(rates[round(_UPPER * (len(rates) - 1))])

    def _remember(self, kept: _Kept, peer: str, value: float) -> None:
        kept.setdefault(peer, deque(maxlen=_REMEMBERED)).append((self._clock(), value))
        self._same_until_s = -math.inf


class LinkProber:
    """Which link to measure next; sans-I/O. Times are monotonic seconds. Each link is probed soon
    after its peer is there, and again when it has been idle (`measured_at`), at most one a second.
    In a large swarm a hash chooses 32 peers to measure, so that each answers about as many."""

    def __init__(self, me: str, measured_at: Callable[[str], float | None]) -> None:
        self._me, self._measured_at = me, measured_at
        self._failed: dict[str, float] = {}
        self._busy, self._next_s = False, -math.inf

    def next(self, members: Sequence[Member], now: float) -> Member | None:
        """The peer to measure now; `ended` is to follow."""
        if self._busy or now < self._next_s:
            return None
        self._next_s = now + _GAP_S
        able = [member for member in members if serves(member)]
        others = [member for member in able if member.peer != self._me]
        if len(others) == len(able):
            return None  # this peer does not serve yet
        self._failed = {c.peer: self._failed[c.peer] for c in others if c.peer in self._failed}
        ranked = sorted(
            others, key=lambda m: xxhash.xxh3_64_intdigest(f"{self._me}/{m.peer}".encode())
        )
        due = min(ranked[:_MOST_PEERS], key=self._due_s, default=None)
        if due is None or self._due_s(due) > now:
            return None
        self._busy = True
        return due

    def ended(self, peer: str, answered: bool, now: float) -> None:
        self._busy, self._next_s = False, now + _GAP_S
        if answered:
            self._failed.pop(peer, None)
        else:
            self._failed[peer] = now

    def _due_s(self, member: Member) -> float:
        measured_s = self._measured_at(member.peer)
        again_s = -math.inf if measured_s is None else measured_s + _AGAIN_S
        return max(again_s, self._failed.get(member.peer, -math.inf) + _RETRY_S)


def _differs(before: Profile, now: Profile) -> bool:
    pairs = [
        *((before.latency_s.get(p, 0.0), s) for p, s in now.latency_s.items() if s > 1e-3),
        *((before.rate_bytes_per_s.get(p, 0.0), r) for p, r in now.rate_bytes_per_s.items()),
        *((getattr(before, n), getattr(now, n)) for n in _TIMES),
        (before.activation_bytes, now.activation_bytes),
        (before.memory, now.memory),
    ]
    return any(max(a, b) > _CHANGE * min(a, b) for a, b in pairs if max(a, b) > 0)


def _values(kept: Iterable[tuple[float, float]]) -> list[float]:
    return [value for _, value in kept]


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _numbers(plain: object) -> dict[str, float]:
    if not isinstance(plain, dict):
        raise TypeError("not numbers by name")
    return {str(name): _number(value) for name, value in plain.items()}


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no measurement")
    return float(min(value, _MOST)) if value >= _LEAST else 0.0
