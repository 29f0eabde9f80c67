"""The peers of a simulated swarm, what each believes of the others, and what goes wrong.

Membership's own rules do not run here. Which version a peer has come to, everybody knows at once;
who is suspect, dead or out of reach, others learn as late as a failure detector would notice it,
and each hears of it up to a second later.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from random import Random
from typing import Any

from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Digest, Health, Member, Phase
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.simulation import scenario as scenarios
from murmuration.worker.simulation.network import Network
from murmuration.worker.simulation.virtual_loop import VirtualLoop

Belief = dict[str, Any]  # fields of a member


class _Members(Mapping[str, Member]):
    """The members as all know them, but for what is believed of a few."""

    def __init__(self, known: Mapping[str, Member], believed: Mapping[str, Belief]) -> None:
        self._known, self._believed = known, believed
        self._seen: dict[str, tuple[Member, Member]] = {}  # as known, and as believed to be

    def __getitem__(self, name: str) -> Member:
        member, believed = self._known[name], self._believed.get(name)
        if believed is None:
            return member
        if self._seen.get(name, (None,))[0] is not member:
            self._seen[name] = member, replace(member, **believed)
        return self._seen[name][1]

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
        self._half, self._across = frozenset[int](), Health.ALIVE
        self._calm = SimulatedView(_Members(members, {}))
        self._views: dict[Hashable, SimulatedView] = {}

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

    def view(self, observer: int) -> View:
        """The view that this peer would have now if all news had reached it."""
        key = self._side(observer)
        if key not in self._views:
            believed = self._believed(observer)
            seen = SimulatedView(_Members(self._members, believed)) if believed else self._calm
            self._views[key] = seen
        return self._views[key]

    def _side(self, observer: int) -> Hashable:
        """Observers that believe the same have the same."""
        return observer in self._half

    def _believed(self, observer: int) -> dict[str, Belief]:
        """By name, the peers of which something else than that all is well is believed."""
        health = dict(self._health)
        for peer in range(len(self._names)) if self._across is not Health.ALIVE else ():
            if (peer in self._half) != (observer in self._half):
                health[peer] = max(health.get(peer, Health.ALIVE), self._across)
        return {self._names[peer]: {"health": each} for peer, each in health.items()}


RUN = 1
_NEWS_S = 1.0  # the longest that news of a change takes to a peer


class SimulatedSwarm:
    """All that is not inside a peer. Faults are the scenario's if none are given."""

    _network_type: type[Network] = Network
    _beliefs_type: type[Beliefs] = Beliefs

    def __init__(
        self,
        scenario: scenarios.Scenario,
        faults: scenarios.FaultPlan | None = None,
        config: RoundConfig | None = None,
        shuffle: Random | None = None,
    ) -> None:
        self.scenario, self.config = scenario, config or RoundConfig()
        self.clock = VirtualLoop(shuffle)
        count, seed = scenario.peers, scenario.seed
        self.names = tuple(f"p{number:05}" for number in range(count))
        self.endpoints: Sequence[Any] = ()  # every `Peer`, by number
        self._detector = MembershipConfig()
        chance = Random(f"faults {seed}")
        self.slow = frozenset(chance.sample(range(count), round(count * scenario.slow_share)))
        half = frozenset(chance.sample(range(count), count // 2) if scenario.partition else ())
        self._news_s = [chance.uniform(0, _NEWS_S) for _ in range(count)]
        self._wakes_at = [0.0] * count
        self.dead: set[int] = set()
        member = Member("", "", 1, phase=Phase.TRAINING, digests=(Digest(0, 0, 0),))
        self._members = {name: replace(member, peer=name) for name in self.names}
        self._beliefs = self._beliefs_type(self._members)
        self._views = [self._beliefs.view(peer) for peer in range(count)]
        self._at_version = {0: count}
        rng = Random(f"network {seed}")
        self.network = self._network_type(
            self.clock, scenario, rng, lambda end, stream: self.endpoints[end].broken(stream)
        )
        if faults is None:
            faults = scenarios.scenario_faults(scenario, half, chance)
        self.faults = faults
        for fault in faults:
            self._plan(fault)

    def view(self, peer: int) -> View:
        return self._views[peer]

    def members(self, peer: int) -> list[Member]:
        me, members = self.names[peer], self.view(peer).members
        return [member for name, member in members.items() if name != me]

    def advanced(self, peer: int, digest: Digest, phase: Phase = Phase.TRAINING) -> None:
        """A peer has come to another version; everybody knows at once."""
        name = self.names[peer]
        self._at_version[self._members[name].digests[0].version] -= 1
        self._at_version[digest.version] = self._at_version.get(digest.version, 0) + 1
        step, digests = digest.version, (digest,)
        self._members[name] = Member(name, "", 1, phase=phase, step=step, digests=digests)

    def may_be_left_behind(self, peer: int, version: int) -> bool:
        """Says whether enough are two versions ahead, so that to look which is worth while."""
        ahead = sum(count for at, count in self._at_version.items() if at >= version + 2)
        return 2 * ahead >= len(self.view(peer).in_draw(0))

    def detection_s(self) -> float:
        return self._detector.detection_s(self.scenario.peers)

    def _plan(self, fault: scenarios.Fault) -> None:
        clock, network = self.clock, self.network
        match fault:
            case scenarios.Crash(peer, at_s):
                clock.at(at_s, partial(self._crash, peer))
                for after_s, health in self._noticed(math.inf):
                    clock.at(at_s + after_s, partial(self._see, peer, health))
            case scenarios.Freeze(peer, at_s, for_s):
                clock.at(at_s, partial(self._freeze, peer, at_s + for_s))
                for after_s, health in self._noticed(for_s):
                    clock.at(at_s + after_s, partial(self._see, peer, health))
                heard_s = at_s + for_s + self._detector.gossip_s
                clock.at(heard_s, partial(self._see, peer, Health.ALIVE))
            case scenarios.Partition(half, from_s, to_s):
                clock.at(from_s, lambda: network.split(half))
                clock.at(to_s, lambda: network.split(frozenset()))
                for after_s, health in self._noticed(to_s - from_s):
                    clock.at(from_s + after_s, partial(self._part, half, health))
                heard_s = to_s + self._detector.reconnect_s
                clock.at(heard_s, partial(self._part, frozenset(), Health.ALIVE))

    def _noticed(self, lasts_s: float) -> list[tuple[float, Health]]:
        """After how long silence is taken for what, if it lasts so long."""
        detector = self._detector
        suspect_s = detector.probe_s + 2 * detector.probe_timeout_s
        steps = ((suspect_s, Health.SUSPECT), (self.detection_s(), Health.DEAD))
        return [(after_s, health) for after_s, health in steps if after_s < lasts_s]

    def _crash(self, peer: int) -> None:
        self.dead.add(peer)
        self.clock.kill(peer)
        self.network.die(peer)
        if not self.endpoints[peer].done:
            self.endpoints[peer].finish()

    def _freeze(self, peer: int, wakes_at: float) -> None:
        self._wakes_at[peer] = max(self._wakes_at[peer], wakes_at)
        self.clock.freeze(peer)

        def wake() -> None:
            if self.clock.now >= self._wakes_at[peer]:
                self.clock.thaw(peer)

        self.clock.at(wakes_at, wake)

    def _see(self, peer: int, health: Health) -> None:
        if health is Health.ALIVE and peer in self.dead:
            return  # it stood still before
        if self._beliefs.see(peer, health):
            self._tell()

    def _part(self, half: frozenset[int], across: Health) -> None:
        self._beliefs.split(half, across)
        self._tell()

    def _tell(self) -> None:
        """The views change; each peer hears of it with a delay of its own."""
        for peer in range(self.scenario.peers):
            self._tell_one(peer)

    def _tell_one(self, peer: int) -> None:
        view = self._beliefs.view(peer)

        def hear() -> None:
            self._views[peer] = view
            self.endpoints[peer].viewed()

        self.clock.after(self._news_s[peer], partial(self.clock.act, peer, hear))
