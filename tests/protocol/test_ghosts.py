"""Members that nobody has met are said to be far ahead: nobody follows them."""

from dataclasses import replace
from pathlib import Path

import pytest

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity import Authority, Role
from murmuration.worker.identity.words import SignedWords
from murmuration.worker.membership import Member, Phase
from murmuration.worker.transport import Caller
from murmuration.worker.wire import signed_member_to_message
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run

FAR = 999_999
MALLORY = Caller("ipv4:127.0.0.1:1", "peer", "mallory")
PLANS = {
    "means": Plan(inner_steps=5),
    "pairs": replace(PRESETS["noloco"], inner_steps=5, consensus=False),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nobody_skips_to_where_five_ghosts_are_said_to_be(plan: Plan) -> None:
    """By a member with a certificate, in its own name, for as long as the others train."""

    async def scenario() -> None:
        problem = Problem(plan=plan, steps=1_000_000, step_s=dict.fromkeys("abc", 0.5))
        async with Swarm(problem) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: min(min(p.versions) for p in swarm.alive) >= 2, 60)
            digests = [pb.FragmentDigest(version=FAR // 5, hash=7)] * len(problem.fragments)
            for heartbeat in range(1, 20):
                ghosts = [
                    pb.Member(
                        peer=f"ghost {n}",
                        address=f"nowhere {n}",
                        epoch=1,
                        heartbeat=heartbeat,
                        step=FAR,
                        phase=pb.PHASE_TRAINING,
                        digests=digests,
                    )
                    for n in range(5)
                ]
                run_id = problem.manifest.run
                said = pb.GossipMessage(sender="mallory", run=run_id, members=ghosts)
                for peer in swarm.alive:
                    raw = said.SerializeToString()
                    await peer.node.server.on_call("Control/Gossip", raw, MALLORY)
                await swarm.sleep(1.0)
            for peer in swarm.alive:
                assert peer.of_kind("skipped") == peer.of_kind("adopted") == []
                assert peer.trainer.step < 200
                assert peer.train.error is None
            before = [min(peer.versions) for peer in swarm.alive]
            await swarm.until(
                lambda: all(
                    min(p.versions) > was + 2 for p, was in zip(swarm.alive, before, strict=True)
                ),
                240,
            )

    run(scenario())


@pytest.mark.parametrize("address", ["nowhere", "c"])
def test_nobody_waits_for_a_member_that_answers_nobody(tmp_path: Path, address: str) -> None:
    """It has a certificate, says that it trains, and begins again whenever it is suspected."""

    async def scenario() -> None:
        problem = Problem(plan=PLANS["means"], steps=1_000_000, step_s=dict.fromkeys("abc", 0.5))
        authority = Authority.make(tmp_path)
        async with Swarm(problem, authority=authority) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: min(min(p.versions) for p in swarm.alive) >= 2, 60)
            run_id = problem.manifest.run
            identity = authority.new_identity(Role.PEER, "mallory")
            words = SignedWords(identity, run_id, swarm.loop.time)
            before = min(min(peer.versions) for peer in swarm.alive)
            for epoch in range(1, 41):
                ghost = Member("mallory", address, epoch, phase=Phase.TRAINING)
                said = pb.GossipMessage(
                    sender="mallory",
                    run=run_id,
                    members=[signed_member_to_message(words.signed(ghost))],
                    certificates=[words.certificate],
                )
                for peer in swarm.alive:
                    raw = said.SerializeToString()
                    await peer.node.server.on_call("Control/Gossip", raw, MALLORY)
                await swarm.sleep(0.5)
            # Five steps of half a second are a round: eight of them in twenty seconds.
            assert min(min(peer.versions) for peer in swarm.alive) >= before + 7
            rounds = [event for peer in swarm.alive for event in peer.of_kind("round")]
            assert {event["contributors"] for event in rounds} == {3}

    run(scenario())


def test_a_member_said_to_be_at_anothers_address_is_not_alive() -> None:
    """What answers there is another peer, so nobody is alive under the ghost's name."""

    def sees(peer: Peer, other: str) -> object:
        return next((m["health"] for m in peer.members if m["peer"] == other), None)

    async def scenario() -> None:
        problem = Problem(plan=PLANS["means"], steps=1_000_000, step_s=dict.fromkeys("abc", 0.5))
        async with Swarm(problem) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.until(lambda: min(min(p.versions) for p in swarm.alive) >= 2, 60)
            first = next(iter(swarm.alive))
            ghost = pb.Member(
                peer="ghost", address="c", epoch=1, heartbeat=5, phase=pb.PHASE_TRAINING
            )
            said = pb.GossipMessage(sender="x", run=problem.manifest.run, members=[ghost])
            raw = said.SerializeToString()
            await first.node.server.on_call("Control/Gossip", raw, Caller("stranger"))
            before = min(first.versions)
            await swarm.until(lambda: all(sees(p, "ghost") is not None for p in swarm.alive), 10)
            await swarm.until(lambda: all(sees(p, "ghost") != "alive" for p in swarm.alive), 60)
            await swarm.until(lambda: min(first.versions) > before + 10, 120)

    run(scenario())
