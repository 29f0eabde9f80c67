"""What a random schedule is made of: its faults, its values, and what each peer keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

from algorithms.grouping import reducer_orders
from worker.exchange.allreduce.contributor import Contributing
from worker.exchange.allreduce.reducer import Reducing
from worker.exchange.types import ShardKey
from worker.membership import Member

Group = tuple[str, ...]


@dataclass(frozen=True)
class Faults:
    """What may happen in a schedule.

    Args:
        break_rate: share of the streams that break on the way.
        crash: whether one peer goes down at a random time, for good.
        suspicions: how many times some peer wrongly suspects another for a while.
        false_deaths: share of these that go as far as a declared death.
        straggler: whether one peer begins its first round later than the others' grace.
    """

    break_rate: float = 0.0
    crash: bool = False
    suspicions: int = 0
    false_deaths: float = 0.0
    straggler: bool = False


@dataclass(frozen=True)
class Value:
    """One contribution to one shard; `tries` counts the begins of the round by that peer."""

    peer: str
    key: ShardKey
    tries: int


@dataclass(frozen=True)
class Reduction:
    """A closed shard."""

    key: ShardKey
    closer: str
    contributors: Group
    values: tuple[Value, ...]
    next_group: Group


@dataclass(frozen=True)
class State:
    """What a peer has committed: the reductions that made its latest version."""

    version: int
    group: Group
    made_of: tuple[Reduction, ...] = ()

    @property
    def rank(self) -> tuple[int, int, int]:
        contributors = min((len(r.contributors) for r in self.made_of), default=0)
        return (self.version, contributors, crc32(repr((self.group, self.made_of)).encode()))


@dataclass
class Stream:
    """One try of one contributor at one reducer."""

    contributor: "SimPeer"
    reducer: "SimPeer"
    key: ShardKey
    attempt: int
    value: Value
    group: Group
    machine: Contributing
    phase: str = "deciding"
    arriving: dict[str, Value] | None = None


@dataclass
class Outcome:
    """How a round ended for a peer."""

    peer: str
    round: int
    began_at: float
    ended_at: float
    reductions: dict[int, Reduction]
    reason: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.reason


@lru_cache(maxsize=4096)
def orders(fragment: int, group: Group) -> Sequence[Sequence[str]]:
    return reducer_orders(1, fragment, group)


@dataclass
class SimPeer:
    """One peer: both machines, and what the exchange keeps beside them."""

    name: str
    state: State
    members: dict[str, Member]
    reducing: Reducing
    contributing: Contributing | None = None
    crashed: bool = False
    done: bool = False
    failed: bool = False
    tries: int = 0
    began_at: float = 0.0
    got: dict[int, Reduction] = field(default_factory=dict)
    arriving: dict[ShardKey, dict[str, Value]] = field(default_factory=dict)
    reductions: dict[ShardKey, Reduction] = field(default_factory=dict)
    serving: list[Stream] = field(default_factory=list)
    opened: dict[tuple[ShardKey, int], Stream] = field(default_factory=dict)
