"""Rounds in pairs between real nodes: without faults all end where the reference does."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import PRESETS
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

PEERS = "abcdefg"

NOLOCO = replace(PRESETS["noloco"], inner_steps=3, consensus=False)
PAPER = replace(NOLOCO, shared_momentum=False, outer_momentum=0.5, outer_lr=0.7, outer_pull=0.7)
PLANS = {
    "noloco": NOLOCO,
    "the paper's update": PAPER,
    "streaming-noloco": replace(
        PRESETS["streaming-noloco"], inner_steps=4, fragments=2, overlap_steps=2
    ),
    "overlap over a whole period": replace(
        NOLOCO, fragments=2, overlap_steps=3, merge_alpha=0.25, codec="bf16"
    ),
    "eight bits": replace(NOLOCO, codec="int8"),
    "two fragments": replace(NOLOCO, fragments=2),
    "groups of three": replace(NOLOCO, group_size=3),
    "one anchor in the end": replace(NOLOCO, consensus=True),
    "what was not sent is kept": replace(NOLOCO, codec="sign", merge="keep"),
    "the paper's update, and that kept": replace(PAPER, codec="topk256", merge="keep"),
    "that kept over an overlap, and one replica in the end": replace(
        NOLOCO, fragments=2, overlap_steps=2, codec="sign", merge="keep", consensus=True
    ),
}


@pytest.mark.parametrize(
    ("name", "peers"),
    [*((name, 7) for name in PLANS), ("noloco", 2), ("noloco", 4), ("streaming-noloco", 4)],
)
def test_all_peers_end_with_the_state_of_the_reference(name: str, peers: int) -> None:
    plan = PLANS[name]
    problem = Problem(layers=(211, 97, 150), plan=plan, steps=16)

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            await swarm.start(*PEERS[:peers])
            await swarm.finished()
            swarm.assert_reference()
            for peer in swarm.alive:
                assert peer.of_kind("round_failed") == []
                assert peer.refused == {}
            taken = sum(len(peer.of_kind("head_start")) for peer in swarm.alive)
            assert (taken > 0) == plan.shared_momentum
            assert swarm.agrees() == (plan.consensus or peers <= plan.group_size)

    run(scenario())


@pytest.mark.parametrize("preset", ["noloco", "streaming-noloco"])
def test_anchors_come_ahead_on_long_links_too(preset: str) -> None:
    """Half a second there and back, and nothing comes for longer than that."""
    plan = replace(PRESETS[preset], inner_steps=20, fragments=1, consensus=False)
    steady = dict.fromkeys(PEERS, 0.5)
    problem = Problem(layers=(300, 200), plan=plan, steps=200, step_s=steady)

    async def scenario() -> None:
        async with Swarm(problem, delay_s=0.25) as swarm:
            await swarm.start(*PEERS[:4])
            await swarm.finished()
            swarm.assert_reference()
            for peer in swarm.alive:
                # A single step is undone, if any: of ten rounds the first has no anchors ahead.
                taken = peer.of_kind("head_start")
                assert len(taken) >= 8
                assert max(event["step"] % 20 for event in taken) <= plan.overlap_steps + 5

    run(scenario())
