"""Who is in the simulated swarm, what each believes of the others, and what goes wrong.

Membership's own machines do not run here: all peers of a half share one view, which learns of a
crash or a freeze as late as the failure detector would tell, and each peer draws the groups of its
rounds from what the view said up to a second ago.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol

from algorithms.grouping import groups, membership_epoch
from worker.exchange.types import RoundConfig, View
from worker.membership import Digest, Health, Member, MembershipConfig, Phase
from worker.simulation.clock import Act, Clock
from worker.simulation.network import Network, Stream
from worker.simulation.scenario import Scenario

RUN = 1
_NEWS_S = 1.0  # the longest that news of a change takes to a peer
_MOST_DRAWS = 16

Group = tuple[str, ...]


class Endpoint(Protocol):
    """A peer, as the swarm deals with it."""

    def viewed(self, changed: frozenset[str]) -> None:
        """Membership says something else than before of these peers."""

    def died(self) -> None:
        """It has crashed."""

    def broken(self, stream: Stream) -> None:
        """A stream has broken, and this end has found out."""


class Swarm:
    """Everything that is not inside one peer.

    Args:
        scenario: what to simulate.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.config = scenario, RoundConfig()
        self.clock = Clock()
        count, seed = scenario.peers, scenario.seed
        self.names = tuple(f"p{number:05}" for number in range(count))
        self.endpoints: Sequence[Endpoint] = ()
        self._detector = MembershipConfig()
        chance = Random(f"faults {seed}")
        horizon_s = scenario.rounds * scenario.inner_steps * scenario.step_s
        self.slow = frozenset(chance.sample(range(count), round(count * scenario.slow_share)))
        self._half: frozenset[int] = frozenset()
        if scenario.partition:
            self._half = frozenset(chance.sample(range(count), count // 2))
        self._news_s = [chance.uniform(0, _NEWS_S) for _ in range(count)]
        self._wakes_at = [0.0] * count
        self.dead: set[int] = set()
        self._health = [Health.ALIVE] * count
        self._cut = Health.ALIVE  # what the halves of a partition think of each other
        member = Member("", "", 1, phase=Phase.TRAINING, digests=(Digest(0, 0, 0),))
        halves = 2 if scenario.partition else 1
        self._members = [
            {name: replace(member, peer=name) for name in self.names} for _ in range(halves)
        ]
        self._views = [View(members) for members in self._members]
        self._in_round: list[list[tuple[float, frozenset[str]]]] = [
            [(0.0, frozenset(self.names))] for _ in range(halves)
        ]
        self._draws: dict[tuple[int, frozenset[str]], dict[str, Group]] = {}
        self._at_version = {0: count}
        self.network = Network(
            self.clock,
            count,
            scenario.link,
            scenario.latency_spread,
            Random(f"network {seed}"),
            self.act,
            lambda end, stream: self.endpoints[end].broken(stream),
        )
        self._plan_faults(chance, horizon_s)

    def act(self, peer: int, act: Act) -> None:
        """Does something at a peer: not if it is dead, and not before it wakes."""
        if peer in self.dead:
            return
        wakes_at = self._wakes_at[peer]
        if self.clock.now < wakes_at:
            self.clock.at(wakes_at, lambda: self.act(peer, act))
        else:
            act()

    # ------------------------------------------------------------------------------ what is known

    def view(self, peer: int) -> View:
        """What this peer believes of the others."""
        return self._views[self._side(peer)]

    def members(self, peer: int) -> list[Member]:
        """Of the others."""
        return [
            member for name, member in self.view(peer).members.items() if name != self.names[peer]
        ]

    def advanced(self, peer: int, digest: Digest, phase: Phase = Phase.TRAINING) -> None:
        """A peer has come to another version; everybody knows at once."""
        name = self.names[peer]
        before = self._members[0][name].digests[0].version
        self._at_version[before] -= 1
        self._at_version[digest.version] = self._at_version.get(digest.version, 0) + 1
        for members in self._members:
            old = members[name]
            members[name] = Member(
                name, "", 1, 0, old.health, phase, step=digest.version, digests=(digest,)
            )

    def may_be_left_behind(self, peer: int, version: int) -> bool:
        """Whether so many are two versions further that it is worth while to look who."""
        ahead = sum(count for at, count in self._at_version.items() if at >= version + 2)
        return 2 * ahead >= len(self._in_round[self._side(peer)][-1][1])

    def group(self, peer: int, round_: int) -> Group:
        """The peer's group of a round as it knows the members; itself alone if it sits out."""
        name, seen_s = self.names[peer], self.clock.now - self._news_s[peer]
        told = self._in_round[self._side(peer)]
        drawn = next((m for time_s, m in reversed(told) if time_s <= seen_s), told[0][1])
        key = (round_, drawn | {name} if name not in drawn else drawn)
        if key not in self._draws:
            while len(self._draws) >= _MOST_DRAWS:
                del self._draws[next(iter(self._draws))]
            dealt = groups(
                RUN, 0, round_, membership_epoch(key[1]), key[1], self.scenario.group_size
            )
            self._draws[key] = {each: group for group in dealt for each in group}
        return self._draws[key].get(name, (name,))

    def detection_s(self) -> float:
        """How long a dead peer takes to be noticed."""
        return self._detector.detection_s(self.scenario.peers)

    # ------------------------------------------------------------------------------------- faults

    def _plan_faults(self, chance: Random, horizon_s: float) -> None:
        scenario, count = self.scenario, self.scenario.peers
        order = chance.sample(range(count), count)
        crashes = round(count * scenario.crash_share)
        freezes = min(count - crashes, round(count * scenario.freeze_share))
        for peer in order[:crashes]:
            self.clock.after(chance.uniform(0, horizon_s), partial(self._crash, peer))
        for peer in order[crashes : crashes + freezes]:
            self.clock.after(chance.uniform(0, horizon_s), partial(self._freeze, peer))
        if scenario.partition:
            begin_s, end_s = scenario.partition
            self.clock.at(begin_s, lambda: self.network.split(self._half))
            self.clock.at(end_s, lambda: self.network.split(frozenset()))
            self._doubt(lambda: self._part(Health.SUSPECT), begin_s, end_s, self._suspect_s)
            self._doubt(lambda: self._part(Health.DEAD), begin_s, end_s, self.detection_s())
            heard_s = end_s + self._detector.reconnect_s
            self.clock.at(heard_s, lambda: self._part(Health.ALIVE))

    def _doubt(self, act: Act, begin_s: float, end_s: float, after_s: float) -> None:
        if begin_s + after_s < end_s:
            self.clock.at(begin_s + after_s, act)

    @property
    def _suspect_s(self) -> float:
        return self._detector.probe_s + 2 * self._detector.probe_timeout_s

    def _crash(self, peer: int) -> None:
        self.dead.add(peer)
        self.network.die(peer)
        self.endpoints[peer].died()
        self.clock.after(self._suspect_s, lambda: self._see(peer, Health.SUSPECT))
        self.clock.after(self.detection_s(), lambda: self._see(peer, Health.DEAD))

    def _freeze(self, peer: int) -> None:
        now, wakes_at = self.clock.now, self.clock.now + self.scenario.freeze_s
        self._wakes_at[peer] = wakes_at
        self._doubt(lambda: self._see(peer, Health.SUSPECT), now, wakes_at, self._suspect_s)
        self._doubt(lambda: self._see(peer, Health.DEAD), now, wakes_at, self.detection_s())
        self.clock.at(wakes_at + self._detector.gossip_s, lambda: self._see(peer, Health.ALIVE))

    def _see(self, peer: int, health: Health) -> None:
        if self._health[peer] is not health:
            self._health[peer] = health
            self._tell(frozenset({peer}))

    def _part(self, health: Health) -> None:
        self._cut = health
        self._tell(frozenset(range(self.scenario.peers)))

    def _tell(self, changed: frozenset[int]) -> None:
        """The views change, and with a delay of its own each peer hears of it."""
        for side, members in enumerate(self._members):
            for peer in sorted(changed):
                other_half = self._side(peer) != side
                health = max(self._health[peer], self._cut if other_half else Health.ALIVE)
                name = self.names[peer]
                members[name] = replace(members[name], health=health)
            drawn = self._views[side].in_draw(0)
            told = self._in_round[side]
            if drawn != told[-1][1]:
                told.append((self.clock.now, drawn))
                del told[:-100]
        names = frozenset(self.names[peer] for peer in changed)
        for peer, endpoint in enumerate(self.endpoints):
            hear = partial(endpoint.viewed, names)
            self.clock.after(self._news_s[peer], partial(self.act, peer, hear))

    def _side(self, peer: int) -> int:
        return 1 if peer in self._half else 0
