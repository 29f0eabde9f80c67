"""When what goes wrong in a schedule of rounds in small groups: drawn before it begins."""

import math
import random
from dataclasses import dataclass, field

from tests.protocol.meeting_parts import FAULTY_ROUNDS, Faults, Touch
from worker.membership import Health


@dataclass(frozen=True)
class Cut:
    """Nothing passes between two peers until `end`."""

    link: frozenset[str]
    end: float


@dataclass(frozen=True)
class Kill:
    peer: str


@dataclass(frozen=True)
class Freeze:
    peer: str
    end: float


@dataclass(frozen=True)
class Thaw:
    peer: str


@dataclass(frozen=True)
class Seen:
    """What the observer's membership says of a peer; `new`: it is heard of for the first time."""

    observer: str
    peer: str
    health: Health
    new: bool = False


@dataclass(frozen=True)
class Told:
    """Whether the two of a link reach each other, as the observer's membership has it."""

    observer: str
    link: tuple[str, str]
    unreachable: bool


Fault = Cut | Kill | Freeze | Thaw | Seen | Told


@dataclass
class FaultPlan:
    """All faults of a schedule but the streams that break by themselves.

    `settled_at` is the time (s) from which on nothing is disturbed and all views are right.
    """

    faults: Faults
    names: list[str]
    interval_s: float
    rng: random.Random
    timed: list[tuple[float, Fault]] = field(default_factory=list)
    touches: list[Touch] = field(default_factory=list)
    late_s: dict[tuple[str, int], float] = field(default_factory=dict)
    joining: dict[str, float] = field(default_factory=dict)
    settled_at: float = 0.0

    def __post_init__(self) -> None:
        rng, faults, names = self.rng, self.faults, self.names
        self.settled_at = FAULTY_ROUNDS * self.interval_s
        for name in rng.sample(names, min(faults.joiners, len(names) - 2)):
            self._join(name)
        for _ in range(faults.cuts):
            self._cut(*rng.sample(names, 2))
        for name in rng.sample(names, min(faults.kills, len(names) - 1)):
            self._kill(name)
        for name in rng.sample(names, min(faults.freezes, len(names))):
            self._freeze(name)
        for _ in range(faults.suspicions):
            self._suspect(*rng.sample(names, 2))
        for _ in range(faults.late):
            name, round_ = rng.choice(names), rng.randrange(FAULTY_ROUNDS)
            self.late_s[name, round_] = rng.uniform(0.5, 6.0)

    def _moment(self) -> float:
        """Mostly while a round is held."""
        if self.rng.random() < 0.2:
            return self.rng.uniform(0.0, FAULTY_ROUNDS * self.interval_s)
        return self.rng.randrange(FAULTY_ROUNDS) * self.interval_s + self.rng.uniform(0.0, 1.5)

    def _touch(self, kind: str, peers: tuple[str, ...], start: float, end: float) -> None:
        self.touches.append(Touch(kind, frozenset(peers), start, end))
        if end < math.inf:
            self.settled_at = max(self.settled_at, end)

    def _see(self, time_s: float, observer: str, peer: str, health: Health) -> None:
        if observer != peer:
            self.timed.append((time_s, Seen(observer, peer, health)))

    def _join(self, name: str) -> None:
        start = self.joining[name] = self._moment()
        self.settled_at = max(self.settled_at, start + 2)
        for observer in self.names:
            if observer != name:
                known_at = start + self.rng.uniform(0.0, 2.0)
                self.timed.append((known_at, Seen(observer, name, Health.ALIVE, new=True)))

    def _cut(self, one: str, other: str) -> None:
        start = self._moment()
        end = start + self.rng.uniform(0.2, 12.0)
        self._touch("cut", (one, other), start, end + 1)
        self.timed.append((start, Cut(frozenset((one, other)), end)))
        known_at, link = start + self.rng.uniform(2.0, 4.0), (min(one, other), max(one, other))
        for observer in self.names if known_at < end else ():
            told_at = min(end, known_at + self.rng.uniform(0.0, 1.0))
            self.timed.append((told_at, Told(observer, link, unreachable=True)))
            healed_at = end + self.rng.uniform(0.1, 1.0)
            self.timed.append((healed_at, Told(observer, link, unreachable=False)))

    def _kill(self, name: str) -> None:
        start = self._moment()
        self._touch("kill", (name,), start, math.inf)
        self.settled_at = max(self.settled_at, start + 6)
        self.timed.append((start, Kill(name)))
        for observer in self.names:
            suspect_at = start + self.rng.uniform(0.5, 2.0)
            self._see(suspect_at, observer, name, Health.SUSPECT)
            self._see(suspect_at + self.rng.uniform(3.5, 4.0), observer, name, Health.DEAD)

    def _freeze(self, name: str) -> None:
        start = self._moment()
        end = start + self.rng.uniform(0.5, 60.0 if self.interval_s > 10 else 12.0)
        self._touch("freeze", (name,), start, end + 1)
        self.timed += [(start, Freeze(name, end)), (end, Thaw(name))]
        for observer in self.names:
            suspect_at = start + self.rng.uniform(1.0, 2.0)
            dead_at = suspect_at + self.rng.uniform(3.5, 4.0)
            for time_s, health in ((suspect_at, Health.SUSPECT), (dead_at, Health.DEAD)):
                if time_s < end:
                    self._see(time_s, observer, name, health)
            self._see(end + self.rng.uniform(0.1, 1.0), observer, name, Health.ALIVE)

    def _suspect(self, observer: str, name: str) -> None:
        start = self._moment()
        end = start + self.rng.uniform(0.1, 2.0)
        self._see(start, observer, name, Health.SUSPECT)
        kind = "suspicion"
        if self.rng.random() < self.faults.deaths:
            self._see(end, observer, name, Health.DEAD)
            end += self.rng.uniform(0.1, 4.0)
            kind = "false death"
        self._see(end, observer, name, Health.ALIVE)
        self._touch(kind, (observer, name), start, end)
