"""Somebody without a model speaks to live nodes: what is refused, told and left alone."""

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.transport import Refused
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

FAR = 2**64 - 1


def gossip(swarm: Swarm, *members: pb.Member, **said: object) -> bytes:
    message = pb.GossipMessage(sender="x", run=swarm.problem.manifest.run, members=members)
    for name, value in said.items():
        getattr(message, name).CopyFrom(value) if name == "progress" else setattr(
            message, name, value
        )
    return message.SerializeToString()


CARDS = {
    "epoch": pb.Member(peer="a", address="a", epoch=FAR),
    "incarnation": pb.Member(peer="a", address="a", epoch=1, incarnation=2**32 - 1),
    "heartbeat": pb.Member(peer="a", address="a", epoch=1, heartbeat=FAR),
    "step": pb.Member(peer="b", address="b", epoch=2, step=FAR, heartbeat=5),
    "stage": pb.Member(peer="b", address="b", epoch=2, stage=7, heartbeat=5),
    "fragments": pb.Member(
        peer="b", address="b", epoch=2, heartbeat=5, digests=[pb.FragmentDigest()] * 9
    ),
    "version": pb.Member(
        peer="b", address="b", epoch=2, heartbeat=5, digests=[pb.FragmentDigest(version=1000)]
    ),
    "member x": pb.Member(peer="x", address="x", profile=b"x" * 20_000),
}


def test_members_that_cannot_be_are_refused_one_by_one() -> None:
    async def scenario() -> None:
        async with Swarm(steady(60)) as swarm:
            await swarm.start("a", "b")
            await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
            node = swarm["a"].node
            for what, card in CARDS.items():
                good = pb.Member(peer=f"good {what}", address="nowhere", epoch=1)
                raw = await node.server.on_call("Control/Gossip", gossip(swarm, card, good))
                answer = pb.GossipMessage.FromString(raw)
                assert len(answer.refused) == 1
                assert what in answer.refused[0]
                assert f"good {what}" in {each["peer"] for each in swarm["a"].members}
                join = pb.JoinRequest(member=card, manifest=swarm.problem.manifest.pack())
                raw = await node.server.on_call("Control/Join", join.SerializeToString())
                assert what in pb.JoinReply.FromString(raw).refusal
            assert swarm["a"].refused["member"] == 2 * len(CARDS)
            assert node.gossip.me.epoch == 1
            far = pb.MemberProgress(epoch=2, heartbeat=FAR, step=3)
            raw = await node.server.on_call(
                "Control/Gossip", gossip(swarm, sender="b", progress=far)
            )
            assert "heartbeat" in pb.GossipMessage.FromString(raw).refused[0]
            await swarm.finished()
            swarm.assert_equal(versions=(12,))

    run(scenario())


def test_a_call_that_cannot_be_answered_ends_alone() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:
            await swarm.start("a", "b")
            node = swarm["a"].node
            long = "x" * 3_000_000
            for method, raw in (
                ("Control/Gossip", b"\xff\xff"),
                ("Control/Gossip", gossip(swarm, sender=long)),
                ("Control/Join", b"\xff"),
                ("Control/IndirectProbe", b"\xff"),
                ("Control/Nothing", b""),
            ):
                with pytest.raises(Refused) as refused:
                    await node.server.on_call(method, raw)
                assert len(str(refused.value)) <= 200

            async def broken(_raw: bytes) -> bytes:
                raise KeyError("a defect of ours")

            node.server.calls["Control/Measure"] = broken
            for _ in range(3):
                with pytest.raises(Refused, match="cannot be answered"):
                    await node.server.on_call("Control/Measure", b"")
            (told,) = swarm["a"].of_kind("warning")
            assert "KeyError in broken" in str(told["text"])
            await swarm.finished()
            swarm.assert_equal(versions=(5,))

    run(scenario())


def test_one_that_is_not_believed_is_told_why() -> None:
    async def scenario() -> None:
        async with Swarm(steady(60)) as swarm:
            await swarm.start("a", "b")
            limits = swarm["b"].node.gossip.limits
            await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
            object.__setattr__(limits, "steps", 20)
            await swarm.until(lambda: bool(swarm["a"].of_kind("warning")), 60)
            told = str(swarm["a"].warnings[0])
            assert told.startswith("b refuses ")
            assert "of 20" in told

    run(scenario())
