"""Mean rounds of the product's simulator under a plan of faults, and what must hold in each run."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from random import Random
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from murmuration.algorithms import robust
from murmuration.algorithms.counted import History
from murmuration.algorithms.fragment_state import FragmentState
from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import Merge
from murmuration.algorithms.robust import NORM_LIMIT, aggregate, norm, norm_factors, norm_ratios
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.exchange.view import Group, ShardKey
from murmuration.worker.simulation.means import MeanPeer
from murmuration.worker.simulation.peer import VALUES, Account
from murmuration.worker.simulation.scenario import Crash, FaultPlan, Freeze, Partition, Scenario
from murmuration.worker.simulation.virtual_loop import running
from murmuration.worker.training.mailbox import RoundDone, RoundFailed
from murmuration.worker.transport import Stream
from tests.support.fault_plans import random_faults
from tests.support.faulty_swarm import Cut, Delay, Doubt, FaultySwarm, LatePeer

CONFIG = RoundConfig(quorum=0.5, grace_s=2.0, retry_s=0.25, slack_s=4.0)
STEPS_S = 0.4  # of the inner steps of a round
LONGEST_S = 600.0
FRAME_BYTES = 8  # four frames a shard: a stream that breaks among them is resumed
TICK_S = 0.05
LOST = "lost or counted twice"
_SAME = 1e-4
# Faults for which a round may fail, as it may when a peer comes later than a round lasts.
_EXCUSES = (Crash, Cut, Doubt, Freeze, Partition)


@dataclass(frozen=True)
class Reduction:
    """A mean that a peer was given for a shard."""

    key: ShardKey
    group: Group
    contributors: Group
    last: str
    raw: bytes

    @property
    def answer(self) -> "Answer":
        """The same, as its reducer gives it."""
        return Answer(self.key, wire.group_hash(self.group), self.contributors, self.last, self.raw)


@dataclass(frozen=True)
class Answer:
    """The mean that a reducer gives for a shard of a group's round."""

    key: ShardKey
    group: int
    contributors: Group
    last: str
    raw: bytes


@dataclass(frozen=True)
class Outcome:
    """How a round ended for a peer."""

    peer: str
    round: int
    began_at: float
    ended_at: float
    got: dict[int, Reduction]
    counted: tuple[tuple[int, int], ...]
    ranges: tuple[tuple[int, int], ...]
    tries: int
    reason: str = ""


Lineage = dict[int, dict[int, Reduction]]
"""The reductions that are in a state, by round and shard."""

StateKey = tuple[int, History]
"""A key of a state. Its hash is not enough: two reductions of a shard can have the same bits."""

FIRST: StateKey = (0, ())


def key_of(state: FragmentState) -> StateKey:
    return state.hash, state.history


@dataclass
class Record:
    """The events: `answers` by the reducer that gave them, `values` by peer and begin."""

    answers: dict[tuple[str, ShardKey, int], set[Answer]] = field(
        default_factory=lambda: defaultdict(set)
    )
    outcomes: list[Outcome] = field(default_factory=list)
    values: dict[tuple[str, int], tuple[int, Tensor]] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    learned: dict[str, Tensor] = field(default_factory=dict)  # by inner steps, downhill
    lineages: dict[StateKey, Lineage] = field(default_factory=lambda: {FIRST: {}})

    def answered(self, reducer: str, answer: Answer) -> None:
        self.answers[reducer, answer.key, answer.group].add(answer)


class WatchedStream:
    """A contributor's stream, of whose answer the record is told."""

    def __init__(self, stream: Stream, record: Record, reducer: str) -> None:
        self._stream, self._record, self._reducer = stream, record, reducer
        self._asked: pb.ContributionHeader | None = None
        self._given: pb.ReductionHeader | None = None
        self._raw = b""

    async def receive(self) -> bytes | None:
        message = await self._stream.receive()
        if message is not None and self._asked is None:
            self._asked = pb.ExchangeUp.FromString(message).header
        return message

    async def send(self, message: bytes) -> None:
        down, asked = pb.ExchangeDown.FromString(message), self._asked
        if down.HasField("header"):
            self._given = down.header
        self._raw += down.frame.payload
        given = self._given
        if given is not None and asked is not None and len(self._raw) == given.total_bytes:
            key = ShardKey(asked.fragment, asked.round, asked.shard)
            answer = Answer(key, asked.group, tuple(given.contributors), given.last, self._raw)
            self._record.answered(self._reducer, answer)
        await self._stream.send(message)

    async def done(self) -> None:
        await self._stream.done()

    def cancel(self) -> None:
        self._stream.cancel()


class WatchedMeanPeer(LatePeer, MeanPeer):
    """A peer of the simulator that notes what it does."""

    record: Record
    tries = 0
    _lineage = FIRST
    _before: Tensor | None = None

    def watch(self, record: Record) -> None:
        """Notes all of it there."""
        self.record, reducer = record, self.reducer
        learned, contribute, serve = reducer.learned, reducer.contribute, reducer.serve

        def note_learned(key: ShardKey, reduction: wire.Reduction) -> None:
            self._got[key.shard] = _reduction(key, self._group, reduction)
            learned(key, reduction)

        async def note_contributed(
            header: pb.ContributionHeader, norm: float, payload: wire.Payload
        ) -> object:
            self._opened += 1
            answer = await contribute(header, norm, payload)
            if isinstance(answer, wire.Reduction):
                key = ShardKey(header.fragment, header.round, header.shard)
                self.record.answered(self.me, _reduction(key, self._group, answer).answer)
            return answer

        async def note_served(stream: Stream) -> None:
            await serve(WatchedStream(stream, self.record, self.me))

        reducer.learned = note_learned  # type: ignore[method-assign]
        reducer.contribute = note_contributed  # type: ignore[method-assign,assignment]
        reducer.serve = note_served  # type: ignore[method-assign]

    @property
    def unsent(self) -> Tensor:
        """The part that the replica has learned and its anchor lacks."""
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
        self.tries += 1
        self.record.values[self.me, self.tries] = (round_, values.clone())
        self._began, self._opened = self.now, 0
        self._got: dict[int, Reduction] = {}
        super().begin_round(round_, group, values)

    def open(self, peer: str, method: str) -> Stream:
        self._opened += 1
        return super().open(peer, method)

    def ended(self, result: RoundDone | RoundFailed) -> None:
        ranges = tuple(each.bounds for each in self.context.shards(0, self._group))
        if isinstance(result, RoundDone):
            counted = tuple(each for each in ranges if each not in result.missed)
        else:
            counted = result.counted
        outcome = Outcome(
            self.me,
            result.round,
            self._began,
            self.now,
            dict(self._got),
            counted,
            ranges,
            self._opened,
            result.reason if isinstance(result, RoundFailed) else "",
        )
        self.record.outcomes.append(outcome)
        super().ended(result)

    def commit(self) -> None:
        version = self.optimizer.state.version
        self.record.versions[self.me].append(version)
        key = key_of(self.optimizer.state)
        if key not in self.record.lineages:  # not fetched
            before = self.record.lineages[self._lineage]
            self.record.lineages[key] = {**before, version - 1: dict(self._got)}
        self._lineage = key
        super().commit()


def _reduction(key: ShardKey, group: Group, reduction: wire.Reduction) -> Reduction:
    header, raw = reduction.header, bytes(reduction.payload.raw)
    return Reduction(key, group, tuple(header.contributors), header.last, raw)


@dataclass
class Run:
    """One schedule, played to its end."""

    swarm: FaultySwarm
    peers: list[WatchedMeanPeer]
    record: Record
    unfinished: int
    problems: list[str]

    @property
    def live(self) -> list[WatchedMeanPeer]:
        return [peer for peer in self.peers if peer.number not in self.swarm.dead]

    @property
    def disagrees(self) -> bool:
        """Tells whether two reductions of one shard were applied."""
        return any(len(found) > 1 for found in self.applied().values())

    def applied(self) -> dict[tuple[ShardKey, int], set[Reduction]]:
        """The reductions of each shard that somebody applied, by shard and number of shards."""
        found: dict[tuple[ShardKey, int], set[Reduction]] = defaultdict(set)
        for outcome in self.record.outcomes:
            for shard, reduction in outcome.got.items() if not outcome.reason else ():
                key = ShardKey(0, outcome.round, shard)
                found[key, len(outcome.ranges)].add(reduction)
        return found

    def inputs(self, reduction: Reduction) -> tuple[int, ...] | None:
        """Which try of each contributor went into it: those of that round whose mean it is, bit for
        bit; None if there are none."""
        if reduction not in self._inputs:
            self._inputs[reduction] = self._found(reduction)
        return self._inputs[reduction]

    def __post_init__(self) -> None:
        self._inputs: dict[Reduction, tuple[int, ...] | None] = {}

    def _found(self, reduction: Reduction) -> tuple[int, ...] | None:
        values, shards = self.record.values, len(reduction.group)
        mean = torch.from_numpy(np.frombuffer(reduction.raw, "<f4").copy())
        tries = (
            [n for (name, n), (round_, _) in values.items() if (name, round_) == (peer, of)]
            for of, peer in ((reduction.key.round, peer) for peer in reduction.contributors)
        )
        for chosen in product(*tries):
            given = [values[each][1] for each in zip(reduction.contributors, chosen, strict=True)]
            if torch.equal(mean, _expected_mean(given, shards)):
                return chosen
        return None


def play(
    peers: int,
    faults: FaultPlan,
    seed: int = 0,
    rounds: int = 2,
    codec: str = "fp32",
    merge: Merge = "reset",
    *,
    shuffled: bool = False,
) -> Run:
    """Plays one schedule. One seed gives one run. Where it is `shuffled`, what is ready at one time
    runs in an order that the seed draws."""
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
    shuffle = Random(f"ready {seed}") if shuffled else None
    swarm = FaultySwarm(scenario, faults, CONFIG, shuffle)
    account, record = Account(), Record()
    all_: list[WatchedMeanPeer] = []
    all_ += (WatchedMeanPeer(swarm, number, account) for number in range(peers))
    swarm.endpoints = all_
    for peer in all_:
        peer.watch(record)
    with (
        patch("murmuration.worker.wire.payloads.MAX_FRAME_BYTES", FRAME_BYTES),
        running(swarm.clock) as loop,
    ):
        for peer in all_:
            peer.start()
        swarm.clock.run(lambda: account.unfinished == 0, LONGEST_S)
    return Run(swarm, all_, record, account.unfinished, loop.problems)


def random_run(
    seed: int, codec: str = "fp32", merge: Merge = "reset", *, shuffled: bool = False
) -> Run:
    """2 to 5 peers in two or three rounds with faults of random kinds."""
    rng = Random(f"mean schedule {seed}")
    peers, rounds = rng.randint(2, 5), rng.choice((2, 2, 3))
    faults = random_faults(seed, peers, rounds * 2.0, 1.0)
    return play(peers, faults, seed, rounds, codec, merge, shuffled=shuffled)


def violations(run: Run) -> Iterator[str]:
    """Finds what must not have happened; each begins with its kind."""
    if run.unfinished:
        yield f"never ends: {run.unfinished} peers"
    for problem in run.problems:
        yield f"a task failed: {problem}"
    if named := {peer for each in run.peers for peer in each.context.quarantine.liars}:
        yield f"named as liars: {sorted(named)}"
    yield from _of_answers(run)
    for outcome in run.record.outcomes:
        yield from _of_outcome(run, outcome)
    yield from _of_peers(run)
    if any(run.inputs(each) is None for o in run.record.outcomes for each in o.got.values()):
        return  # of which it is not known what is in them
    if wrong := accounts(run)[LOST]:
        yield f"{LOST}: {wrong} elements"


def _of_answers(run: Run) -> Iterator[str]:
    """A reducer closes a shard once: it gives everybody the same."""
    for (reducer, key, _), answers in run.record.answers.items():
        if len(answers) > 1:
            yield f"closed twice: {key} by {reducer}"
        for answer in answers:
            names = answer.contributors
            if list(names) != sorted(set(names)):
                yield f"double count: {key} of {names}"
            if answer.last not in names:
                yield f"wrong last: {key} of {names}, {answer.last}"


def _expected_mean(contributions: list[Tensor], shards: int) -> Tensor:
    ratios = norm_ratios([robust.norm_of_parts([norm(each)] * shards) for each in contributions])
    return aggregate(contributions, norm_factors(ratios, NORM_LIMIT))


def _of_outcome(run: Run, outcome: Outcome) -> Iterator[str]:
    frozen_s = sum(f.for_s for f in run.swarm.faults if isinstance(f, Freeze))
    round_s = run.peers[0].context.round_s(0)
    if outcome.ended_at - outcome.began_at > round_s + frozen_s + TICK_S + 1e-9:
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
        if outcome.peer in reduction.contributors
    )
    if outcome.counted != expected:
        yield f"wrong count: {outcome.counted} instead of {expected} at {outcome.peer}"
    known = {answer for answers in run.record.answers.values() for answer in answers}
    for shard, reduction in outcome.got.items():
        if reduction.key != ShardKey(0, outcome.round, shard):
            yield f"mixed round applied: {reduction.key} in round {outcome.round}"
        if run.inputs(reduction) is None:
            yield f"wrong mean: {reduction.key} of {reduction.contributors}"
        if reduction.answer not in known:
            yield f"unknown reduction: {reduction.key} at {outcome.peer}"


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
            same = torch.equal(peer.anchor, first.anchor)
            if not (same and torch.equal(peer.momentum, first.momentum)):
                yield f"anchors differ: version {version} of {first.me} and {peer.me}"


def accounts(run: Run) -> Counter[str]:
    """Counts how often each element that a living peer has learned stands in the model.

    An element of a pseudo-gradient is in the anchor, by a reduction, or kept in the local
    parameters. `once` is as it should be. `again`: a reduction has it, of which the peer got no
    word, and it has kept it too. `other reduction`: the peer has applied a reduction that has it,
    and then taken over a state with another one of the shard, which has not."""
    found: Counter[str] = Counter()
    for peer in run.live:
        learned = run.record.learned.get(peer.me)
        if learned is None:
            continue
        lineage = run.record.lineages[key_of(peer.optimizer.state)]
        told: dict[int, dict[int, Reduction]] = defaultdict(dict)
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


def _of_values(got: dict[int, Reduction], shards: int) -> dict[int, Reduction]:
    return {k: got[k * shards // VALUES] for k in range(VALUES) if k * shards // VALUES in got}


def _part(run: Run, peer: str, reduction: Reduction | None, k: int) -> float | None:
    """The part of a peer's element in a reduction; None if it is not among the contributors."""
    if reduction is None or peer not in reduction.contributors:
        return None
    inputs = run.inputs(reduction)
    assert inputs is not None, "it was looked for before"
    number = inputs[reduction.contributors.index(peer)]
    return float(run.record.values[peer, number][1][k])
