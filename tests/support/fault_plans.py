"""Random plans of faults, for schedules of rounds on the virtual loop."""

from collections.abc import Callable
from random import Random

from murmuration.worker.membership import Health
from murmuration.worker.simulation.scenario import STALL_S, Crash, FaultPlan, Freeze, Partition
from tests.support.faulty_swarm import BreakStreams, BrittleStreams, Cut, Delay, Doubt, Fault, Late


def random_faults(seed: int, peers: int, until_s: float, period_s: float) -> FaultPlan:
    """Faults of random kinds; about half of all kinds are absent from a plan. Args: seed: one seed
    gives one plan; peers: 2 or more. At least one of them neither crashes nor freezes; until_s:
    before which every fault begins; period_s: of the rounds; most faults begin soon after."""
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
    drawn, plan = rng.sample(range(peers), min(count, peers - 1)), list[Fault]()
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
