"""Mean rounds of the product's simulator under a plan of faults, and what must hold in each run."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from algorithms.counted import History
from algorithms.fragment_state import FragmentState
from algorithms.link import Link
from algorithms.plan import Merge
from algorithms.robust import NORM_LIMIT, aggregate, norm, norm_factors, norm_ratios
from worker.exchange.allreduce import events
from worker.exchange.allreduce.contributor import Contributor
from worker.exchange.types import RoundConfig, ShardKey
from worker.simulation.allreduce import SimulatedReduction
from worker.simulation.faults import (
    Crash,
    Cut,
    Delay,
    Doubt,
    FaultPlan,
    Freeze,
    Partition,
    random_faults,
)
from worker.simulation.means import MeanPeer
from worker.simulation.peer import Account
from worker.simulation.scenario import Scenario
from worker.simulation.swarm import Group, SimulatedSwarm
from worker.simulation.task import VALUES, Quadratic

CONFIG = RoundConfig(quorum=0.5, grace_s=2.0, retry_s=0.25, slack_s=4.0)
STEPS_S = 0.4  # of the inner steps of a round
LONGEST_S = 600.0
LOST = "lost or counted twice"
_SAME = 1e-4
# Faults for which a round may fail, as it may when a peer comes later than a round lasts.
_EXCUSES = (Crash, Cut, Doubt, Freeze, Partition)


@dataclass(frozen=True)
class Close:
    """A mean that a peer has computed."""

    closer: str
    key: ShardKey
    group: Group
    reduction: SimulatedReduction


@dataclass(frozen=True)
class Outcome:
    """How a round ended for a peer."""

    peer: str
    round: int
    began_at: float
    ended_at: float
    got: dict[int, SimulatedReduction]
    counted: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[int, int], ...]
    tries: int
    reason: str = ""


Lineage = dict[int, dict[int, SimulatedReduction]]
"""The reductions that are in a state, by round and shard."""

StateKey = tuple[int, History]
"""Of a state. Its hash alone is not enough: two reductions of a shard can have the same bits."""

FIRST: StateKey = (0, ())


def key_of(state: FragmentState) -> StateKey:
    return state.hash, state.history


@dataclass
class Record:
    """What happened. `kept` are the means that became their shards'; `values` by peer and begin."""

    closes: list[Close] = field(default_factory=list)
    kept: list[Close] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    values: dict[tuple[str, int], tuple[int, Tensor]] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    learned: dict[str, Tensor] = field(default_factory=dict)  # by inner steps, downhill
    lineages: dict[StateKey, Lineage] = field(default_factory=lambda: {FIRST: {}})


class WatchedMeanPeer(MeanPeer):
    """A peer of the simulator that notes what it does."""

    record: Record
    _lineage = FIRST
    _before: Tensor | None = None

    @property
    def unsent(self) -> Tensor:
        """What the replica has learned, and its anchor lacks."""
        return self.optimizer.state.anchor - self.local

    def compute(self) -> None:
        self._before = self.unsent
        super().compute()

    def begin(self) -> None:
        if self._before is not None:  # else a state has come in between
            learned = self.record.learned.get(self.me, torch.zeros(VALUES))
            self.record.learned[self.me] = learned + (self.unsent - self._before)
            self._before = None
        super().begin()

    def begin_round(self, round_: int, group: Group, values: Tensor) -> None:
        self.record.values[self.me, self.tries + 1] = (round_, values.clone())
        self._began, self._opened = self.now, 0
        super().begin_round(round_, group, values)

    def ended(self, reason: str) -> None:
        machine = self.contributor
        assert isinstance(machine, Contributor), "a round ends once"
        ranges = tuple(each.bounds for each in self.layout.shards(0, self._group))
        outcome = Outcome(
            self.me,
            machine.round,
            self._began,
            self.now,
            dict(self.got),
            machine.counted,
            ranges,
            self._opened,
            reason,
        )
        self.record.outcomes.append(outcome)
        super().ended(reason)

    def commit(self, version: int, contributors: int, group: Group) -> None:
        self.record.versions[self.me].append(version)
        key = key_of(self.optimizer.state)
        if self.contributor is None and key not in self.record.lineages:  # not fetched
            before = self.record.lineages[self._lineage]
            self.record.lineages[key] = {**before, version - 1: dict(self.got)}
        self._lineage = key
        super().commit(version, contributors, group)

    def do_as_contributor(self, action: events.ContributorAction) -> None:
        self._opened += isinstance(action, events.OpenTry)
        super().do_as_contributor(action)

    def do_as_reducer(self, action: events.ReducerAction) -> None:
        super().do_as_reducer(action)
        closes = self.record.closes
        if isinstance(action, events.ComputeShard):
            group = self.reducer.group(action.key)
            assert group is not None, "a shard closes when its group is known"
            closes.append(Close(self.me, action.key, group, self._candidates[action.key]))
        elif isinstance(action, events.KeepReduction):
            kept = self._reductions[action.key]
            self.record.kept += (c for c in closes if c.closer == self.me and c.reduction is kept)


@dataclass
class Run:
    """One schedule, played to its end."""

    swarm: SimulatedSwarm
    peers: list[WatchedMeanPeer]
    record: Record
    unfinished: int

    @property
    def live(self) -> list[WatchedMeanPeer]:
        return [peer for peer in self.peers if peer.number not in self.swarm.dead]

    @property
    def disagrees(self) -> bool:
        """Whether two reductions of one shard were applied."""
        return any(len(found) > 1 for found in self.applied().values())

    def applied(self) -> dict[tuple[ShardKey, int], set[int]]:
        """The reductions of each shard that somebody applied, by shard and number of shards."""
        found: dict[tuple[ShardKey, int], set[int]] = defaultdict(set)
        for outcome in self.record.outcomes:
            for shard, reduction in outcome.got.items() if not outcome.reason else ():
                key = ShardKey(0, outcome.round, shard)
                found[key, len(outcome.ranges)].add(id(reduction))
        return found


def play(
    peers: int,
    faults: FaultPlan,
    seed: int = 0,
    rounds: int = 2,
    codec: str = "fp32",
    merge: Merge = "reset",
) -> Run:
    """Plays one schedule. One seed gives one run."""
    scenario = Scenario(
        preset="diloco",
        peers=peers,
        rounds=rounds,
        inner_steps=1,
        step_s=STEPS_S,
        step_spread=0.5,
        link=Link(rate_mbps=20.0, delay_s=0.05, jitter_s=0.04),
        params=50_000,
        codec=codec,
        merge=merge,
        seed=seed,
    )
    swarm, account, record = SimulatedSwarm(scenario, faults, CONFIG), Account(), Record()
    task = Quadratic(peers, seed)
    all_: list[WatchedMeanPeer] = []
    all_ += (WatchedMeanPeer(swarm, number, task, account, all_) for number in range(peers))
    swarm.endpoints = all_
    for peer in all_:
        peer.record = record
    for peer in all_:
        peer.start()
    swarm.clock.run(lambda: account.unfinished == 0, LONGEST_S)
    return Run(swarm, all_, record, account.unfinished)


def random_run(seed: int, codec: str = "fp32", merge: Merge = "reset") -> Run:
    """2 to 5 peers in two or three rounds with faults of random kinds."""
    rng = Random(f"mean schedule {seed}")
    peers, rounds = rng.randint(2, 5), rng.choice((2, 2, 3))
    until_s = rounds * 2.0
    return play(peers, random_faults(seed, peers, until_s, 1.0), seed, rounds, codec, merge)


# ------------------------------------------------------------------------------------- invariants


def violations(run: Run) -> Iterator[str]:
    """What must not have happened; each begins with its kind."""
    if run.unfinished:
        yield f"never ends: {run.unfinished} peers"
    for close in run.record.closes:
        yield from _of_close(run, close)
    for outcome in run.record.outcomes:
        yield from _of_outcome(run, outcome)
    yield from _of_peers(run)
    yield from _of_closers(run)
    if wrong := accounts(run)[LOST]:
        yield f"{LOST}: {wrong} elements"


def _of_close(run: Run, close: Close) -> Iterator[str]:
    names, inputs = close.reduction.header.contributors, close.reduction.inputs
    if list(names) != sorted(set(names)):
        yield f"double count: {close.key} of {names}"
    given = [run.record.values[each] for each in zip(names, inputs, strict=True)]
    if {round_ for round_, _ in given} != {close.key.round}:
        yield f"mixed rounds: {close.key} has {[round_ for round_, _ in given]}"
    elif not torch.equal(close.reduction.mean, _expected_mean([values for _, values in given])):
        yield f"wrong mean: {close.key} of {names}"
    if close.reduction.header.last not in names:
        yield f"wrong last: {close.key} of {names}, {close.reduction.header.last}"


def _expected_mean(contributions: list[Tensor]) -> Tensor:
    ratios = norm_ratios([norm(each) for each in contributions])
    return aggregate(contributions, norm_factors(ratios, NORM_LIMIT))


def _of_outcome(run: Run, outcome: Outcome) -> Iterator[str]:
    frozen_s = sum(f.for_s for f in run.swarm.faults if isinstance(f, Freeze))
    round_s = run.peers[0].layout.round_s(0)
    if outcome.ended_at - outcome.began_at > round_s + frozen_s + 1e-9:
        yield f"late end: round {outcome.round} of {outcome.peer}"
    late_s = max(run.swarm.late_s(number, 0.0, math.inf) for number in range(len(run.peers)))
    # A late peer has the round before first; each is there and back.
    late_s += sum(4 * f.by_s for f in run.swarm.faults if isinstance(f, Delay))
    excused = any(isinstance(f, _EXCUSES) for f in run.swarm.faults)
    if outcome.reason and not excused and late_s <= round_s:
        yield f"failed without a reason: {outcome.reason} at {outcome.peer}"
    if outcome.tries > len(outcome.ranges) * 4 * round_s / CONFIG.retry_s:
        yield f"endless redirects: {outcome.tries} tries of {outcome.peer}"
    shards = len(outcome.ranges)
    if not outcome.reason and sorted(outcome.got) != list(range(shards)):
        yield f"half applied: {sorted(outcome.got)} of {shards} by {outcome.peer}"
    expected = tuple(
        outcome.ranges[shard]
        for shard, reduction in sorted(outcome.got.items())
        if outcome.peer in reduction.header.contributors
    )
    if outcome.counted != expected:
        yield f"wrong count: {outcome.counted} instead of {expected} at {outcome.peer}"
    of_round = {close.reduction: close.key.round for close in run.record.kept}
    made_for = {of_round.get(reduction) for reduction in outcome.got.values()}
    if outcome.got and made_for != {outcome.round}:
        yield f"mixed round applied: {made_for} in round {outcome.round} of {outcome.peer}"


def _of_peers(run: Run) -> Iterator[str]:
    """A round is applied once; the same version is the same anchor, bit for bit."""
    for peer in run.peers:
        ended = [o.round for o in run.record.outcomes if o.peer == peer.me and not o.reason]
        if ended != sorted(set(ended)):
            yield f"double apply: rounds {ended} of {peer.me}"
        versions = run.record.versions[peer.me]
        if versions != sorted(versions):
            yield f"version falls: {versions} of {peer.me}"
    if run.disagrees:
        return
    by_version: dict[int, list[WatchedMeanPeer]] = defaultdict(list)
    for peer in run.live:
        by_version[peer.version].append(peer)
    for version, peers in by_version.items():
        first = peers[0]
        for peer in peers[1:]:
            if not (
                torch.equal(peer.anchor, first.anchor)
                and torch.equal(peer.momentum, first.momentum)
            ):
                yield f"anchors differ: version {version} of {first.me} and {peer.me}"


def _of_closers(run: Run) -> Iterator[str]:
    """A peer closes a shard once, and whatever was applied somebody has closed."""
    kept = run.record.kept
    once = {(close.closer, close.key, close.group) for close in kept}
    if len(once) < len(kept):
        yield f"closed twice: {[(c.closer, c.key) for c in kept]}"
    known = {id(close.reduction) for close in kept}
    for key, found in run.applied().items():
        if not found <= known:
            yield f"unknown reduction: {key}"


# --------------------------------------------------------------------- what became of each element


def accounts(run: Run) -> Counter[str]:
    """Of every element that each living peer has learned: how often it stands in the model.

    An element of a pseudo-gradient is in the anchor, by a reduction, or kept in the local
    parameters. `once` is as it should be. `again`: a reduction has it, of which the peer got no
    word, and it has kept it too. `other reduction`: the peer has applied a reduction that has it,
    and then taken over a state with another one of the shard, which has not.
    """
    found: Counter[str] = Counter()
    for peer in run.live:
        learned = run.record.learned.get(peer.me)
        if learned is None:
            continue
        lineage = run.record.lineages[key_of(peer.optimizer.state)]
        told: dict[int, dict[int, SimulatedReduction]] = defaultdict(dict)
        for outcome in run.record.outcomes:
            if outcome.peer == peer.me and not outcome.reason:
                told[outcome.round] |= _of_values(outcome.got, len(outcome.ranges))
        held = {round_: _of_values(got, len(got)) for round_, got in lineage.items()}
        for k in range(VALUES):
            sent = again = other = 0.0
            for round_ in {*held, *told}:
                there = _part(run, peer.me, held.get(round_, {}).get(k), k)
                said = _part(run, peer.me, told.get(round_, {}).get(k), k)
                sent += there or 0.0
                if there is not None and said is None:
                    again += there
                if there is None and said is not None and round_ in held:
                    other += said
            wrong = float(peer.unsent[k] - learned[k]) + sent
            if abs(wrong) <= _SAME:
                found["once"] += 1
            elif abs(wrong + other) <= _SAME:
                found["other reduction"] += 1
            elif abs(wrong - again) <= _SAME:
                found["again"] += 1
            else:
                found[LOST] += 1
    return found


def _of_values(got: dict[int, SimulatedReduction], shards: int) -> dict[int, SimulatedReduction]:
    """By value, the reduction that it is in."""
    return {k: got[k * shards // VALUES] for k in range(VALUES) if k * shards // VALUES in got}


def _part(run: Run, peer: str, reduction: SimulatedReduction | None, k: int) -> float | None:
    """What a reduction has of a peer's element; None if it is not among the contributors."""
    if reduction is None or peer not in reduction.header.contributors:
        return None
    number = reduction.inputs[reduction.header.contributors.index(peer)]
    return float(run.record.values[peer, number][1][k])
