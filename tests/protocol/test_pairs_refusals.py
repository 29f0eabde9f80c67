"""What does not fit into a round in pairs: refused with a reason, counted, and nothing applied."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from murmuration.algorithms.presets import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from tests.protocol.pair_taps import GossipMessage, first, meetings
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.memory_transport import MemoryTransport

PROBLEM = Problem(steps=15, plan=replace(PRESETS["noloco"], inner_steps=3))
CODES = pb.RefusalCode


def damaged(said: GossipMessage) -> bytes:
    payload = bytearray(said.message.frame.payload)
    payload[len(payload) // 2] ^= 1
    said.message.frame.payload = bytes(payload)
    return said.message.SerializeToString()


@pytest.mark.parametrize("calls", [True, False], ids=["who calls", "who is called"])
@pytest.mark.parametrize("kind", ["anchor frame", "contribution frame"])
def test_a_damaged_frame_is_refused_and_sent_again_within_the_round(kind: str, calls: bool) -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            swarm.tap = first(
                lambda said: said.kind == kind and (said.speaker < said.listener) is calls, damaged
            )
            await swarm.start(*"abcd")
            await swarm.finished()
            swarm.assert_reference()
            refused = [event["reason"] for p in swarm.alive for event in p.of_kind("refused")]
            assert len(refused) == 1
            assert "damaged" in str(refused[0])
            assert sum(peer.refused.get("again", 0) for peer in swarm.alive) == 1

    run(scenario())


# ----------------------------------------------------------------------- parts that are not valid


def part(**changes: int) -> Callable[[GossipMessage], bytes]:
    def change(said: GossipMessage) -> bytes:
        for name, value in changes.items():
            setattr(said.message.part, name, value)
        return said.message.SerializeToString()

    return change


def values(number: float) -> Callable[[GossipMessage], bytes]:
    """Whole frames of the right size, with that number in them."""
    payload = np.full(300, number, "<f4").tobytes()

    def change(said: GossipMessage) -> bytes:
        if said.kind.endswith("part"):
            said.message.part.hash = wire.hash64(payload)
        else:
            frame = pb.Frame(offset=0, payload=payload, hash=wire.hash64(payload))
            said.message.frame.CopyFrom(frame)
        return said.message.SerializeToString()

    return change


WRONG = {
    "another size": (part(total_bytes=1204), "1204 bytes"),
    "a terabyte": (part(total_bytes=2**40), f"{2**40} bytes"),
    "another codec": (part(codec=2), "of codec 2"),
    "a part that does not exist": (part(part=2), "part 2"),
    "NaN": (values(float("nan")), "NaN"),
    "absurdly large values": (values(1e38), "large"),
}


@pytest.mark.parametrize("calls", [True, False], ids=["who calls", "who is called"])
@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG)
def test_a_contribution_that_does_not_fit_costs_the_pair_that_round(
    change: Callable[[GossipMessage], bytes], reason: str, calls: bool
) -> None:
    """At once, not at a deadline: it would be the same the next time."""

    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            pair: list[str] = []

            def spoil(said: GossipMessage) -> bytes | None:
                ends = [said.speaker, said.listener]
                mine = swarm[said.speaker].versions == (1,) and (ends[0] < ends[1]) is calls
                if said.kind == "contribution part" and mine and not pair:
                    pair.extend(ends)
                wrong = pair == ends and swarm[said.speaker].versions == (1,)
                return change(said) if wrong and said.kind.startswith("contribution") else None

            swarm.tap = meetings(spoil)
            await swarm.start(*"abcd")
            await swarm.finished()
            listener = swarm[pair[1]]
            assert reason in str(listener.of_kind("refused")[0]["reason"])
            assert listener.refused["invalid"] >= 1
            for peer in swarm.alive:
                lost = [event["round"] for event in peer.of_kind("round_failed")]
                assert lost == ([1] if peer.name in pair else [])
                assert all(event["stall_s"] < 1 for event in peer.of_kind("round"))
                assert torch.isfinite(peer.trainer.states[0].anchor).all()

    run(scenario())


# ----------------------------------------------------------------------- who calls without a right


def header(swarm: Swarm, **changes: object) -> pb.PairMessage:
    """A header for a round of `c`, who is at version 1."""
    fields: dict[str, object] = {
        "run": swarm.problem.manifest.run,
        "fragment": 0,
        "round": 1,
        "sender": "a",
        "group": wire.group_hash(("a", "c")),
    }
    return pb.PairMessage(header=pb.PairHeader(**{**fields, **changes}))


HEADERS = {
    "another run": ({"run": 5}, CODES.REFUSAL_RUN, "another run", "declined"),
    "another group": ({"group": 1}, CODES.REFUSAL_GROUP, "another partner", "declined"),
    "who is called, not who calls": (
        {"sender": "d", "group": wire.group_hash(("c", "d"))},
        CODES.REFUSAL_GROUP,
        "another partner",
        "declined",
    ),
    "itself": ({"sender": "c"}, CODES.REFUSAL_GROUP, "another partner", "declined"),
    "a round that is over": ({"round": 0, "group": 1}, None, "", "declined"),
    "a fragment that does not exist": (
        {"fragment": 1},
        CODES.REFUSAL_INVALID,
        "fragment 1 of 1",
        "invalid",
    ),
    "a stranger": ({"sender": "x"}, CODES.REFUSAL_AGAIN, "x is not a member", "again"),
    "a stranger to a round to come": (
        {"sender": "x", "round": 9},
        CODES.REFUSAL_AGAIN,
        "x is not a member",
        "again",
    ),
    "nobody": ({"sender": ""}, CODES.REFUSAL_AGAIN, "nobody is not a member", "again"),
}


@pytest.mark.parametrize(("changes", "code", "reason", "counted"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_does_not_fit_is_refused(
    changes: dict[str, object], code: int | None, reason: str, counted: str
) -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start(*"abcd")
            await swarm.until(lambda: swarm["c"].versions == (1,), 10)
            refusal = await asked(swarm, header(swarm, **changes).SerializeToString())
            assert refusal.code == code or code is None
            assert reason in refusal.reason
            assert swarm["c"].refused == {counted: 1}
            await swarm.finished()
            swarm.assert_reference()

    run(scenario())


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (b"\xff\xff\xff", CODES.REFUSAL_AGAIN, "not a PairMessage"),
        (b"", CODES.REFUSAL_INVALID, "begin with its header"),
        (
            pb.PairMessage(staged=pb.Staged()).SerializeToString(),
            CODES.REFUSAL_INVALID,
            "begin with its header",
        ),
    ],
    ids=["garbage", "an empty message", "no header"],
)
def test_what_is_no_header_is_refused(message: bytes, code: int, reason: str) -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start(*"abcd")
            await swarm.until(lambda: swarm["c"].versions == (1,), 10)
            refusal = await asked(swarm, message)
            assert refusal.code == code
            assert reason in refusal.reason
            await swarm.finished()
            swarm.assert_reference()

    run(scenario())


async def asked(swarm: Swarm, message: bytes) -> pb.Refusal:
    """The refusal that this first message meets at `c`, at once."""
    stream = MemoryTransport(swarm.network, "elsewhere").open("c", "Data/PairRound")
    async with asyncio.timeout(1):
        await stream.send(message)
        raw = await stream.receive()
    assert raw is not None
    answer = pb.PairMessage.FromString(raw)
    assert answer.WhichOneof("body") == "refusal", answer
    return answer.refusal
