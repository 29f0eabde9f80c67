"""The product's simulated swarm with more kinds of faults than `murmur simulate` has."""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from murmuration.worker.membership import Health
from murmuration.worker.simulation.network import Network, SimulatedStream
from murmuration.worker.simulation.scenario import STALL_S, Crash, Freeze, Partition
from murmuration.worker.simulation.simulated_swarm import Belief, Beliefs, SimulatedSwarm

_FIRST_MESSAGES = 10  # of both ends together, at which a brittle stream breaks


@dataclass(frozen=True)
class Late:
    """The inner steps that the peer takes at that time take longer."""

    peer: int
    at_s: float
    by_s: float


@dataclass(frozen=True)
class Cut:
    """The link between two peers carries nothing; the ends of a stream find out after `found_s`."""

    one: int
    other: int
    from_s: float
    to_s: float
    found_s: float = STALL_S


@dataclass(frozen=True)
class BreakStreams:
    """All streams of the peer that are open at that time break."""

    peer: int
    at_s: float


@dataclass(frozen=True)
class BrittleStreams:
    """A share of the streams that are opened meanwhile break at one of their first messages."""

    share: float
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Delay:
    """Every message between two peers takes longer."""

    one: int
    other: int
    from_s: float
    to_s: float
    by_s: float


@dataclass(frozen=True)
class Doubt:
    """One peer's membership wrongly says of another that it is suspect or dead."""

    observer: int
    peer: int
    from_s: float
    to_s: float
    health: Health = Health.SUSPECT


Fault = Crash | Freeze | Partition | Late | Cut | BreakStreams | BrittleStreams | Delay | Doubt


class BrittleStream(SimulatedStream):
    __slots__ = ("breaks_after",)

    def send(self, *given, **named) -> None:
        if not self.ended:
            self.breaks_after = getattr(self, "breaks_after", math.inf) - 1
            if self.breaks_after < 0:
                self._network.stall(self, 0.0)
                return
        super().send(*given, **named)


class FaultyNetwork(Network):
    _stream_type = BrittleStream

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self._cut: Counter[frozenset[int]] = Counter()
        self._found_s: dict[frozenset[int], float] = {}
        self._slow_s: dict[frozenset[int], float] = {}
        self.brittle = 0.0

    def delay_s(self, one: int, other: int) -> float:
        more_s = self._slow_s.get(frozenset((one, other)), 0.0) if self._slow_s else 0.0
        return more_s + super().delay_s(one, other)

    def connected(self, one: int, other: int) -> bool:
        return not self._cut[frozenset((one, other))] and super().connected(one, other)

    def stall(self, stream: SimulatedStream, found_s: float | None = None) -> None:
        link = frozenset((stream.caller, stream.callee))
        known_s = self._found_s.get(link, STALL_S) if self._cut[link] else STALL_S
        super().stall(stream, known_s if found_s is None else found_s)

    def open(self, caller: int, callee: int) -> SimulatedStream:
        stream = super().open(caller, callee)
        if self.brittle and self._rng.random() < self.brittle:
            stream.breaks_after = self._rng.randrange(_FIRST_MESSAGES)
        return stream

    def cut(self, one: int, other: int, found_s: float) -> None:
        """The link between the two carries nothing until it is mended as often as it was cut."""
        self._cut[frozenset((one, other))] += 1
        self._found_s[frozenset((one, other))] = found_s
        for stream in list(self._streams.values()):
            if {one, other} == {stream.caller, stream.callee}:
                self.stall(stream, found_s)

    def mend(self, one: int, other: int) -> None:
        self._cut[frozenset((one, other))] -= 1

    def slow_down(self, one: int, other: int, by_s: float) -> None:
        self._slow_s[frozenset((one, other))] = by_s

    def break_all(self, peer: int) -> None:
        for stream in list(self._streams.values()):
            if peer in (stream.caller, stream.callee):
                self.break_off(stream)


class FaultyBeliefs(Beliefs):
    def __init__(self, *given) -> None:
        super().__init__(*given)
        self._cut: set[tuple[int, int]] = set()
        self._doubts: dict[int, dict[int, Health]] = {}

    def cut(self, one: int, other: int, *, known: bool) -> None:
        """All come to know that two peers do not reach each other, or that they do again."""
        link = (min(one, other), max(one, other))
        self._cut = self._cut | {link} if known else self._cut - {link}
        self._views.clear()

    def doubt(self, observer: int, peer: int, health: Health) -> None:
        self._doubts.setdefault(observer, {})[peer] = health
        self._views.clear()

    def _side(self, observer: int) -> Hashable:
        return super()._side(observer), observer if observer in self._doubts else None

    def _believed(self, observer: int) -> dict[str, Belief]:
        found = super()._believed(observer)
        for peer, health in self._doubts.get(observer, {}).items():
            known = found.setdefault(self._names[peer], {"health": Health.ALIVE})
            known["health"] = max(known["health"], health)
        for one, other in sorted(self._cut):
            for peer, away in ((one, other), (other, one)):
                known = found.setdefault(self._names[peer], {})
                known["unreachable"] = (*known.get("unreachable", ()), self._names[away])
        return found


class FaultySwarm(SimulatedSwarm):
    _network_type, _beliefs_type = FaultyNetwork, FaultyBeliefs

    def __init__(self, *given) -> None:
        self._late: list[Late] = []
        super().__init__(*given)

    def late_s(self, peer: int, begin_s: float, end_s: float) -> float:
        """By how much longer the inner steps take that a peer takes from then to then."""
        late = [f for f in self._late if f.peer == peer and begin_s <= f.at_s < end_s]
        return sum(fault.by_s for fault in late)

    def _plan(self, fault: Fault) -> None:
        clock, network = self.clock, self.network
        match fault:
            case Cut(one, other, from_s, to_s, found_s):
                clock.at(from_s, partial(network.cut, one, other, found_s))
                clock.at(to_s, partial(network.mend, one, other))
                self._plan_cut_news(fault)
            case Late():
                self._late.append(fault)
            case BreakStreams(peer, at_s):
                clock.at(at_s, partial(network.break_all, peer))
            case BrittleStreams(share, from_s, to_s):
                clock.at(from_s, partial(setattr, network, "brittle", share))
                clock.at(to_s, partial(setattr, network, "brittle", 0.0))
            case Delay(one, other, from_s, to_s, by_s):
                clock.at(from_s, partial(network.slow_down, one, other, by_s))
                clock.at(to_s, partial(network.slow_down, one, other, 0.0))
            case Doubt(observer, peer, from_s, to_s, health):
                clock.at(from_s, partial(self._doubt, observer, peer, health))
                clock.at(to_s, partial(self._doubt, observer, peer, Health.ALIVE))
            case _:
                super()._plan(fault)

    def _plan_cut_news(self, cut: Cut) -> None:
        """Lets the others find out that two peers are apart; where there are no others, each takes
        the other for dead."""
        one, other, clock = cut.one, cut.other, self.clock
        if self.scenario.peers == 2:
            for after_s, health in self._noticed(cut.to_s - cut.from_s):
                clock.at(cut.from_s + after_s, partial(self._doubt_both, one, other, health))
            heard_s = cut.to_s + self._detector.reconnect_s
            clock.at(heard_s, partial(self._doubt_both, one, other, Health.ALIVE))
            return
        known_s = cut.from_s + self._detector.probe_s + 3 * self._detector.probe_timeout_s
        if known_s < cut.to_s:
            clock.at(known_s, partial(self._know_cut, one, other, known=True))
            mended_s = cut.to_s + 4 * self._detector.probe_timeout_s
            clock.at(mended_s, partial(self._know_cut, one, other, known=False))

    def _know_cut(self, one: int, other: int, *, known: bool) -> None:
        self._beliefs.cut(one, other, known=known)
        self._tell()

    def _doubt(self, observer: int, peer: int, health: Health) -> None:
        self._beliefs.doubt(observer, peer, health)
        self._tell_one(observer)

    def _doubt_both(self, one: int, other: int, health: Health) -> None:
        self._doubt(one, other, health)
        self._doubt(other, one, health)


class LatePeer:
    """A simulated peer whose steps may take longer. Stands before `MeanPeer` or `PairPeer`."""

    def _taken_s(self) -> float:
        taken_s = super()._taken_s()
        return taken_s + self.swarm.late_s(self.number, self.now, self.now + taken_s)
