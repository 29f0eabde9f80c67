"""Thousands of random schedules of two rounds among 2 to 5 peers: what must hold in every one.

With a crash, 1 to 2 % of the schedules end with two reductions of one shard applied by different
survivors; with four wrong suspicions in three seconds 12 %, with wrongly declared deaths a third.
Anti-entropy repairs those (see `test_crashes`); anything else would be a defect.
"""

from collections import defaultdict

import pytest

from tests.protocol.schedule_parts import Faults, Outcome, Reduction
from tests.protocol.schedules import ROUND_S, TICK_S, World
from worker.exchange.types import ShardKey

SCHEDULES = 250
PEERS = (2, 3, 4, 5)
ROUNDS = 2


def play(faults: Faults, seed: int) -> World:
    """Plays one schedule and checks what holds whatever happened in it."""
    world = World(PEERS[seed % len(PEERS)], seed, faults, ROUNDS)
    world.play()
    for close in world.closes:
        check_close(close)
    for outcome in world.outcomes:
        check_outcome(outcome)
    closers = closers_of(world)
    for key, reductions in applied(world).items():
        assert len(reductions) <= len(closers[key])
    for peer in world.peers.values():
        ended = [o.round for o in world.outcomes if o.peer == peer.name and o.succeeded]
        assert ended == sorted(set(ended)), "a round was applied twice"
    return world


def check_close(close: Reduction) -> None:
    """Sorted, each peer once, its own value, and of no other round or shard."""
    assert list(close.contributors) == sorted(set(close.contributors))
    assert [value.peer for value in close.values] == list(close.contributors)
    assert {value.key for value in close.values} == {close.key}


def check_outcome(outcome: Outcome) -> None:
    """It ends by its deadline; who succeeded has one reduction of each shard of that round."""
    assert outcome.ended_at - outcome.began_at <= ROUND_S + TICK_S
    if outcome.succeeded:
        assert sorted(outcome.reductions) == list(range(len(outcome.reductions)))
        assert {r.key.round for r in outcome.reductions.values()} == {outcome.round}
        assert {r.key.shard for r in outcome.reductions.values()} == set(outcome.reductions)


def closers_of(world: World) -> dict[ShardKey, list[str]]:
    """Who computed each shard; a peer never computes one twice."""
    closers = defaultdict(list)
    for close in world.closes:
        assert close.closer not in closers[close.key], "one peer closed a shard twice"
        closers[close.key].append(close.closer)
    return closers


def applied(world: World) -> dict[ShardKey, set[Reduction]]:
    """The reductions of each shard that somebody applied."""
    found = defaultdict(set)
    for outcome in world.outcomes:
        if outcome.succeeded:
            for reduction in outcome.reductions.values():
                found[reduction.key].add(reduction)
    return found


def disagrees(world: World) -> bool:
    return any(len(reductions) > 1 for reductions in applied(world).values())


@pytest.mark.parametrize("break_rate", [0.0, 0.3], ids=["undisturbed", "streams break"])
def test_everyone_counts_everyone(break_rate: float) -> None:
    for seed in range(SCHEDULES):
        world = play(Faults(break_rate=break_rate), seed)
        assert len(world.outcomes) == ROUNDS * len(world.peers)
        assert all(outcome.succeeded for outcome in world.outcomes)
        for close in world.closes:
            assert len(close.contributors) == len(world.peers)
        assert all(len(closers) == 1 for closers in closers_of(world).values())


def test_a_straggler_is_late_and_takes_the_answer() -> None:
    """Later than the grace: the others close without it, and it applies what they applied."""
    for seed in range(SCHEDULES):
        world = play(Faults(straggler=True), seed)
        assert all(outcome.succeeded for outcome in world.outcomes)
        assert not disagrees(world)


@pytest.mark.parametrize("break_rate", [0.0, 0.2], ids=["links hold", "streams break"])
def test_survivors_of_a_crash_finish(break_rate: float) -> None:
    disagreements = 0
    for seed in range(SCHEDULES):
        world = play(Faults(crash=True, break_rate=break_rate), seed)
        for peer in world.peers.values():
            assert peer.crashed or peer.done
        disagreements += disagrees(world)
        if not disagrees(world):
            assert all(outcome.succeeded for outcome in world.outcomes)
    assert disagreements <= 0.03 * SCHEDULES


def test_wrong_suspicions_stop_nobody() -> None:
    disagreements = 0
    for seed in range(SCHEDULES):
        world = play(Faults(suspicions=4), seed)
        assert all(peer.done for peer in world.peers.values())
        disagreements += disagrees(world)
    assert disagreements <= 0.2 * SCHEDULES


def test_wrongly_declared_deaths_stop_nobody() -> None:
    disagreements = failures = outcomes = 0
    for seed in range(SCHEDULES):
        world = play(Faults(suspicions=4, false_deaths=0.5), seed)
        assert all(peer.done for peer in world.peers.values())
        disagreements += disagrees(world)
        failures += sum(not outcome.succeeded for outcome in world.outcomes)
        outcomes += len(world.outcomes)
    assert disagreements <= 0.5 * SCHEDULES
    assert failures <= 0.02 * outcomes


def test_everything_at_once() -> None:
    faults = Faults(crash=True, break_rate=0.2, suspicions=4, false_deaths=0.3, straggler=True)
    for seed in range(SCHEDULES):
        world = play(faults, seed)
        assert all(peer.crashed or peer.done for peer in world.peers.values())


def test_a_seed_is_a_schedule() -> None:
    faults = Faults(crash=True, break_rate=0.2, suspicions=2)
    for seed in (5, 6, 7):
        one, other = play(faults, seed), play(faults, seed)
        assert one.outcomes == other.outcomes
        assert one.closes == other.closes
        assert one.now == other.now
