"""What a schedule of rounds in small groups is made of: faults, streams, what each peer keeps."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from algorithms.grouping import group_of, membership_epoch
from tests.protocol.views import member
from worker.exchange.pairwise.round import Event, PairRound
from worker.exchange.types import RoundConfig, View
from worker.membership import Health, Member

Group = tuple[str, ...]

CONFIG = RoundConfig(patience_s=2.0, retry_s=0.25, slack_s=4.0)
TICK_S = 0.25
LATENCY_S = (0.005, 0.1)
TRANSFER_S = (0.02, 0.4)
JITTER_S = 0.5  # between the peers' arrivals at one round
ROUND_S = CONFIG.patience_s + CONFIG.slack_s
INTERVALS_S = (4.0, 8.0, 15.0)
FAULTY_ROUNDS = 2
KEPT_ROUNDS = 2


@dataclass(frozen=True)
class Faults:
    """How much may go wrong in the first rounds of a schedule.

    Args:
        breaks: share of the streams that break at one of their messages.
        cuts: links that carry nothing for 0.2 to 12 s.
        kills: peers that die for good, which the others see 4 to 6 s later.
        freezes: peers that process nothing for 0.5 to 60 s, and then all that has piled up.
        suspicions: how often a peer doubts another wrongly, for up to 2 s.
        deaths: share of these that go on to a declared death, for 4 s more at most.
        late: peers that come to one round up to 6 s late.
        joiners: peers that the others come to know during the run, each at another time.
    """

    breaks: float = 0.0
    cuts: int = 0
    kills: int = 0
    freezes: int = 0
    suspicions: int = 0
    deaths: float = 0.5
    late: int = 0
    joiners: int = 0


def random_faults(seed: int) -> Faults:
    """Half of all kinds are absent from a schedule, so that each also occurs without the others."""
    rng = random.Random(f"faults {seed}")
    return Faults(
        breaks=rng.choice((0.0, 0.0, 0.1, 0.3)),
        cuts=rng.choice((0, 0, 1, 2)),
        kills=rng.choice((0, 0, 0, 1, 2)),
        freezes=rng.choice((0, 0, 0, 1, 2)),
        suspicions=rng.choice((0, 0, 1, 3)),
        late=rng.choice((0, 0, 1, 2)),
        joiners=rng.choice((0, 0, 0, 1)),
    )


@dataclass(frozen=True)
class Value:
    """What a peer contributes to a round, and how many rounds its anchor has taken in."""

    peer: str
    round: int
    version: int


@dataclass(frozen=True)
class Touch:
    """A fault that may disturb the groups that hold all of `peers`, in this time."""

    kind: str
    peers: frozenset[str]
    start: float
    end: float

    def disturbs(self, group: Group, start: float, end: float) -> bool:
        return self.start <= end and start <= self.end and self.peers.issubset(group)


@dataclass(eq=False)
class Attendance:
    """One peer's part in one round."""

    peer: str
    round: int
    group: Group
    value: Value
    machine: PairRound
    began_at: float
    staged_at: float | None = None
    ended_at: float | None = None
    failed: str = ""
    waiting_for: Group = ()
    values: dict[str, Value] = field(default_factory=dict)
    streams: list["Stream"] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        return self.ended_at is not None and not self.failed


@dataclass(eq=False)
class Stream:
    """Side 0 has opened it; messages of one side arrive in order, until it breaks."""

    ends: tuple["SimPeer", "SimPeer"]
    round: int
    group: Group
    attempt: int
    parts: list[Attendance | None]
    break_at: tuple[int, int] | None
    up: bool = True
    held: bool = False
    closed: list[bool] = field(default_factory=lambda: [False, False])
    sent: list[int] = field(default_factory=lambda: [0, 0])
    last_at: list[float] = field(default_factory=lambda: [0.0, 0.0])
    stash: list["Message"] = field(default_factory=list)

    @property
    def link(self) -> frozenset[str]:
        return frozenset((self.ends[0].name, self.ends[1].name))

    def side(self, peer: str) -> int:
        return 0 if self.ends[0].name == peer else 1


@dataclass(frozen=True)
class Message:
    """What it is to the machine of the receiver; None is the header."""

    event: Event | None = None
    value: Value | None = None


@dataclass(eq=False)
class SimPeer:
    """One peer: its round of now, and what the I/O around it keeps."""

    name: str
    members: dict[str, Member]
    unreachable: set[tuple[str, str]] = field(default_factory=set)
    current: Attendance | None = None
    next_round: int = 0
    version: int = 0
    dead: bool = False
    frozen: bool = False
    applied: list[int] = field(default_factory=list)
    kept: dict[int, Attendance] = field(default_factory=dict)
    held: list[Stream] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    piled_up: list[Callable[[], None]] = field(default_factory=list)

    @property
    def view(self) -> View:
        """The swarm as it knows it now."""
        members = dict(self.members)
        for one, other in self.unreachable:
            if one in members:
                members[one] = replace(members[one], unreachable=(*members[one].unreachable, other))
        return View(members)

    @property
    def round(self) -> int:
        """The round that it holds, or will hold next."""
        return self.current.round if self.current else self.next_round


@lru_cache(maxsize=4096)
def group_at(
    me: str,
    run: int,
    round_: int,
    members: Group,
    size: int,
    unreachable: frozenset[tuple[str, str]],
) -> Group:
    """The group of a peer by the members that it knows; it alone if it sits out."""
    epoch = membership_epoch(members)
    return group_of(me, run, 0, round_, epoch, members, size, unreachable) or (me,)


@lru_cache(maxsize=4096)
def seen(peer: str, health: Health, next_round: int) -> Member:
    """How a peer is seen that will hold this round next."""
    return member(peer, health, versions=(next_round,))
