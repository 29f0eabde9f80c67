"""What goes wrong in a simulated run: a plan of faults, written down or drawn from a seed.

Tests and `murmur simulate` use the same plans; `SimulatedSwarm` carries them out. Peers are
numbers, times are in seconds of the virtual clock. What a fault does to the views of others follows
as late as the failure detector would tell it; a `Doubt` makes one view wrong by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from murmuration.worker.membership import Health
from murmuration.worker.simulation.scenario import Scenario

STALL_S = 10.0  # until a stream over which nothing comes is given up, as by keepalive


@dataclass(frozen=True)
class Crash:
    """A process ends for good, and its connections with it."""

    peer: int
    at_s: float


@dataclass(frozen=True)
class Freeze:
    """A process stands still, and then handles all that has come meanwhile."""

    peer: int
    at_s: float
    for_s: float


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
class Partition:
    """Nothing passes between these peers and the others."""

    half: frozenset[int]
    from_s: float
    to_s: float


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


Fault = Crash | Freeze | Late | Cut | Partition | BreakStreams | BrittleStreams | Delay | Doubt
FaultPlan = tuple[Fault, ...]


def last_s(plan: FaultPlan) -> float:
    """When the last fault is over; a crash is over at once."""
    return max((_end_s(fault) for fault in plan), default=0.0)


def _end_s(fault: Fault) -> float:
    match fault:
        case Crash(_, at_s) | BreakStreams(_, at_s):
            return at_s
        case Freeze(_, at_s, for_s) | Late(_, at_s, for_s):
            return at_s + for_s
        case Partition(_, _, to_s) | BrittleStreams(_, _, to_s):
            return to_s
        case Cut() | Delay() | Doubt():
            return fault.to_s


def scenario_faults(scenario: Scenario, half: frozenset[int], chance: Random) -> FaultPlan:
    """The crashes, freezes and the partition that a scenario asks for, at random times."""
    count, plan = scenario.peers, list[Fault]()
    horizon_s = scenario.rounds * scenario.inner_steps * scenario.step_s
    order = chance.sample(range(count), count)
    crashes = round(count * scenario.crash_share)
    freezes = min(count - crashes, round(count * scenario.freeze_share))
    plan += (Crash(peer, chance.uniform(0, horizon_s)) for peer in order[:crashes])
    plan += (
        Freeze(peer, chance.uniform(0, horizon_s), scenario.freeze_s)
        for peer in order[crashes : crashes + freezes]
    )
    if scenario.partition:
        plan.append(Partition(half, *scenario.partition))
    return tuple(plan)


def random_faults(seed: int, peers: int, until_s: float, period_s: float) -> FaultPlan:
    """Faults of random kinds; about half of all kinds are absent from a plan.

    Args:
        seed: one seed gives one plan.
        peers: 2 or more. At least one of them neither crashes nor freezes.
        until_s: before which every fault begins.
        period_s: of the rounds; most faults begin soon after one is due.
    """
    rng = Random(f"fault plan {seed}")

    def moment_s() -> float:
        if rng.random() < 0.2:
            return rng.uniform(0.0, until_s)
        due_s = rng.randrange(max(1, round(until_s / period_s))) * period_s
        return min(until_s, due_s + rng.uniform(0.0, 0.5 * period_s))

    plan = list[Fault]()
    if share := rng.choice((0.0, 0.0, 0.1, 0.3)):
        plan.append(BrittleStreams(share, 0.0, until_s))
    for kind, counts in _KINDS:
        plan += kind(rng, peers, moment_s, rng.choice(counts))
    return tuple(plan)


_Draw = Callable[[Random, int, Callable[[], float], int], list[Fault]]


def _losses(rng: Random, peers: int, moment_s: Callable[[], float], count: int) -> list[Fault]:
    """Peers that die, or that stand still: each at most once."""
    drawn = rng.sample(range(peers), min(count, peers - 1))
    plan = list[Fault]()
    for peer in drawn:
        if rng.random() < 0.5:
            plan.append(Crash(peer, moment_s()))
            continue
        freeze = Freeze(peer, moment_s(), rng.choice((2.0, 12.0, 40.0)) * rng.uniform(0.2, 1.0))
        plan.append(freeze)
        if (breaks_s := rng.uniform(0.5, 15.0)) < freeze.for_s:
            plan.append(BreakStreams(peer, freeze.at_s + breaks_s))
    return plan


def _cuts(rng: Random, peers: int, moment_s: Callable[[], float], count: int) -> list[Fault]:
    plan = list[Fault]()
    for _ in range(count):
        (one, other), from_s = rng.sample(range(peers), 2), moment_s()
        to_s, found_s = from_s + rng.uniform(0.2, 25.0), rng.choice((0.1, 1.0, STALL_S))
        plan.append(Cut(one, other, from_s, to_s, found_s))
    return plan


def _partitions(rng: Random, peers: int, moment_s: Callable[[], float], count: int) -> list[Fault]:
    plan = list[Fault]()
    for _ in range(count):
        half, from_s = frozenset(rng.sample(range(peers), peers // 2)), moment_s()
        plan.append(Partition(half, from_s, from_s + rng.uniform(0.5, 30.0)))
    return plan


def _breaks(rng: Random, peers: int, moment_s: Callable[[], float], count: int) -> list[Fault]:
    return [BreakStreams(rng.randrange(peers), moment_s()) for _ in range(count)]


def _late(rng: Random, peers: int, moment_s: Callable[[], float], count: int) -> list[Fault]:
    return [Late(rng.randrange(peers), moment_s(), rng.uniform(0.5, 12.0)) for _ in range(count)]


def _delays(rng: Random, peers: int, moment_s: Callable[[], float], count: int) -> list[Fault]:
    plan = list[Fault]()
    for _ in range(count):
        (one, other), from_s = rng.sample(range(peers), 2), moment_s()
        plan.append(Delay(one, other, from_s, from_s + rng.uniform(1.0, 20.0), rng.uniform(0.1, 3)))
    return plan


def _doubts(rng: Random, peers: int, moment_s: Callable[[], float], count: int) -> list[Fault]:
    """Half of them go on from a suspicion to a declared death."""
    plan = list[Fault]()
    for _ in range(count):
        (observer, peer), from_s = rng.sample(range(peers), 2), moment_s()
        to_s = from_s + rng.uniform(0.1, 2.0)
        plan.append(Doubt(observer, peer, from_s, to_s))
        if rng.random() < 0.5:
            later_s = to_s + rng.uniform(0.1, 4.0)
            plan.append(Doubt(observer, peer, to_s, later_s, Health.DEAD))
    return plan


_KINDS: tuple[tuple[_Draw, tuple[int, ...]], ...] = (
    (_losses, (0, 0, 0, 1, 2)),
    (_cuts, (0, 0, 1, 2)),
    (_partitions, (0, 0, 0, 0, 1)),
    (_breaks, (0, 0, 1, 2)),
    (_late, (0, 0, 1, 2)),
    (_delays, (0, 0, 0, 1)),
    (_doubts, (0, 0, 1, 3)),
)
