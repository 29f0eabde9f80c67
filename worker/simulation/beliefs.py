"""What simulated peers believe of each other.

Membership's own machines do not run here. Which version a peer has come to, everybody knows at
once; who is suspect, dead or out of reach, each peer knows as its latest view says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Health, Member

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
