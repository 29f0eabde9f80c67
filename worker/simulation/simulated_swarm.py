"""Who is in the simulated swarm, what each believes of the others, and what goes wrong.

Membership's own rules do not run here. Which version a peer has come to, everybody knows at once;
who is suspect, dead or out of reach, each peer knows as its latest view says. The swarm carries a
plan of faults out. A fault that a failure detector would notice changes the views of the others as
late as that would; each peer hears of a change up to a second later.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from random import Random
from typing import Protocol

from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Digest, Health, Member, MembershipConfig, Phase
from murmuration.worker.simulation.network import Network, SimulatedStream
from murmuration.worker.simulation.scenario import (
    BreakStreams,
    BrittleStreams,
    Crash,
    Cut,
    Delay,
    Doubt,
    Fault,
    FaultPlan,
    Freeze,
    Late,
    Partition,
    Scenario,
    scenario_faults,
)
from murmuration.worker.simulation.virtual_loop import VirtualLoop

_Belief = tuple[Health, tuple[str, ...]]  # of a peer; the peers that it does not reach


class _Members(Mapping[str, Member]):
    """The members as all know them, but for what is believed of a few."""

    def __init__(self, known: Mapping[str, Member], believed: Mapping[str, _Belief]) -> None:
        self._known, self._believed = known, believed

    def __getitem__(self, name: str) -> Member:
        member, believed = self._known[name], self._believed.get(name)
        if believed is None:
            return member
        return replace(member, health=believed[0], unreachable=believed[1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class SimulatedView(View):
    """A view whose draw is asked for by thousands of peers: a peer that trains here stays in it."""

    @cached_property
    def _drawn(self) -> frozenset[str]:
        return super().in_draw(0)

    def in_draw(self, fragment: int) -> frozenset[str]:
        return self._drawn


class Beliefs:
    """Args: members: the peers as everybody knows them, by name; their versions change."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members, self._names = members, tuple(members)
        self._health: dict[int, Health] = {}
        self._cut: set[tuple[int, int]] = set()
        self._doubts: dict[int, dict[int, Health]] = {}
        self._half, self._across = frozenset[int](), Health.ALIVE
        self._calm = SimulatedView(_Members(members, {}))
        self._views: dict[tuple[bool, int | None], SimulatedView] = {}

    def see(self, peer: int, health: Health) -> bool:
        """All come to believe this of a peer; returns whether that is news."""
        changed = self._health.get(peer, Health.ALIVE) is not health
        self._health[peer] = health
        self._views.clear()
        return changed

    def split(self, half: frozenset[int], across: Health) -> None:
        """The two halves come to believe this of each other."""
        self._half, self._across = half, across
        self._views.clear()

    def cut(self, one: int, other: int, *, known: bool) -> None:
        """All come to know that two peers do not reach each other, or that they do again."""
        link = (min(one, other), max(one, other))
        self._cut = self._cut | {link} if known else self._cut - {link}
        self._views.clear()

    def doubt(self, observer: int, peer: int, health: Health) -> None:
        """One peer comes to believe this of another."""
        self._doubts.setdefault(observer, {})[peer] = health
        self._views.clear()

    def view(self, observer: int) -> View:
        """What this peer would believe now if all news had reached it."""
        key = (observer in self._half, observer if observer in self._doubts else None)
        if key not in self._views:
            believed = self._believed(key[0], self._doubts.get(observer, {}))
            self._views[key] = (
                SimulatedView(_Members(self._members, believed)) if believed else self._calm
            )
        return self._views[key]

    def _believed(self, in_half: bool, doubts: Mapping[int, Health]) -> dict[str, _Belief]:
        """By name, the peers of which something else than that all is well is believed."""
        health = dict(self._health)
        for peer in range(len(self._names)) if self._across is not Health.ALIVE else ():
            if (peer in self._half) != in_half:
                health[peer] = max(health.get(peer, Health.ALIVE), self._across)
        for peer, each in doubts.items():
            health[peer] = max(health.get(peer, Health.ALIVE), each)
        unreachable: dict[int, list[str]] = {}
        for one, other in sorted(self._cut):
            unreachable.setdefault(one, []).append(self._names[other])
            unreachable.setdefault(other, []).append(self._names[one])
        return {
            self._names[peer]: (
                health.get(peer, Health.ALIVE),
                tuple(unreachable.get(peer, ())),
            )
            for peer in health.keys() | unreachable.keys()
        }


RUN = 1
_NEWS_S = 1.0  # the longest that news of a change takes to a peer

Group = tuple[str, ...]


class Endpoint(Protocol):
    """A peer, as the swarm deals with it."""

    def viewed(self, changed: frozenset[str]) -> None:
        """Membership says something else than before of these peers."""

    def died(self) -> None:
        """It has crashed."""

    def broken(self, stream: SimulatedStream) -> None:
        """A stream has broken, and this end has found out."""


class SimulatedSwarm:
    """Everything that is not inside one peer.

    Args:
        scenario: what to simulate.
        faults: what goes wrong; without it what the scenario asks for, at random times.
        config: of the rounds; the defaults without it.
        shuffle: as of `VirtualLoop`.
    """

    def __init__(
        self,
        scenario: Scenario,
        faults: FaultPlan | None = None,
        config: RoundConfig | None = None,
        shuffle: Random | None = None,
    ) -> None:
        self.scenario, self.config = scenario, config or RoundConfig()
        self.clock = VirtualLoop(shuffle)
        count, seed = scenario.peers, scenario.seed
        self.names = tuple(f"p{number:05}" for number in range(count))
        self.endpoints: Sequence[Endpoint] = ()
        self._detector = MembershipConfig()
        chance = Random(f"faults {seed}")
        self.slow = frozenset(chance.sample(range(count), round(count * scenario.slow_share)))
        half = frozenset(chance.sample(range(count), count // 2) if scenario.partition else ())
        self._news_s = [chance.uniform(0, _NEWS_S) for _ in range(count)]
        self._wakes_at = [0.0] * count
        self.dead: set[int] = set()
        member = Member("", "", 1, phase=Phase.TRAINING, digests=(Digest(0, 0, 0),))
        self._members = {name: replace(member, peer=name) for name in self.names}
        self._beliefs = Beliefs(self._members)
        self._views = [self._beliefs.view(peer) for peer in range(count)]
        self._at_version = {0: count}
        self._late: list[Late] = []
        self.network = Network(
            self.clock,
            count,
            scenario.link,
            scenario.latency_spread,
            Random(f"network {seed}"),
            lambda end, stream: self.endpoints[end].broken(stream),
        )
        self.faults = scenario_faults(scenario, half, chance) if faults is None else faults
        for fault in self.faults:
            self._plan(fault)

    def late_s(self, peer: int, begin_s: float, end_s: float) -> float:
        """By how much longer the inner steps take that a peer takes from then to then."""
        times = (
            fault.by_s
            for fault in self._late
            if fault.peer == peer and begin_s <= fault.at_s < end_s
        )
        return sum(times)

    # ------------------------------------------------------------------------------ what is known

    def view(self, peer: int) -> View:
        """What this peer believes of the others."""
        return self._views[peer]

    def members(self, peer: int) -> list[Member]:
        """Of the others."""
        return [
            member for name, member in self.view(peer).members.items() if name != self.names[peer]
        ]

    def advanced(self, peer: int, digest: Digest, phase: Phase = Phase.TRAINING) -> None:
        """A peer has come to another version; everybody knows at once."""
        name = self.names[peer]
        before = self._members[name].digests[0].version
        self._at_version[before] -= 1
        self._at_version[digest.version] = self._at_version.get(digest.version, 0) + 1
        self._members[name] = Member(
            name, "", 1, phase=phase, step=digest.version, digests=(digest,)
        )

    def may_be_left_behind(self, peer: int, version: int) -> bool:
        """Whether enough are two versions further for it to be worth while to look which."""
        ahead = sum(count for at, count in self._at_version.items() if at >= version + 2)
        return 2 * ahead >= len(self.view(peer).in_draw(0))

    def detection_s(self) -> float:
        """How long a dead peer takes to be noticed."""
        return self._detector.detection_s(self.scenario.peers)

    # ------------------------------------------------------------------------------------- faults

    def _plan(self, fault: Fault) -> None:
        """Puts what a fault does, and when others notice, on the clock."""
        clock, network = self.clock, self.network
        match fault:
            case Crash(peer, at_s):
                clock.at(at_s, partial(self._crash, peer))
                for after_s, health in self._noticed(math.inf):
                    clock.at(at_s + after_s, partial(self._see, peer, health))
            case Freeze(peer, at_s, for_s):
                clock.at(at_s, partial(self._freeze, peer, at_s + for_s))
                for after_s, health in self._noticed(for_s):
                    clock.at(at_s + after_s, partial(self._see, peer, health))
                heard_s = at_s + for_s + self._detector.gossip_s
                clock.at(heard_s, partial(self._see, peer, Health.ALIVE))
            case Partition(half, from_s, to_s):
                clock.at(from_s, lambda: network.split(half))
                clock.at(to_s, lambda: network.split(frozenset()))
                for after_s, health in self._noticed(to_s - from_s):
                    clock.at(from_s + after_s, partial(self._part, half, health))
                heard_s = to_s + self._detector.reconnect_s
                clock.at(heard_s, partial(self._part, frozenset(), Health.ALIVE))
            case Cut(one, other, from_s, to_s, found_s):
                clock.at(from_s, partial(network.cut, one, other, found_s))
                clock.at(to_s, partial(network.mend, one, other))
                self._plan_cut_news(fault)
            case Late():
                self._late.append(fault)
            case BreakStreams(peer, at_s):
                clock.at(at_s, partial(network.break_all, peer))
            case BrittleStreams(share, from_s, to_s):
                clock.at(from_s, partial(network.be_brittle, share))
                clock.at(to_s, partial(network.be_brittle, 0.0))
            case Delay(one, other, from_s, to_s, by_s):
                clock.at(from_s, partial(network.slow_down, one, other, by_s))
                clock.at(to_s, partial(network.slow_down, one, other, 0.0))
            case Doubt(observer, peer, from_s, to_s, health):
                clock.at(from_s, partial(self._doubt, observer, peer, health))
                clock.at(to_s, partial(self._doubt, observer, peer, Health.ALIVE))

    def _noticed(self, lasts_s: float) -> list[tuple[float, Health]]:
        """After how long silence is taken for what, if it lasts so long."""
        detector = self._detector
        suspect_s = detector.probe_s + 2 * detector.probe_timeout_s
        steps = ((suspect_s, Health.SUSPECT), (self.detection_s(), Health.DEAD))
        return [(after_s, health) for after_s, health in steps if after_s < lasts_s]

    def _plan_cut_news(self, cut: Cut) -> None:
        """Of two peers, the others find out that they are apart; where there are no others, each
        takes the other for dead."""
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

    def _crash(self, peer: int) -> None:
        self.dead.add(peer)
        self.clock.kill(peer)
        self.network.die(peer)
        self.endpoints[peer].died()

    def _freeze(self, peer: int, wakes_at: float) -> None:
        self._wakes_at[peer] = max(self._wakes_at[peer], wakes_at)
        self.clock.freeze(peer)
        self.clock.at(wakes_at, partial(self._wake, peer))

    def _wake(self, peer: int) -> None:
        if self.clock.now >= self._wakes_at[peer]:
            self.clock.thaw(peer)

    def _see(self, peer: int, health: Health) -> None:
        if health is Health.ALIVE and peer in self.dead:
            return  # it stood still before
        if self._beliefs.see(peer, health):
            self._tell({peer})

    def _part(self, half: frozenset[int], across: Health) -> None:
        self._beliefs.split(half, across)
        self._tell(range(self.scenario.peers))

    def _know_cut(self, one: int, other: int, *, known: bool) -> None:
        self._beliefs.cut(one, other, known=known)
        self._tell({one, other})

    def _doubt(self, observer: int, peer: int, health: Health) -> None:
        self._beliefs.doubt(observer, peer, health)
        self._tell({peer}, {observer})

    def _doubt_both(self, one: int, other: int, health: Health) -> None:
        self._doubt(one, other, health)
        self._doubt(other, one, health)

    def _tell(self, changed: Collection[int], to: Collection[int] | None = None) -> None:
        """The views change; each peer hears of it with a delay of its own."""
        names = frozenset(self.names[peer] for peer in changed)
        for peer in range(self.scenario.peers) if to is None else to:
            hear = partial(self._hear, peer, self._beliefs.view(peer), names)
            self.clock.after(self._news_s[peer], partial(self.clock.act, peer, hear))

    def _hear(self, peer: int, view: View, changed: frozenset[str]) -> None:
        self._views[peer] = view
        self.endpoints[peer].viewed(changed)
