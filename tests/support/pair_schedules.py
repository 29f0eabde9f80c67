"""Random fault schedules of pair rounds in the product's simulator, and what must hold in each.

Small swarms hold a few rounds while a plan of faults is carried out. One seed gives one schedule.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from murmuration.algorithms.link import Link
from murmuration.worker.exchange.pairwise.pair_rounds import Pairs
from murmuration.worker.exchange.pairwise.round import CONTRIBUTION, PARTS, OwnPart, PairRound
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.simulation.network import SimulatedStream
from murmuration.worker.simulation.pairs import PairPeer
from murmuration.worker.simulation.peer import Account
from murmuration.worker.simulation.scenario import Crash, FaultPlan, Freeze, Partition, Scenario
from murmuration.worker.simulation.virtual_loop import running
from murmuration.worker.training.mailbox import RoundDone, RoundFailed
from tests.support.fault_plans import random_faults
from tests.support.faulty_swarm import (
    BreakStreams,
    BrittleStreams,
    Cut,
    Delay,
    Doubt,
    Fault,
    FaultySwarm,
    Late,
    LatePeer,
)

CONFIG = RoundConfig(floor_mbps=20.0, slack_s=4.0)
NEWS_S = 1.5  # in which all views are right again after what they noticed is over
EPSILON_S = 1e-5  # timers are a microsecond late
# What the two generals cannot help: a word lost with its stream, a peer that died or froze with it.
EXCUSES = frozenset({"broken", "cut", "dead", "frozen"})


@dataclass(eq=False)
class Attendance:
    """One peer's part in one round."""

    peer: str
    held: PairRound
    began_at: float
    ended_at: float | None = None
    prepared_at: float | None = None
    failed: str = ""
    waiting_for: tuple[str, ...] = ()
    used: dict[tuple[str, int], int] = field(default_factory=dict)  # by peer and part, the hash

    @property
    def round(self) -> int:
        return self.held.round

    @property
    def group(self) -> tuple[str, ...]:
        return self.held.group

    @property
    def applied(self) -> bool:
        return self.ended_at is not None and not self.failed


class WatchedPairs(Pairs):
    """Tells of its rounds whenever something has changed."""

    note: Callable[[PairRound], None]

    def step(self, round_: PairRound) -> None:
        self.note(round_)  # it may end at once
        super().step(round_)
        self.note(round_)

    def _lay(self, fragment: int, number: int, own: dict[int, OwnPart]) -> PairRound:
        round_ = super()._lay(fragment, number, own)
        self.note(round_)
        return round_


class WatchedPeer(LatePeer, PairPeer):
    """Keeps the books of its rounds; the machine may be a spoiled one."""

    kind: type[WatchedPairs] = WatchedPairs

    def __init__(self, world: "PairWorld", number: int) -> None:
        super().__init__(world.swarm, number, world.account)
        self.world, self.attended = world, list[Attendance]()
        self.laid: dict[int, set[tuple[str, ...]]] = defaultdict(set)  # the groups of each round
        self.pairs.__class__ = self.kind
        self.pairs.note = self._note

    def _note(self, held: PairRound) -> None:
        self.laid[held.round].add(held.group)
        if not held.begun:
            return
        if not any(part.held is held for part in self.attended):
            self.attended.append(Attendance(self.me, held, held.began))
        for part in self.attended:
            if part.held is held and held.complete and part.prepared_at is None:
                part.prepared_at = self.now

    def finished(self, result: RoundDone | RoundFailed) -> None:
        part = next(part for part in reversed(self.attended) if part.round == result.round)
        assert part.ended_at is None, "a round ends once"
        part.ended_at = self.now
        if isinstance(result, RoundFailed):
            part.failed, part.waiting_for = result.reason, result.waiting_for
        else:
            part.used = {
                (peer, index): each.payload.hash
                for index in PARTS
                for peer, each in zip(part.group, part.held.parts(index), strict=True)
            }
        super().finished(result)

    def broken(self, stream: SimulatedStream) -> None:
        ends = frozenset((self.me, self.swarm.names[stream.other(self.number)]))
        self.world.breaks.append((ends, self.now))
        super().broken(stream)


class PairWorld:
    """One schedule. `play` runs it; `violations` says what went wrong."""

    def __init__(
        self,
        scenario: Scenario,
        faults: FaultPlan,
        kind: type[WatchedPairs] = WatchedPairs,
        *,
        shuffled: bool = False,
    ) -> None:
        self.faults = faults
        shuffle = Random(f"ready {scenario.seed}") if shuffled else None
        self.swarm = FaultySwarm(scenario, faults, CONFIG, shuffle)
        self.account = Account()
        self.breaks: list[tuple[frozenset[str], float]] = []
        self.problems: list[str] = []
        peer = type("WatchedPeer", (WatchedPeer,), {"kind": kind})
        self.peers: list[WatchedPeer] = []
        self.peers += (peer(self, number) for number in range(scenario.peers))
        self.swarm.endpoints = self.peers

    def play(self) -> "PairWorld":
        with running(self.swarm.clock) as loop:
            for peer in self.peers:
                peer.start()
            self.swarm.clock.run(lambda: self.account.unfinished == 0, 2000.0)
        self.problems = loop.problems
        return self

    @property
    def attendances(self) -> list[Attendance]:
        return [part for peer in self.peers for part in peer.attended]

    def gatherings(self) -> Iterator[tuple[tuple[str, ...], list[Attendance]]]:
        """Those that held a round as the same group."""
        found: dict[tuple[int, tuple[str, ...]], list[Attendance]] = defaultdict(list)
        for part in self.attendances:
            found[part.round, part.group].append(part)
        for (_, group), parts in found.items():
            yield group, parts

    def numbers(self, group: tuple[str, ...]) -> set[int]:
        return {int(name[1:]) for name in group}


def random_world(seed: int, kind: type[WatchedPairs] = WatchedPairs, **options: bool) -> PairWorld:
    """2 to 6 peers in groups of 2 to 4, 1 to 3 rounds, and faults of random kinds."""
    rng = Random(f"pair world {seed}")
    scenario = Scenario(
        peers=rng.randint(2, 6),
        rounds=rng.randint(1, 3),
        group_size=rng.choice((2, 2, 3, 4)),
        inner_steps=rng.choice((10, 40)),
        step_spread=0.1,
        link=Link(rate_mbps=20.0, delay_s=0.05, jitter_s=rng.choice((0.0, 0.04))),
        params=rng.choice((1_000, 1_000_000)),
        seed=seed,
    )
    period_s = scenario.inner_steps * scenario.step_s + 1.0
    faults = random_faults(seed, scenario.peers, scenario.rounds * period_s, period_s)
    return PairWorld(scenario, faults, kind, **options)


def violations(world: PairWorld) -> list[str]:
    """Everything that must not be, in words; each starts with the name of its check."""
    checks = (raised, twice, mixed, unprepared, overdue, delayed, unfinished, torn)
    return [f"{check.__name__}: {text}" for check in checks for text in check(world)]


def raised(world: PairWorld) -> Iterator[str]:
    """No task ends with an exception."""
    yield from world.problems


def twice(world: PairWorld) -> Iterator[str]:
    """No round is applied again, or after a later one."""
    for peer in world.peers:
        applied = [part.round for part in peer.attended if part.applied]
        if applied != sorted(set(applied)):
            yield f"{peer.me} applies {applied}"
    for (round_, group), times in world.account.applied.items():
        if times > len(group):
            yield f"round {round_} of {group} is applied {times} times"


def mixed(world: PairWorld) -> Iterator[str]:
    """Finds what is applied but is not both parts of all of the group, of this very round."""
    given: dict[tuple[str, int, tuple[str, ...]], set[tuple[int, int]]] = defaultdict(set)
    for part in world.attendances:
        own = {each: own.payload.hash for each, own in part.held.own.items()}
        given[part.peer, part.round, part.group].add((own[0], own[CONTRIBUTION]))
    for part in world.attendances:
        for peer in part.group if part.applied else ():
            hashes = part.used.get((peer, 0)), part.used.get((peer, CONTRIBUTION))
            if hashes not in given[peer, part.round, part.group]:
                yield f"{part.peer} applies {hashes} of {peer} in round {part.round}"


def unprepared(world: PairWorld) -> Iterator[str]:
    """Nobody applies before all others of its group have said that they hold everything."""
    prepared = {(part.peer, part.round, part.group): part.prepared_at for part in world.attendances}
    for part in world.attendances:
        for peer in part.group if part.applied else ():
            at = prepared.get((peer, part.round, part.group))
            if peer != part.peer and (at is None or at > (part.ended_at or 0.0)):
                yield f"{part.peer} applies round {part.round} before {peer} holds everything"


def overdue(world: PairWorld) -> Iterator[str]:
    """A round ends by its limit for everyone that is there to see it."""
    for part in world.attendances:
        held = part.held
        limit_s = held.deadline
        if part.prepared_at is not None:
            round_s = held.deadline - part.began_at
            limit_s = max(held.patience_until, part.prepared_at) + round_s + CONFIG.retry_s
        gone = any(
            isinstance(fault, Crash | Freeze)
            and world.swarm.names[fault.peer] == part.peer
            and fault.at_s <= limit_s
            and (isinstance(fault, Crash) or part.began_at <= fault.at_s + fault.for_s)
            for fault in world.faults
        )
        if not gone and (part.ended_at is None or part.ended_at > limit_s + EPSILON_S):
            yield f"{part.peer} is in round {part.round} until {part.ended_at}, not {limit_s}"


def delayed(world: PairWorld) -> Iterator[str]:
    """A group that no fault touches takes no longer than its own exchange, whatever others do."""
    for group, parts in undisturbed(world):
        limit_s = max(part.began_at for part in parts) + exchange_s(world, group)
        for part in parts:
            if not part.applied or (part.ended_at or 0.0) > limit_s:
                text = part.failed or f"{part.ended_at}, not {limit_s}"
                yield f"{part.peer} in round {part.round} of {group}: {text}"


def undisturbed(world: PairWorld) -> Iterator[tuple[tuple[str, ...], list[Attendance]]]:
    """Groups whose peers come to a round soon one after the other, and that no fault touches. Who
    has drawn another group before, as it took somebody for dead, may have sent partners away."""
    for group, parts in world.gatherings():
        if len(parts) < len(group) or len(group) < 2:
            continue
        draws = [world.peers[number].laid[parts[0].round] for number in world.numbers(group)]
        if any(drawn != {group} for drawn in draws):
            continue
        first, last = min(p.held.laid for p in parts), max(p.began_at for p in parts)
        if last - min(p.began_at for p in parts) > CONFIG.patience_s - 1.0:
            continue
        end_s, members = last + exchange_s(world, group), world.numbers(group)
        if any(is_cut_off(world, peer, first, end_s) for peer in members):
            continue
        if not any(touches(f, members, first, end_s) for f in world.faults):
            yield group, parts


def is_cut_off(world: PairWorld, peer: int, start_s: float, end_s: float) -> bool:
    """Says if most others that train may not reach it in this time: then no round waits for it
    (docs/adr/0014). A peer that stands still or has ended the run may have no say in that."""
    crashed = {f.peer for f in world.faults if isinstance(f, Crash) and f.at_s <= end_s}
    others = {number for number in range(len(world.peers)) if number != peer} - crashed
    cut = {
        fault.one + fault.other - peer
        for fault in world.faults
        if isinstance(fault, Cut)
        and peer in (fault.one, fault.other)
        and fault.from_s <= end_s
        and start_s <= fault.to_s + 10.0 + NEWS_S
    }
    silent = {f.peer for f in world.faults if isinstance(f, Freeze) and f.at_s <= end_s}
    silent |= {number for number in others if has_ended(world, number, end_s)}
    return 2 * len(cut & others) > len(others - silent)


def has_ended(world: PairWorld, peer: int, at_s: float) -> bool:
    """Tells whether the peer's last round is over at this time."""
    last = world.swarm.scenario.rounds - 1
    ends = (part.ended_at for part in world.peers[peer].attended if part.round == last)
    return any(end is not None and end <= at_s for end in ends)


def exchange_s(world: PairWorld, group: tuple[str, ...]) -> float:
    """The time of a round that nothing disturbs, once the last has come. Anchors and contributions
    go to all, while links may be busy with the next round's anchors."""
    scenario = world.swarm.scenario
    payload_s = 4 * scenario.params * 8 / (scenario.link.rate_mbps * 1e6)
    return 4 * payload_s * (len(group) - 1) + 8 * (scenario.link.delay_s + scenario.link.jitter_s)


def touches(fault: Fault, group: set[int], start_s: float, end_s: float) -> bool:
    """Tells whether a fault may disturb a group that meets in this time."""
    match fault:
        case Crash(peer, at_s):
            peers, from_s, to_s = {peer}, at_s, float("inf")
        case Freeze(peer, at_s, for_s):
            peers, from_s, to_s = {peer}, at_s, at_s + for_s + NEWS_S
        case Late():
            return False
        case BreakStreams(peer, at_s):
            peers, from_s, to_s = {peer}, at_s, at_s + 1.0
        case BrittleStreams(_, from_s, to_s):
            peers, to_s = set(), to_s + 60.0  # one that was opened then may break later
        case Partition(half, from_s, to_s):
            if not (group & half and group - half):
                return False
            peers, to_s = set(), to_s + 10.0 + NEWS_S
        case Cut(one, other, from_s, to_s) | Delay(one, other, from_s, to_s):
            peers, to_s = {one, other}, to_s + 10.0 + NEWS_S
        case Doubt(one, other, from_s, to_s):
            peers, to_s = {one, other}, to_s + 10.0 + NEWS_S
    return peers <= group and from_s <= end_s and start_s <= to_s


def unfinished(world: PairWorld) -> Iterator[str]:
    """Everyone that lives comes to the end."""
    for peer in world.peers:
        if not peer.done:
            yield f"{peer.me} does not come to the end"


def torn(world: PairWorld) -> Iterator[str]:
    """Who gives up what another applies has an excuse."""
    for part, cause in left_behind(world):
        if cause not in EXCUSES:
            yield f"{part.peer} gives up round {part.round} that others apply: {cause}"


def left_behind(world: PairWorld) -> list[tuple[Attendance, str]]:
    """Everyone that gave up a round which somebody of its group has applied, and why."""
    return [
        (part, _cause(world, part))
        for _, parts in world.gatherings()
        for part in parts
        if part.failed and any(other.applied for other in parts)
    ]


def _cause(world: PairWorld, part: Attendance) -> str:
    """Why this peer had not heard that its partners hold everything."""
    assert part.ended_at is not None
    group, causes = world.numbers(part.group), {Crash: "dead", Freeze: "frozen"}
    touch = [f for f in world.faults if touches(f, group, part.held.laid, part.ended_at)]
    for fault in touch:
        if isinstance(fault, Crash | Freeze):
            return causes[type(fault)]
    for peer in part.waiting_for:
        ends = frozenset((part.peer, peer))
        if any(e == ends and part.held.laid <= t <= part.ended_at for e, t in world.breaks):
            return "broken"
    return "cut" if any(isinstance(fault, Cut | Partition) for fault in touch) else part.failed


def endings(world: PairWorld) -> Counter[str]:
    """How the rounds of a schedule ended, each counted once for every peer in it."""
    counts: Counter[str] = Counter()
    for part in world.attendances:
        if part.ended_at is None:
            counts["cut off by death"] += 1
        elif len(part.group) == 1:
            counts["alone"] += 1
        else:
            counts["applied" if part.applied else "failed"] += 1
    return counts
