"""Stages whose replicas live and take no microbatch: nothing is left out in silence."""

from dataclasses import replace

from algorithms.plan import PRESETS
from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from tests.protocol.swarm import Peer
from tests.protocol.virtual_time import run
from worker.errors import ConfigError

PROBLEM = StagedProblem(
    count=3,
    layers=3,
    microbatches=2,
    steps=10_000,
    plan=replace(PRESETS["diloco"], inner_steps=10_000),  # replicas of a stage never meet
)


def warnings(peer: Peer) -> list[object]:
    return [event["text"] for event in peer.of_kind("warning")]


def test_a_stage_without_room_for_a_microbatch_ends_and_says_what_to_raise() -> None:
    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            await swarm.start_all()
            refusing = swarm["1a"]
            refusing.node.stages.room.limit_bytes = 10
            await swarm.sleep(5.0)
            assert isinstance(refusing.train.error, ConfigError)
            told = str(refusing.train.error)
            assert "raise memory_mib on this machine" in told
            assert "\n" not in told
            assert warnings(swarm["0a"]) == [
                f"a microbatch goes past stage 1, though 1a serves it: {told}"
            ]

    run(scenario())


def test_a_stage_that_an_origin_does_not_reach_is_told_of() -> None:
    """Others do, so that its replica is not taken to be gone."""

    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            await swarm.start_all()
            await swarm.reached(3)
            swarm.network.cut("0a", "1a")
            await swarm.sleep(30.0)
            (told,) = warnings(swarm["0a"])
            assert str(told).startswith("a microbatch goes past stage 1, though 1a serves it: ")
            assert not warnings(swarm["1a"])

    run(scenario())
