"""Gossip between real nodes: few bytes, and nothing lost when links and peers go and come back."""

from murmuration.worker.membership import Phase
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

NAMES = "abcd"


def gossip_bytes(swarm: Swarm, name: str) -> int:
    return swarm[name].transport.traffic.sent["Control/Gossip"]


def know_the_same(swarm: Swarm) -> bool:
    """Whether all that live agree on everyone's life, phase and state."""
    views = {
        tuple((c.peer, c.epoch, c.health, c.phase, c.digests) for c in peer.node.gossip.members)
        for peer in swarm.alive
    }
    return len(views) == 1


def test_four_peers_in_training_gossip_little() -> None:
    async def scenario() -> None:
        async with Swarm(steady(600)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 30)
            before = {name: gossip_bytes(swarm, name) for name in NAMES}
            began_s = swarm.loop.time()
            await swarm.until(lambda: swarm["a"].versions >= (40,), 120)
            took_s = swarm.loop.time() - began_s
            assert took_s > 10
            for name in NAMES:
                assert gossip_bytes(swarm, name) - before[name] < 600 * took_s

    run(scenario())


def test_everyone_counts_again_when_a_cut_link_is_back() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=3000)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 30)
            swarm.cut("ab", "cd")
            await swarm.sleep(20)
            swarm.heal("ab", "cd")
            everyone = set(NAMES)
            await swarm.until(
                lambda: all(set(p.node.gossip.view.joinable()) == everyone for p in swarm.alive), 30
            )

    run(scenario())


def test_all_know_the_same_when_everyone_is_done() -> None:
    """Nothing changes any more, so nothing but gossip itself can still bring what was missed."""

    async def scenario() -> None:
        async with Swarm(steady(30)) as swarm:
            await swarm.start(*NAMES)
            await swarm.until(lambda: swarm["a"].versions >= (2,), 30)
            swarm.kill("d")
            await swarm.restart("d", via=["a"])
            await swarm.finished()
            await swarm.until(lambda: know_the_same(swarm), 5)
            assert {member.phase for member in swarm["a"].node.gossip.members} == {Phase.DONE}

    run(scenario())
