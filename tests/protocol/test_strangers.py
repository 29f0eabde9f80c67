"""Somebody speaks to live nodes that has no model, that speaks for another, or of members that
nobody has met: what is refused, told and left alone."""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Role
from murmuration.worker.identity.words import SignedWords
from murmuration.worker.membership import Health, Member, Phase, swim
from murmuration.worker.transport import (
    CONTROL_METHODS,
    RELAY_METHODS,
    Caller,
    Method,
    Refused,
    Unreachable,
)
from murmuration.worker.wire import WireError, claimed_sender, signed_member_to_message
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Scripted


def gossip(swarm: Swarm, *members: pb.Member, **said: Any) -> bytes:
    given = {"sender": "x", "run": swarm.problem.manifest.run, "members": members, **said}
    return pb.GossipMessage(**given).SerializeToString()


async def test_a_call_that_cannot_be_answered_ends_alone():
    async with Swarm(Problem(steps=15), "ab") as swarm:
        node, long = swarm["a"].node, "x" * 3_000_000
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
        await swarm.ends_equal(versions=(5,))


async def test_one_that_is_not_believed_is_told_why():
    async with Swarm(steady(60), "ab") as swarm:
        limits = swarm["b"].node.gossip.limits
        await swarm.until(lambda: swarm["a"].versions >= (1,), 60)
        object.__setattr__(limits, "steps", 20)
        await swarm.until(lambda: bool(swarm["a"].of_kind("warning")), 60)
        told = str(swarm["a"].warnings[0])
        assert told.startswith("b refuses ")
        assert "of 20" in told


MALLORY = Caller("ipv4:127.0.0.1:1", "peer", "mallory")
COORDINATOR = Caller("ipv4:127.0.0.1:1", "coordinator", "coordinator")
TOKEN = Caller("ipv4:127.0.0.1:1", "token", "0123abcd")

CLAIMS = {
    "Control/Join": pb.JoinRequest(manifest=b"x", member=pb.Member(peer="a")),
    "Control/Gossip": pb.GossipMessage(sender="a"),
    "Control/Lease": pb.LeaseNews(holdings=[pb.BlockHolding(peer="a")]),
    "Control/Finished": pb.FinishedRequest(origin="a"),
    "Control/Result": pb.ResultRequest(sender="a"),
    "Data/Exchange": pb.ExchangeUp(header=pb.ContributionHeader(sender="a")),
    "Data/Average": pb.ExchangeUp(header=pb.ContributionHeader(sender="a")),
    "Data/PairRound": pb.PairMessage(header=pb.PairHeader(sender="a")),
    "Data/StageCall": pb.StageCallUp(header=pb.StageCallHeader(sender="a")),
    **dict.fromkeys(RELAY_METHODS, pb.RelayMessage(header=pb.RelayHeader(sender="a"))),
}
# What these hold is about others, or about nobody.
SAY_NOTHING = {
    "Control/Enrol",
    "Control/IndirectProbe",
    "Control/Status",
    "Control/Measure",
    "Data/Fetch",
}


def test_of_every_method_it_is_known_whom_it_says_it_is_from():
    assert {*Method} == CLAIMS.keys() | SAY_NOTHING
    for method, message in CLAIMS.items():
        assert claimed_sender(method, message.SerializeToString()) == "a"
    for method in SAY_NOTHING:
        assert claimed_sender(method, b"anything") is None
    asking = pb.JoinRequest(manifest=b"x", member=pb.Member(peer="a"), dial_only=True)
    assert claimed_sender("Control/Join", asking.SerializeToString()) is None
    assert claimed_sender("Control/Join", b"") is None


def test_nobody_announces_another_peers_blocks_beside_its_own():
    both = pb.LeaseNews(holdings=[pb.BlockHolding(peer="mallory"), pb.BlockHolding(peer="a")])
    with pytest.raises(WireError, match="2 peers' blocks announced"):
        claimed_sender("Control/Lease", both.SerializeToString())


@pytest.mark.parametrize("pairs", [False, True])
async def test_a_member_that_speaks_for_another_is_refused_and_counted(pairs):
    plan = Plan(inner_steps=3, exchange="pairs" if pairs else "mean")
    problem = Problem(steps=15, plan=plan)
    async with Swarm(problem, "ab") as swarm:
        node, refused = swarm["b"].node, 0
        for method, message in CLAIMS.items():
            raw = message.SerializeToString()
            if method in CONTROL_METHODS:
                with pytest.raises(Refused, match="of mallory does not speak for a"):
                    await node.server.on_call(method, raw, MALLORY)
                refused += 1
            elif method in node.server.streams:
                stream = Scripted(raw, ends=True)
                with suppress(Refused):  # a round in pairs ends its stream itself
                    await node.server.on_stream(method, stream, MALLORY)
                assert stream.sent == []
                refused += 1
        assert swarm["b"].refused["certificate"] == refused
        # For itself it may, and where nothing is encrypted anybody.
        said = pb.GossipMessage(sender="mallory", run=problem.manifest.run)
        await node.server.on_call("Control/Gossip", said.SerializeToString(), MALLORY)
        said.sender = "a"
        await node.server.on_call("Control/Gossip", said.SerializeToString())
        assert swarm["b"].refused["certificate"] == refused
        await swarm.finished()


async def test_a_tokens_holder_may_ask_for_a_certificate_and_nothing_else():
    async with Swarm(Problem(steps=15), "ab") as swarm:
        node = swarm["a"].node
        for method in CONTROL_METHODS:
            if method != "Control/Enrol":
                with pytest.raises(Refused, match="not for the certificate of a token"):
                    await node.server.on_call(method, b"", TOKEN)
        for method in node.server.streams:
            stream = Scripted(b"", ends=True)
            with pytest.raises((Refused, Unreachable), match="certificate of a token"):
                await node.server.on_stream(method, stream, TOKEN)
            assert stream.sent == []
        with pytest.raises(Refused, match="Control/Enrol is not for the certificate"):
            await node.server.on_call("Control/Enrol", b"", COORDINATOR)
        for caller in (TOKEN, MALLORY):  # a member asks for a later one
            raw = await node.server.on_call("Control/Enrol", b"", caller)
            assert "does not hold the run's key" in pb.EnrolReply.FromString(raw).refusal
        await swarm.finished()


async def test_honest_members_that_come_and_go_are_refused_nothing(tmp_path):
    """By their certificates, for places, or as members."""
    rng = random.Random(0)
    async with Swarm(steady(400), "abcd", authority=Authority.make(tmp_path)) as swarm:
        for number in range(6):
            await swarm.sleep(rng.uniform(0.5, 4.0))
            name = rng.choice([peer.name for peer in swarm.alive if peer.name != "a"])
            match rng.randrange(4):
                case 0:
                    await swarm.join(f"new {number}", via="a")
                case 1:
                    swarm.kill(name)
                    await swarm.sleep(rng.uniform(0.1, 8.0))
                    await swarm.restart(name, via="a")
                case 2:
                    swarm.network.cut("a", name)
                    await swarm.sleep(rng.uniform(0.1, 8.0))
                    swarm.network.heal("a", name)
                case _:
                    swarm.freeze(name)
                    await swarm.sleep(rng.uniform(0.1, 8.0))
                    swarm.thaw(name)
        await swarm.sleep(5)
        for peer in swarm.alive:
            counted = {kind: n for kind, n in peer.refused.items() if n}
            assert not counted.keys() & {"certificate", "busy", "member", "call"}, counted


FAR_STEP = 999_999
MEANS = Problem(plan=Plan(inner_steps=5), steps=1_000_000, step_s=dict.fromkeys("abc", 0.5))
PAIRS = replace(MEANS, plan=replace(PRESETS["noloco"], inner_steps=5, consensus=False))


def least_version(swarm: Swarm) -> int:
    return min(min(peer.versions) for peer in swarm.alive)


async def tell(swarm: Swarm, *members: pb.Member, certificates: Sequence[bytes] = ()) -> None:
    """Mallory tells all that live of these."""
    said = pb.GossipMessage(
        sender="mallory", run=swarm.problem.manifest.run, members=members, certificates=certificates
    )
    for peer in swarm.alive:
        await peer.node.server.on_call("Control/Gossip", said.SerializeToString(), MALLORY)


async def test_in_pairs_nobody_skips_to_where_five_ghosts_are_said_to_be():
    """By a member with a certificate, in its own name, for as long as the others train."""
    async with Swarm(PAIRS, "abc") as swarm:
        await swarm.until(lambda: least_version(swarm) >= 2, 60)
        digests = [pb.FragmentDigest(version=FAR_STEP // 5, hash=7)] * len(PAIRS.fragments)
        far = {"start_ms": 1, "step": FAR_STEP, "phase": pb.PHASE_TRAINING, "digests": digests}
        for beat in range(1, 8):
            named = ({"peer": f"ghost {n}", "address": f"nowhere {n}"} for n in range(5))
            await tell(swarm, *(pb.Member(**each, **far, heartbeat=beat) for each in named))
            await swarm.sleep(1.0)
        for peer in swarm.alive:
            assert peer.of_kind("skipped") == peer.of_kind("adopted") == []
            assert peer.trainer.step < 200
        most = max(max(peer.versions) for peer in swarm.alive)
        await swarm.until(lambda: least_version(swarm) > most + 2, 240)


async def test_members_that_gave_way_to_others_are_forgotten(monkeypatch):
    monkeypatch.setattr(swim, "MAX_MEMBERS", 8)
    async with Swarm(MEANS, "abc") as swarm:
        gossip = swarm["a"].node.gossip
        left = {"address": "nowhere", "start_ms": 1, "health": pb.HEALTH_LEFT}
        await tell(swarm, *(pb.Member(peer=f"ghost {n}", **left) for n in range(40)))
        assert len(gossip.others) == 7
        assert gossip._logged.keys() <= {member.peer for member in gossip.others}


@pytest.mark.parametrize(("address", "leaves"), [("nowhere", 0), ("c", 0), ("nowhere", 1)])
async def test_nobody_waits_for_a_member_that_answers_nobody(tmp_path, address, leaves):
    """It has a certificate, says that it trains, and begins again whenever it is suspected. One
    that leaves each time fills no log."""
    async with Swarm(MEANS, "abc", authority=Authority.make(tmp_path)) as swarm:
        await swarm.until(lambda: least_version(swarm) >= 2, 60)
        identity = swarm.authority.new_identity(Role.PEER, "mallory")
        words = SignedWords(identity, MEANS.manifest.run, swarm.loop.time)
        before = least_version(swarm)
        for start_ms in range(1, 17):
            health = Health(Health.LEFT * (leaves and start_ms % 2))
            ghost = Member("mallory", address, start_ms, health=health, phase=Phase.TRAINING)
            told = signed_member_to_message(words.signed(ghost))
            await tell(swarm, told, certificates=[words.certificate])
            await swarm.sleep(0.5)
        # Five steps of half a second are a round: three of them in eight seconds.
        assert least_version(swarm) >= before + 3
        rounds = [event for peer in swarm.alive for event in peer.of_kind("round")]
        assert {event["contributors"] for event in rounds} == {3}
        assert len(swarm["a"].of_kind("member")) < 10
