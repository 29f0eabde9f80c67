"""A swarm without faults ends with what the reference computes, and moves no more than it must."""

from dataclasses import replace
from typing import Any

import pytest

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.membership.swim import MembershipConfig
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing

PEERS = "abcde"
CO2 = PRESETS["co2"]
KEEP = Plan(inner_steps=4, fragments=2, overlap_steps=2, merge="keep", consensus=True)


def bits(up: str, back: str) -> dict[str, Any]:
    return {"codec": up, "reduction_codec": back}


PLANS = {
    "diloco": Plan(inner_steps=3),
    "diloco with a closing round": Plan(inner_steps=5),
    "every step": Plan(inner_steps=1),
    "bf16 up": Plan(inner_steps=3, codec="bf16"),
    "bf16 both ways": Plan(inner_steps=3, codec="bf16", reduction_codec="bf16"),
    "two fragments": Plan(inner_steps=4, fragments=2),
    "streaming": Plan(inner_steps=4, fragments=2, overlap_steps=1, merge_alpha=0.5),
    "streaming over a whole period": Plan(
        inner_steps=4, fragments=3, overlap_steps=4, merge_alpha=0.25, codec="bf16"
    ),
    "data-parallel": PRESETS["ddp"],
    "four bits both ways": Plan(inner_steps=3, codec="e3m0", reduction_codec="e3m0"),
    "four bits up, eight back": Plan(inner_steps=3, codec="e3m0", reduction_codec="int8"),
    "keep, topk up, bf16 back": Plan(
        inner_steps=3, codec="topk", reduction_codec="bf16", merge="keep", outer_momentum=0.0
    ),
    "streaming preset": replace(PRESETS["streaming"], inner_steps=4, overlap_steps=2),
    "keep, four bits": Plan(inner_steps=3, **bits("e3m0", "e3m0"), merge="keep", consensus=True),
    "keep, one bit, streaming": replace(KEEP, **bits("sign", "sign")),
    "keep without a last mean, ternary, alpha": replace(
        KEEP,
        **bits("ternary", "sign"),
        fragments=3,
        overlap_steps=4,
        merge_alpha=0.5,
        consensus=False,
    ),
    "keep, topk both ways over senders": replace(
        KEEP, **bits("topk128", "topk256"), mean_over="senders", outer_lr=1.0, outer_momentum=0.0
    ),
    "co2": replace(
        CO2, inner_steps=3, overlap_steps=3, staleness_penalty=0.5, outer_momentum_clip=0.05
    ),
    "keep, exact": Plan(inner_steps=3, merge="keep", consensus=True),
    "data-parallel, eight bits": replace(PRESETS["ddp"], codec="int8", reduction_codec="int8"),
}


@pytest.mark.parametrize(
    ("plan", "peers"),
    [*((name, 3) for name in PLANS), ("diloco", 2), ("diloco", 5), ("streaming preset", 5)],
)
async def test_all_peers_end_with_the_state_of_the_reference(plan, peers):
    async with Swarm(Problem(layers=(211, 97, 150), plan=PLANS[plan]), PEERS[:peers]) as swarm:
        await swarm.ends_equal()
        swarm.assert_reference()
        for peer in swarm.alive:
            assert peer.of_kind("round_failed") == []
            rounds = peer.of_kind("round")
            assert {event["contributors"] for event in rounds} == {peers}
            assert not any(event["missed"] for event in rounds)
            assert peer.refused == {}


async def test_first_rounds_that_are_due_before_the_others_have_started_are_held():
    """Gossip is slow, steps are not: the first peer contributes while the others still wait."""
    problem = Problem(
        plan=Plan(inner_steps=1),
        step_s=dict.fromkeys("abcd", 0.001),
        membership=MembershipConfig(gossip_s=1.0, probe_s=4.0),
    )
    async with Swarm(problem, "abcd") as swarm:
        await swarm.ends_equal(versions=(12,))
        swarm.assert_reference()


async def test_a_peer_alone_trains_like_the_reference():
    async with Swarm(Problem(), "a") as swarm:
        await swarm.ends_at_reference()
        assert swarm["a"].transport.traffic.sent_bytes == 0


async def test_fragments_smaller_than_the_group_have_empty_shards():
    async with Swarm(Problem(layers=(3,)), PEERS) as swarm:
        await swarm.ends_at_reference()


@pytest.mark.parametrize(("peers", "codec", "bytes_per_value"), [(2, "fp32", 4), (5, "bf16", 2)])
async def test_traffic_is_near_the_optimum(peers, codec, bytes_per_value):
    plan = Plan(inner_steps=2, codec=codec, reduction_codec=codec)
    rounds, elements = 2, 400_000
    expected = rounds * 2 * (peers - 1) / peers * elements * bytes_per_value
    async with Swarm(Problem(layers=(elements,), steps=2 * rounds, plan=plan)) as swarm:
        await swarm.start(*PEERS[:peers])
        await swarm.ends_equal(versions=(rounds,))
        for peer in swarm.alive:
            traffic = peer.transport.traffic
            assert traffic.sent["Data/Exchange"] == pytest.approx(expected, rel=0.02)
            assert traffic.received["Data/Exchange"] == pytest.approx(expected, rel=0.02)
            assert traffic.sent["Data/Exchange"] > peer.payload_sent_bytes
            assert peer.payload_sent_bytes == pytest.approx(expected, rel=1e-4)
            assert peer.payload_received_bytes == pytest.approx(expected, rel=1e-4)
            assert traffic.sent["Data/Fetch"] == 0


async def test_no_frame_is_over_1_mib_and_each_shard_is_one_stream(monkeypatch):
    monkeypatch.setattr("murmuration.algorithms.plan._MAX_CHUNKS_PER_PEER", 2)
    largest, headers, elements = 0, 0, 1_500_000

    def tap(passing: Passing) -> bytes:
        nonlocal largest, headers
        largest = max(largest, len(passing.message))
        headers += passing.up and passing.body == "header"
        return passing.message

    async with Swarm(Problem(layers=(elements,), steps=3), "ab") as swarm:
        swarm.tap = tap
        await swarm.ends_at_reference()
    assert 1024 * 1024 <= largest <= 1024 * 1024 + 64
    assert headers == 2 * 2  # each sends the other one shard of each chunk
