"""Nobody speaks for another peer: live nodes hold what is said against the caller's certificate."""

import random
from contextlib import suppress
from pathlib import Path

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.identity import Authority
from murmuration.worker.transport import (
    CONTROL_METHODS,
    DATA_METHODS,
    RELAY_METHODS,
    Caller,
    Refused,
    Unreachable,
)
from murmuration.worker.wire import WireError, claimed_sender
from tests.protocol.problem import Problem, steady
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

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


def test_of_every_method_it_is_known_whom_it_says_it_is_from() -> None:
    assert {*CONTROL_METHODS, *DATA_METHODS, *RELAY_METHODS} == CLAIMS.keys() | SAY_NOTHING
    for method, message in CLAIMS.items():
        assert claimed_sender(method, message.SerializeToString()) == "a"
    for method in SAY_NOTHING:
        assert claimed_sender(method, b"anything") is None
    asking = pb.JoinRequest(manifest=b"x", member=pb.Member(peer="a"), dial_only=True)
    assert claimed_sender("Control/Join", asking.SerializeToString()) is None
    assert claimed_sender("Control/Join", b"") is None


def test_nobody_announces_another_peers_blocks_beside_its_own() -> None:
    both = pb.LeaseNews(holdings=[pb.BlockHolding(peer="mallory"), pb.BlockHolding(peer="a")])
    with pytest.raises(WireError, match="2 peers' blocks announced"):
        claimed_sender("Control/Lease", both.SerializeToString())


class Sent:
    """A stream with one message, which hears what comes back."""

    def __init__(self, message: bytes) -> None:
        self.messages: list[bytes] = [message]
        self.heard: list[bytes] = []

    async def send(self, message: bytes) -> None:
        self.heard.append(message)

    async def done(self) -> None:
        """Nothing to tell."""

    async def receive(self) -> bytes | None:
        return self.messages.pop() if self.messages else None

    def cancel(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("pairs", [False, True])
def test_a_member_that_speaks_for_another_is_refused_and_counted(pairs: bool) -> None:
    async def scenario() -> None:
        plan = Plan(inner_steps=3, exchange="pairs" if pairs else "mean")
        problem = Problem(steps=15, plan=plan)
        async with Swarm(problem) as swarm:
            await swarm.start("a", "b")
            node = swarm["b"].node
            refused = 0
            for method, message in CLAIMS.items():
                raw = message.SerializeToString()
                if method in CONTROL_METHODS:
                    with pytest.raises(Refused, match="of mallory does not speak for a"):
                        await node.server.on_call(method, raw, MALLORY)
                    refused += 1
                elif method in node.server.streams:
                    stream = Sent(raw)
                    with suppress(Refused):  # a round in pairs ends its stream itself
                        await node.server.on_stream(method, stream, MALLORY)
                    assert stream.heard == []
                    refused += 1
            assert swarm["b"].refused["certificate"] == refused
            # For itself it may, and where nothing is encrypted anybody.
            said = pb.GossipMessage(sender="mallory", run=problem.manifest.run)
            await node.server.on_call("Control/Gossip", said.SerializeToString(), MALLORY)
            said.sender = "a"
            await node.server.on_call("Control/Gossip", said.SerializeToString())
            assert swarm["b"].refused["certificate"] == refused
            await swarm.finished()

    run(scenario())


def test_a_tokens_holder_may_ask_for_a_certificate_and_nothing_else() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(steps=15)) as swarm:
            await swarm.start("a", "b")
            node = swarm["a"].node
            for method in CONTROL_METHODS:
                if method != "Control/Enrol":
                    with pytest.raises(Refused, match="not for the certificate of a token"):
                        await node.server.on_call(method, b"", TOKEN)
            for method in node.server.streams:
                stream = Sent(b"")
                with pytest.raises((Refused, Unreachable), match="certificate of a token"):
                    await node.server.on_stream(method, stream, TOKEN)
                assert stream.heard == []
            with pytest.raises(Refused, match="Control/Enrol is not for the certificate"):
                await node.server.on_call("Control/Enrol", b"", COORDINATOR)
            for caller in (TOKEN, MALLORY):  # a member asks for a later one
                raw = await node.server.on_call("Control/Enrol", b"", caller)
                assert "does not hold the run's key" in pb.EnrolReply.FromString(raw).refusal
            await swarm.finished()

    run(scenario())


@pytest.mark.parametrize("seed", range(2))
def test_honest_members_that_come_and_go_are_refused_nothing(seed: int, tmp_path: Path) -> None:
    """By their certificates, for places, or as members."""

    async def scenario() -> None:
        rng = random.Random(seed)
        async with Swarm(steady(400), authority=Authority.make(tmp_path)) as swarm:
            await swarm.start(*"abcd")
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

    run(scenario())
