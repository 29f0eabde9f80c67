"""Whole swarms on a virtual clock: who is gone is noticed, and nobody else is declared dead."""

import random
from dataclasses import replace

import pytest

from murmuration.worker.membership import Health, MembershipConfig
from tests.unit.worker.membership.simulation import Simulation

CONFIG = MembershipConfig()


def test_half_of_a_swarm_crashing_at_once_is_noticed() -> None:
    for seed in range(2):
        swarm = Simulation(8, seed, loss=0.01)
        swarm.run(3)
        for name in ("w0", "w1", "w2", "w3"):
            swarm.crash(name)
        swarm.run(CONFIG.detection_s(8) + 8 * CONFIG.gossip_s)
        assert {change.peer for change in swarm.deaths()} == {"w0", "w1", "w2", "w3"}
        assert len(swarm.views()) == 1


@pytest.mark.parametrize("peers", [2, 3, 5])
def test_no_live_peer_dies_of_one_percent_loss(peers: int) -> None:
    for seed in range(12):
        swarm = Simulation(peers, seed, loss=0.01)
        swarm.run(15)
        assert swarm.deaths() == [], f"seed {seed}"


def keep_busy(swarm: Simulation, until: float, free_s: tuple[float, float]) -> None:
    """Each process by itself holds its GIL for 2 s, is free for a moment, holds it again."""
    rng = random.Random(swarm.seed)
    holds_at = {name: 2 + rng.uniform(*free_s) for name in swarm.names}
    while swarm.now < until:
        name = min(holds_at, key=holds_at.__getitem__)
        swarm.run(holds_at[name] - swarm.now)
        swarm.pause(name, 2.0)
        holds_at[name] = swarm.now + 2.0 + rng.uniform(*free_s)


@pytest.mark.parametrize("peers", [2, 5])
@pytest.mark.parametrize("free_s", [(1.0, 5.0), (0.3, 1.5)], ids=["now and then", "mostly"])
def test_a_busy_trainer_is_not_a_dead_one(peers: int, free_s: tuple[float, float]) -> None:
    """All of them are busy, and 1 % of the messages are lost."""
    for seed in range(6):
        swarm = Simulation(peers, seed, loss=0.01)
        keep_busy(swarm, until=30.0, free_s=free_s)
        assert swarm.deaths() == [], f"seed {seed}"


def test_all_may_be_busy_at_once() -> None:
    for seed in range(8):
        swarm = Simulation(5, seed)
        for _ in range(6):
            swarm.run(1.5)
            for name in swarm.names:
                swarm.pause(name, 2.0)
        swarm.run(5)
        assert swarm.deaths() == [], f"seed {seed}"


def test_a_frozen_peer_dies_wakes_up_and_lives_again() -> None:
    for seed in range(4):
        swarm = Simulation(4, seed, loss=0.01)
        swarm.run(3)
        swarm.pause("w0", 60.0)
        swarm.run(50)
        assert {swarm.health(name, "w0") for name in swarm.names[1:]} == {Health.DEAD}
        swarm.run(20)
        assert swarm.views() == {tuple((name, Health.ALIVE) for name in swarm.names)}
        assert {change.peer for change in swarm.deaths()} == {"w0"}, "it blames nobody itself"


@pytest.mark.parametrize("down_s", [0.5, 3.0, 20.0])
def test_a_crashed_peer_comes_back_as_a_new_life(down_s: float) -> None:
    """Before anybody noticed, while it is suspected, and after its death."""
    for seed in range(4):
        swarm = Simulation(4, seed)
        swarm.run(3)
        swarm.crash("w2")
        swarm.run(down_s)
        swarm.restart("w2", epoch=2, via="w0")
        swarm.run(10)
        assert swarm.views() == {tuple((f"w{i}", Health.ALIVE) for i in range(4))}
        assert {process.machine.me.epoch for process in swarm.processes.values()} == {1, 2}


def test_a_partition_heals() -> None:
    for seed in range(5):
        swarm = Simulation(4, seed)
        swarm.run(3)
        swarm.partition({"w0", "w1"}, {"w2", "w3"})
        swarm.run(60)
        assert swarm.health("w0", "w2") is Health.DEAD
        assert swarm.health("w3", "w1") is Health.DEAD
        swarm.partition()
        swarm.run(CONFIG.reconnect_s + 3)
        assert swarm.views() == {tuple((name, Health.ALIVE) for name in swarm.names)}


@pytest.mark.parametrize("cut", [3, 9])
def test_a_heal_of_a_partition_kills_nobody(cut: int) -> None:
    """Though each side brings the other news of deaths among its own."""
    swarm = Simulation(20, seed=cut, loss=0.01)
    swarm.run(3)
    swarm.partition(set(swarm.names[:cut]), set(swarm.names[cut:]))
    swarm.run(25)
    before = len(swarm.deaths())
    assert before == 2 * cut * (20 - cut)
    swarm.partition()
    swarm.run(25)
    assert len(swarm.deaths()) == before
    assert len(swarm.views()) == 1


def test_fifty_peers_notice_a_crash_in_the_documented_time_and_half_of_them_sooner() -> None:
    swarm = Simulation(50, seed=1, loss=0.01)
    swarm.run(5)
    swarm.crash("w0")
    swarm.run(CONFIG.detection_s(50))
    noticed = sorted(change.at - 5 for change in swarm.deaths() if change.peer == "w0")
    assert len(noticed) == 49
    assert noticed[24] <= 9
    assert {change.peer for change in swarm.deaths()} == {"w0"}


def test_a_liar_that_declares_everybody_dead_is_believed_by_nobody() -> None:
    swarm = Simulation(6, seed=0, loss=0.01)
    swarm.run(3)
    for _ in range(40):
        for victim in ("w1", "w2"):
            for health in (Health.DEAD, Health.LEFT):
                for name in ("w3", "w4"):
                    swarm.say(name, replace(swarm.member(name, victim), health=health), "w5")
        swarm.run(0.25)
    gone = [change for change in swarm.changes if change.health is not Health.ALIVE]
    assert gone == [], "not even for a moment"


def test_a_chain_of_introductions_becomes_one_swarm() -> None:
    swarm = Simulation(1, seed=0)
    for index in range(1, 8):
        swarm.restart(f"w{index}", epoch=1, via=f"w{index - 1}")
    swarm.run(3)
    assert swarm.views() == {tuple((f"w{i}", Health.ALIVE) for i in range(8))}
