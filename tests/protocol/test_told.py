"""The peers tell of themselves, in their status and by gossip; who is gone is noticed, and nobody
else is declared dead."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from random import Random

import pytest
import torch

from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership import Health, Phase, swim
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.training.mailbox import Begin, TrainingEvent
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Peer, Swarm
from tests.support.liar import contributes_nothing

PROBLEM = Problem(layers=(31, 17), plan=replace(PRESETS["diloco"], inner_steps=5), steps=15)


async def test_a_round_that_takes_far_longer_than_the_last_says_for_whom():
    step_s = dict.fromkeys("abc", 0.5)
    async with Swarm(replace(steady(20), step_s=step_s), "abc", at=2) as swarm:
        assert swarm["a"].of_kind("stalled") == []
        step_s["c"] = 3.0
        await swarm.until(lambda: swarm["a"].versions >= (3,), 30)
        step_s["c"] = 0.5
        await swarm.finished()
        for name in "ab":
            told = swarm[name].of_kind("stalled")[0]
            assert (told["round"], told["waiting_for"]) == (2, ["c"])
            assert float(str(told["seconds"])) > 2 * float(str(told["last_s"]))


async def test_a_member_that_talks_much_is_named_all_the_same():
    """Each of its answers refuses something, in other words each time."""
    async with Swarm(steady(100_000), "abcd", at=2) as swarm:
        node, numbers = swarm["d"].node, count()
        honest = node.server.calls["Control/Gossip"]

        async def answer(request: bytes) -> bytes:
            said = pb.GossipMessage.FromString(await honest(request))
            said.refused.extend(f"word {next(numbers)}" for _ in range(8))
            return said.SerializeToString()

        node.server.calls["Control/Gossip"] = answer
        await swarm.sleep(10)
        contributes_nothing(node)
        await swarm.until(lambda: all(swarm[n].warned("d says that it trains") for n in "abc"), 60)


async def test_an_encoding_holds_up_nothing_else_that_training_says():
    """Neither samples nor stages wait for it; rounds begin in the order that they are given in."""
    async with Swarm(PROBLEM) as swarm:
        await swarm.join("a", via=[], min_peers=2)
        await swarm.sleep(1.0)
        node, goes_on, begun = swarm["a"].node, asyncio.Event(), list[int]()

        async def encode(begin: Begin) -> None:
            begun.append(begin.round)
            await goes_on.wait()

        node._own_rounds.begin = encode  # type: ignore[method-assign]
        for number in range(3):
            node.deliver(Begin(0, number, ("a",), torch.zeros(1)))
            node.deliver(TrainingEvent({"event": "progress", "state": str(number)}))
        async with asyncio.timeout(1.0):
            await node.settled()
        assert [event["state"] for event in swarm["a"].of_kind("progress")][-3:] == [*"012"]
        assert begun == [0]
        goes_on.set()
        await swarm.sleep(0.1)
        assert begun == [0, 1, 2]


async def test_four_peers_in_training_gossip_little():
    async with Swarm(steady(600), "abcd", at=2) as swarm:

        def sent(name: str) -> int:
            return swarm[name].transport.traffic.sent["Control/Gossip"]

        before, began_s = {name: sent(name) for name in "abcd"}, swarm.loop.time()
        await swarm.until(lambda: swarm["a"].versions >= (8,), 120)
        took_s = swarm.loop.time() - began_s
        assert took_s > 10
        for name in "abcd":
            assert sent(name) - before[name] < 600 * took_s


def known(peer: Peer) -> tuple[tuple[object, ...], ...]:
    members = peer.node.gossip.members
    return tuple((c.peer, c.start_ms, c.health, c.phase, c.digests) for c in members)


async def test_all_know_the_same_when_everyone_is_done():
    """Nothing changes any more, so nothing but gossip itself can still bring what was missed."""
    async with Swarm(steady(30), "abcd", at=2) as swarm:
        swarm.kill("d")
        await swarm.restart("d", via=["a"])
        await swarm.finished()
        await swarm.until(lambda: len(set(map(known, swarm.alive))) == 1, 5)
        assert {member.phase for member in swarm["a"].node.gossip.members} == {Phase.DONE}


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
        """Says if all that live hold each other one of these for dead, alive or gone."""
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


@pytest.mark.parametrize(("peers", "killed", "probed"), [(2, 1, 12), (8, 4, 12), (7, 1, 2)])
async def test_crashes_are_noticed_by_all_in_the_documented_time(
    peers, killed, probed, monkeypatch
):
    """A half of a swarm dies at once, or the swarm is too large for all to probe all."""
    monkeypatch.setattr(swim, "_PROBE_ALL_OF", probed)
    monkeypatch.setattr(swim, "_PROBE_OF_MORE", 2)
    async with waiting(peers, loss=0.01) as swarm:
        gone = of(swarm)[:killed]
        for name in gone:
            swarm.kill(name)
        await swarm.passes(CONFIG.detection_s(peers) + 4 * CONFIG.gossip_s)
        assert swarm.all_see(*gone, as_=Health.DEAD)
        assert {peer for _, peer in swarm.dead} == {*gone}


@pytest.mark.parametrize(("peers", "free_s"), [(2, (0.3, 1.5)), (5, (1.0, 5.0))])
async def test_a_busy_peer_is_not_a_dead_one(peers, free_s):
    """Each holds its GIL for 2 s again and again, and 1 % of the messages are lost."""
    async with waiting(peers, loss=0.01, seed=peers) as swarm:
        rng, now = Random(peers), swarm.loop.time()
        acts: list[tuple[float, str]] = [(now + rng.uniform(*free_s), n) for n in of(swarm)]
        held, until = set[str](), now + 20
        while (next_ := min(acts))[0] < until:
            at, name = next_
            await swarm.passes(at - swarm.loop.time())
            (swarm.thaw if name in held else swarm.freeze)(name)
            held ^= {name}
            acts.remove(next_)
            acts.append((at + (2.0 if name in held else rng.uniform(*free_s)), name))
        assert swarm.dead == set()


async def test_a_frozen_peer_dies_wakes_up_and_lives_again():
    async with waiting(4, loss=0.01) as swarm:
        swarm.freeze("w00")
        await swarm.passes(30)
        assert swarm.all_see("w00", as_=Health.DEAD)
        swarm.thaw("w00")
        await swarm.passes(20)
        assert swarm.all_see("w00", as_=Health.ALIVE)
        assert {peer for _, peer in swarm.dead} == {"w00"}, "it blames nobody itself"


async def test_a_heal_of_a_partition_kills_nobody():
    """Though each side brings the other news of deaths among its own."""

    def across(one: Iterable[str], other: Iterable[str]) -> set[tuple[str, str]]:
        return {pair for a in one for b in other for pair in ((a, b), (b, a))}

    async with waiting(6, loss=0.01) as swarm:
        some, others = of(swarm)[:2], of(swarm)[2:]
        swarm.cut(some, others)
        await swarm.passes(14)
        assert swarm.dead == across(some, others)
        swarm.heal(some, others)
        await swarm.passes(CONFIG.reconnect_s + 5)
        assert swarm.all_see(*of(swarm), as_=Health.ALIVE)
        assert swarm.dead == across(some, others)


async def test_a_departure_and_a_death_are_known_though_a_tenth_of_all_is_lost():
    async with waiting(6, loss=0.1) as swarm:
        swarm.kill("w00")
        await swarm.leave("w01")
        swarm.peers.pop("w01")
        await swarm.passes(5)
        assert swarm.all_see("w01", as_=Health.LEFT)
        await swarm.passes(CONFIG.detection_s(6))
        assert swarm.all_see("w00", as_=Health.DEAD)
        assert {peer for _, peer in swarm.dead} == {"w00"}
