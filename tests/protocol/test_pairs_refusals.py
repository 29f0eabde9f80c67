"""What does not fit into a round in pairs costs no more than that round, and nothing is applied."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from tests.protocol.pair_taps import GossipMessage, first, meetings
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

PROBLEM = Problem(steps=15, plan=replace(PRESETS["noloco"], inner_steps=3))


def damaged(said: GossipMessage) -> bytes:
    payload = bytearray(said.message.frame.payload)
    payload[len(payload) // 2] ^= 1
    said.message.frame.payload = bytes(payload)
    return said.message.SerializeToString()


@pytest.mark.parametrize(("kind", "calls"), [("anchor frame", True), ("contribution frame", False)])
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


def nan(said: GossipMessage) -> bytes:
    """A contribution of the right size, of values that are no numbers."""
    payload = np.full(300, np.nan, "<f4").tobytes()
    if said.kind.endswith("part"):
        said.message.part.hash = wire.hash64(payload)
    else:
        frame = pb.Frame(offset=0, payload=payload, hash=wire.hash64(payload))
        said.message.frame.CopyFrom(frame)
    return said.message.SerializeToString()


@pytest.mark.parametrize("calls", [True, False], ids=["who calls", "who is called"])
def test_a_contribution_that_does_not_fit_costs_the_pair_that_round(calls: bool) -> None:
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
                return nan(said) if wrong and said.kind.startswith("contribution") else None

            swarm.tap = meetings(spoil)
            await swarm.start(*"abcd")
            await swarm.finished()
            listener = swarm[pair[1]]
            assert "NaN" in str(listener.of_kind("refused")[0]["reason"])
            assert listener.refused["invalid"] >= 1
            for peer in swarm.alive:
                lost = [event["round"] for event in peer.of_kind("round_failed")]
                assert lost == ([1] if peer.name in pair else [])
                assert all(event["stall_s"] < 1 for event in peer.of_kind("round"))
                assert torch.isfinite(peer.trainer.states[0].anchor).all()

    run(scenario())
