"""A swarm without faults ends with what the reference computes, and moves no more than it must."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.membership.swim import MembershipConfig
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing
from tests.protocol.virtual_time import run

PEERS = "abcde"

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
    "keep, four bits": Plan(
        inner_steps=3, codec="e3m0", reduction_codec="e3m0", merge="keep", consensus=True
    ),
    "keep, one bit, streaming": Plan(
        inner_steps=4,
        fragments=2,
        overlap_steps=2,
        codec="sign",
        reduction_codec="sign",
        merge="keep",
        consensus=True,
    ),
    "keep without a last mean, ternary, alpha": Plan(
        inner_steps=4,
        fragments=3,
        overlap_steps=4,
        merge_alpha=0.5,
        codec="ternary",
        reduction_codec="sign",
        merge="keep",
    ),
    "keep, topk both ways over senders": Plan(
        inner_steps=4,
        fragments=2,
        overlap_steps=2,
        codec="topk128",
        reduction_codec="topk256",
        mean_over="senders",
        merge="keep",
        outer_lr=1.0,
        outer_momentum=0.0,
        consensus=True,
    ),
    "co2": replace(
        PRESETS["co2"],
        inner_steps=3,
        overlap_steps=3,
        staleness_penalty=0.5,
        outer_momentum_clip=0.05,
    ),
    "keep, exact": Plan(inner_steps=3, merge="keep", consensus=True),
    "data-parallel, eight bits": replace(PRESETS["ddp"], codec="int8", reduction_codec="int8"),
}


@pytest.mark.parametrize(
    ("plan", "peers"), [*((name, 5) for name in PLANS), ("diloco", 2), ("streaming preset", 2)]
)
def test_all_peers_end_with_the_state_of_the_reference(plan: str, peers: int) -> None:
    async def scenario() -> None:
        async with Swarm(Problem(layers=(211, 97, 150), plan=PLANS[plan])) as swarm:
            await swarm.start(*PEERS[:peers])
            await swarm.finished()
            swarm.assert_equal()
            swarm.assert_reference()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                rounds = peer.of_kind("round")
                assert {event["contributors"] for event in rounds} == {peers}
                assert not any(event["missed"] for event in rounds)
                assert peer.refused == {}

    run(scenario())


def test_peers_of_different_speed_end_with_the_state_of_the_reference() -> None:
    """The slow are waited for: the quorum's grace is far longer than they are late."""
    problem = Problem(step_s={"a": 0.01, "b": 0.1, "c": 0.5}, plan=Plan(inner_steps=3))

    async def scenario() -> None:
        async with Swarm(problem, delay_s=0.2) as swarm:
            await swarm.start("a", "b", "c")
            await swarm.finished()
            swarm.assert_equal(versions=(4,))
            swarm.assert_reference()

    run(scenario())


def test_first_rounds_that_are_due_before_the_others_have_started_are_held() -> None:
    """Gossip is slow, steps are not: the first peer contributes while the others still wait."""
    problem = Problem(
        plan=Plan(inner_steps=1),
        step_s=dict.fromkeys("abcd", 0.001),
        membership=MembershipConfig(gossip_s=1.0, probe_s=4.0),
    )

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            await swarm.start(*"abcd")
            await swarm.finished()
            swarm.assert_equal(versions=(12,))
            swarm.assert_reference()

    run(scenario())


def test_a_peer_alone_trains_like_the_reference() -> None:
    async def scenario() -> None:
        async with Swarm(Problem()) as swarm:
            await swarm.start("a")
            await swarm.finished()
            swarm.assert_reference()
            assert swarm["a"].transport.traffic.sent_bytes == 0

    run(scenario())


def test_fragments_smaller_than_the_group_have_empty_shards() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(layers=(3,))) as swarm:
            await swarm.start(*PEERS)
            await swarm.finished()
            swarm.assert_reference()

    run(scenario())


def test_the_same_seed_gives_the_same_run() -> None:
    async def scenario() -> tuple[float, dict[str, int], list[str]]:
        async with Swarm(Problem(seed=3)) as swarm:
            await swarm.start(*"abc")
            await swarm.finished()
            traffic = swarm["a"].transport.traffic
            return (
                swarm.loop.time(),
                dict(traffic.sent),
                [str(event) for event in swarm["b"].events],
            )

    assert run(scenario()) == run(scenario())


# ---------------------------------------------------------------------------------------- traffic


@pytest.mark.parametrize("peers", [2, 5])
@pytest.mark.parametrize(
    ("codec", "bytes_per_value"), [("fp32", 4), ("bf16", 2)], ids=["fp32", "bf16"]
)
def test_traffic_is_within_2_percent_of_the_optimum(
    peers: int, codec: str, bytes_per_value: int
) -> None:
    plan = Plan(inner_steps=2, codec=codec, reduction_codec=codec)
    rounds, elements = 2, 400_000
    expected = rounds * 2 * (peers - 1) / peers * elements * bytes_per_value

    async def scenario() -> None:
        async with Swarm(Problem(layers=(elements,), steps=2 * rounds, plan=plan)) as swarm:
            await swarm.start(*PEERS[:peers])
            await swarm.finished()
            swarm.assert_equal(versions=(rounds,))
            for peer in swarm.alive:
                traffic = peer.transport.traffic
                assert traffic.sent["Data/Exchange"] == pytest.approx(expected, rel=0.02)
                assert traffic.received["Data/Exchange"] == pytest.approx(expected, rel=0.02)
                assert traffic.sent["Data/Exchange"] > peer.payload_sent_bytes
                assert peer.payload_sent_bytes == pytest.approx(expected, rel=1e-4)
                assert peer.payload_received_bytes == pytest.approx(expected, rel=1e-4)
                assert traffic.sent["Data/Fetch"] == 0

    run(scenario())


def test_what_one_peer_counts_as_sent_another_counts_as_received() -> None:
    async def scenario() -> None:
        async with Swarm(Problem(layers=(5_000,))) as swarm:
            await swarm.start(*"abc")
            await swarm.finished()
            everyone = [peer.transport.traffic for peer in swarm.alive]
            sent = sum(traffic.sent["Data/Exchange"] for traffic in everyone)
            received = sum(traffic.received["Data/Exchange"] for traffic in everyone)
            assert sent == received > 0
            payload = sum(peer.payload_sent_bytes for peer in swarm.alive)
            assert payload == sum(peer.payload_received_bytes for peer in swarm.alive)

    run(scenario())


def test_no_frame_is_over_1_mib_and_each_shard_is_one_stream() -> None:
    largest, headers, elements = 0, 0, 9_000_000

    def tap(passing: Passing) -> bytes:
        nonlocal largest, headers
        largest = max(largest, len(passing.message))
        headers += passing.up and passing.body == "header"
        return passing.message

    async def scenario() -> None:
        async with Swarm(Problem(layers=(elements,), steps=3)) as swarm:
            swarm.tap = tap
            await swarm.start("a", "b")
            await swarm.finished()
            swarm.assert_reference()

    run(scenario())
    assert 1024 * 1024 <= largest <= 1024 * 1024 + 64
    assert headers == 2 * Plan().chunks_per_peer(
        elements, 2
    )  # each sends the other one shard of each chunk
