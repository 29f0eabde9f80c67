"""Stages whose replicas live and take no microbatch: nothing is left out in silence."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from algorithms.plan import PRESETS
from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from tests.protocol.swarm import Peer
from tests.protocol.virtual_time import run
from worker.errors import ConfigError
from worker.training.inbox import JobKind

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
            refusing.node.stages.context.budget.limit_bytes = 10
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


def test_an_origin_that_cannot_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone begins its microbatches: the others would wait for its last word for ever."""

    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            await swarm.start_all()
            await swarm.reached(3)
            error = ZeroDivisionError("no routes")
            monkeypatch.setattr(swarm["0a"].node.stages.planner, "routes", Mock(side_effect=error))
            await swarm.sleep(5.0)
            assert swarm["0a"].train.error is error

    run(scenario())


def test_an_origin_without_a_route_drops_its_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stage 0 by itself would learn to be a model of its own."""

    async def scenario() -> None:
        async with StageSwarm(replace(PROBLEM, steps=2)) as swarm:
            await swarm.start_all()
            none = Mock(return_value=([()] * 2, 0))
            monkeypatch.setattr(swarm["0a"].node.stages.planner, "routes", none)
            await swarm.finished()
            assert swarm.total("dropped") == 4
            assert not any(told.counted for told in swarm["0a"].replica.iterations)
            assert not any(job is JobKind.LOSS for job, _, _ in swarm["0a"].replica.jobs)

    run(scenario())
