"""Whole swarms that say only what is news: they converge in spite of loss, in few bytes."""

import random

import pytest

from murmuration.worker.membership import Digest, Health, MembershipConfig
from tests.unit.worker.membership.simulation import Simulation

CONFIG = MembershipConfig()
PUBLISH_S = 0.5


def train(swarm: Simulation, seconds: float, steps_per_round: int) -> None:
    """Everyone publishes every `PUBLISH_S`, not all at once, with four digests."""
    for _ in range(round(seconds / PUBLISH_S)):
        for name in swarm.names:
            step = swarm.processes[name].machine.me.step + 1
            swarm.update(name, step, digests(step // steps_per_round))
            swarm.run(PUBLISH_S / len(swarm.names))


def digests(version: int) -> tuple[Digest, ...]:
    rng = random.Random(version)
    return tuple(Digest(version, 100, rng.getrandbits(64)) for _ in range(4))


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_everyone_learns_a_death_a_leave_and_a_new_state(loss: float) -> None:
    for seed in range(3):
        swarm = Simulation(8, seed, loss)
        train(swarm, 4, steps_per_round=1000)
        swarm.crash("w0")
        swarm.leave("w1")
        swarm.update("w2", 9, digests(1))
        train(swarm, 5, steps_per_round=1000)
        observers = swarm.names[3:]
        for name in observers:
            assert swarm.member(name, "w1").health is Health.LEFT, f"seed {seed}"
        train(swarm, CONFIG.detection_s(8), steps_per_round=1000)
        for name in observers:
            assert swarm.member(name, "w0").health is Health.DEAD, f"seed {seed}"
        assert {change.peer for change in swarm.deaths()} <= {"w0"}


@pytest.mark.parametrize(("loss", "within_s"), [(0.0, 2.0), (0.1, 6.0)])
def test_everyone_learns_a_new_state_soon(loss: float, within_s: float) -> None:
    for seed in range(5):
        swarm = Simulation(8, seed, loss)
        train(swarm, 4, steps_per_round=1000)
        swarm.update("w2", 9, digests(1))
        swarm.run(within_s)
        for name in swarm.names:
            assert swarm.member(name, "w2").digests == digests(1), f"seed {seed}"


def rates(swarm: Simulation, seconds: float, steps_per_round: int) -> tuple[list[float], ...]:
    """Bytes per second that each peer sends, without signatures and with them."""
    counted = (swarm.sent_bytes, swarm.signed_bytes)
    before = [dict(sent) for sent in counted]
    train(swarm, seconds, steps_per_round)
    return tuple(
        [(sent[name] - was.get(name, 0)) / seconds for name in swarm.names]
        for sent, was in zip(counted, before, strict=True)
    )


def test_fifty_peers_take_a_kilobyte_and_a_half_a_second_each() -> None:
    """At a round every 30 s; with signatures at a round a minute. What it brings is told for some
    seconds, here those at either end; what is between them goes on until the next."""
    swarm = Simulation(50, seed=0, signed=True)
    train(swarm, 6, steps_per_round=44)
    last_told, between, told = (rates(swarm, s, steps_per_round=44) for s in (10, 4, 8))
    for round_s, *each in zip((30, 60), last_told, between, told, strict=True):
        for last, middle, first in zip(*each, strict=True):
            assert (10 * last + (round_s - 18) * middle + 8 * first) / round_s <= 1500
    known = [member.digests for name in swarm.names for member in swarm.members(name)]
    assert known.count(digests(1)) > 0.97 * len(known)
    assert swarm.deaths() == []


@pytest.mark.parametrize(("peers", "seeds"), [(2, 3), (4, 3), (13, 2), (30, 1)])
def test_a_crash_is_noticed_by_all_in_the_documented_time(peers: int, seeds: int) -> None:
    """Of a large swarm too, where not everybody probes all."""
    for seed in range(seeds):
        swarm = Simulation(peers, seed)
        train(swarm, 4, steps_per_round=1000)
        swarm.crash("w0")
        train(swarm, CONFIG.detection_s(peers) + 4 * CONFIG.gossip_s, steps_per_round=1000)
        for observer in swarm.names[1:]:
            assert swarm.member(observer, "w0").health is Health.DEAD, f"seed {seed}"
        assert {change.peer for change in swarm.deaths()} == {"w0"}
