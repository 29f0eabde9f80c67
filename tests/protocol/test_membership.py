"""Live nodes that wait for more peers: who is gone is noticed, and nobody else is declared dead."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from random import Random

import pytest

from murmuration.worker.membership import Health
from murmuration.worker.membership.swim import MembershipConfig
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

CONFIG = MembershipConfig()


class Waiting(Swarm):
    """Peers w00, w01, ..., which say that they are here and no more, and who was held for dead."""

    def __init__(self, loss: float, seed: int) -> None:
        super().__init__(Problem(seed=seed))
        self.network.loss, self.network.rng = loss, Random(seed)
        self.dead: set[tuple[str, str]] = set()

    def seen(self, observer: str) -> dict[str, Health]:
        members = self[observer].node.gossip.members
        return {each.peer: each.health for each in members if each.peer != observer}

    def all_see(self, *peers: str, as_: Health) -> bool:
        """Whether all that live hold each other one of these for dead, alive or gone."""
        return all(
            health is as_
            for observer in self.alive
            for peer, health in self.seen(observer.name).items()
            if peer in peers
        )

    async def passes(self, seconds: float) -> None:
        """Notes on the way who holds whom for dead."""
        until = self.loop.time() + seconds
        while self.loop.time() < until:
            await self.sleep(0.25)
            self.dead |= {
                (peer.name, other)
                for peer in self.alive
                for other, health in self.seen(peer.name).items()
                if health is Health.DEAD
            }


@asynccontextmanager
async def waiting(peers: int, *, loss: float = 0.0, seed: int = 0) -> AsyncIterator[Waiting]:
    async with Waiting(loss, seed) as swarm:
        names = [f"w{index:02}" for index in range(peers)]
        for before, name in zip([None, *names], names, strict=False):
            await swarm.join(name, via=[before] if before else [], min_peers=peers + 1, wait_s=1e9)
        await swarm.passes(3)
        assert all(len(swarm.seen(name)) == peers - 1 for name in names), "a chain of introductions"
        yield swarm


def of(swarm: Swarm) -> list[str]:
    return [peer.name for peer in swarm.alive]


@pytest.mark.parametrize(("peers", "killed"), [(2, 1), (3, 1), (8, 4), (11, 1)])
def test_crashes_are_noticed_by_all_in_the_documented_time(peers: int, killed: int) -> None:
    """Of half a swarm at once, and of a swarm too large for everybody to probe all."""

    async def scenario() -> None:
        async with waiting(peers, loss=0.01) as swarm:
            gone = of(swarm)[:killed]
            for name in gone:
                swarm.kill(name)
            await swarm.passes(CONFIG.detection_s(peers) + 4 * CONFIG.gossip_s)
            assert swarm.all_see(*gone, as_=Health.DEAD)
            assert {peer for _, peer in swarm.dead} == {*gone}

    run(scenario())


@pytest.mark.parametrize("free_s", [(1.0, 5.0), (0.3, 1.5)], ids=["now and then", "mostly"])
@pytest.mark.parametrize("peers", [2, 5])
def test_a_busy_peer_is_not_a_dead_one(peers: int, free_s: tuple[float, float]) -> None:
    """Each holds its GIL for 2 s again and again, and 1 % of the messages are lost."""

    async def scenario() -> None:
        async with waiting(peers, loss=0.01, seed=peers) as swarm:
            rng, now = Random(peers), swarm.loop.time()
            acts: list[tuple[float, str]] = [(now + rng.uniform(*free_s), n) for n in of(swarm)]
            held = set[str]()
            until = now + 30
            while (next_ := min(acts))[0] < until:
                at, name = next_
                await swarm.passes(at - swarm.loop.time())
                (swarm.thaw if name in held else swarm.freeze)(name)
                held ^= {name}
                acts.remove(next_)
                acts.append((at + (2.0 if name in held else rng.uniform(*free_s)), name))
            assert swarm.dead == set()

    run(scenario())


def test_a_frozen_peer_dies_wakes_up_and_lives_again() -> None:
    async def scenario() -> None:
        async with waiting(4, loss=0.01) as swarm:
            swarm.freeze("w00")
            await swarm.passes(30)
            assert swarm.all_see("w00", as_=Health.DEAD)
            swarm.thaw("w00")
            await swarm.passes(20)
            assert swarm.all_see("w00", as_=Health.ALIVE)
            assert {peer for _, peer in swarm.dead} == {"w00"}, "it blames nobody itself"

    run(scenario())


def test_a_heal_of_a_partition_kills_nobody() -> None:
    """Though each side brings the other news of deaths among its own."""

    def across(one: Iterable[str], other: Iterable[str]) -> set[tuple[str, str]]:
        return {pair for a in one for b in other for pair in ((a, b), (b, a))}

    async def scenario() -> None:
        async with waiting(8, loss=0.01) as swarm:
            some, others = of(swarm)[:3], of(swarm)[3:]
            swarm.cut(some, others)
            await swarm.passes(20)
            assert swarm.dead == across(some, others)
            swarm.heal(some, others)
            await swarm.passes(CONFIG.reconnect_s + 5)
            assert swarm.all_see(*of(swarm), as_=Health.ALIVE)
            assert swarm.dead == across(some, others)

    run(scenario())


def test_a_departure_and_a_death_are_known_though_a_tenth_of_all_is_lost() -> None:
    async def scenario() -> None:
        async with waiting(8, loss=0.1) as swarm:
            swarm.kill("w00")
            await swarm.leave("w01")
            swarm.peers.pop("w01")
            await swarm.passes(5)
            assert swarm.all_see("w01", as_=Health.LEFT)
            await swarm.passes(CONFIG.detection_s(8))
            assert swarm.all_see("w00", as_=Health.DEAD)
            assert {peer for _, peer in swarm.dead} == {"w00"}

    run(scenario())
