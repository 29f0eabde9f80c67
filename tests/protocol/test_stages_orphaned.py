"""Stages whose last replica is gone: told once, rebuilt where a peer can be spared, and the end
where nobody begins microbatches any more. And stages whose replicas live and take none, or of
which one lies, or is silent, where the stage is fetched."""

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.errors import PeersUnreachable
from murmuration.worker.membership import Health, Phase
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.pipeline.part import fetch_stages
from murmuration.worker.training.mailbox import JobKind, StageMove
from murmuration.worker.transport import Method, Stream
from tests.protocol.stage_swarm import StagedProblem, StageSwarm, three_stages
from tests.support.liar import lie

DETECTION_S = MembershipConfig().detection_s(6)
TOLD_S = DETECTION_S + 5.0
FORWARD_S = {f"{stage}{letter}": 0.1 for stage in range(3) for letter in "ab"}


def problem_of(steps: int = 10_000, **changes: Any) -> StagedProblem:
    """Nobody ends by itself."""
    return three_stages(steps, forward_s=FORWARD_S, **changes)


def moved(swarm: StageSwarm) -> dict[str, StageMove]:
    return {p.name: p.trainer.moves_to for p in swarm.alive if p.trainer.moves_to is not None}


@pytest.mark.parametrize("leaves", [False, True])
async def test_one_peer_moves_to_a_stage_whose_last_replica_is_gone(leaves):
    """Killed or interrupted, the stage is orphaned; the one that can be spared rebuilds it."""
    async with StageSwarm(problem_of(rebuild=True), {0: 1, 1: 1, 2: 2}, at=3) as swarm:
        if leaves:
            await swarm.leave("1a")
        else:
            swarm.kill("1a")
        await swarm.until(lambda: bool(moved(swarm)), TOLD_S)
        await swarm.sleep(3.0)
        assert moved(swarm) == {"2b": StageMove(1, orphaned=True)}
        (event,) = swarm["2b"].of_kind("moves")
        assert (event["stage"], event["to"]) == (2, 1)


async def test_only_who_has_trained_to_the_end_says_so():
    async with StageSwarm(problem_of(steps=6), {0: 1, 1: 2, 2: 1}, at=3) as swarm:
        await swarm.leave("1b")
        await swarm.finished()
        members = {member.peer: member for member in swarm["0a"].node.gossip.members}
        assert (members["1b"].health, members["1b"].phase) == (Health.LEFT, Phase.TRAINING)
        assert {members[name].phase for name in ("0a", "1a", "2a")} == {Phase.DONE}


async def test_a_stage_without_a_replica_is_told_once_until_it_is_served_again():
    line = "stage 2 has no replica left: routes leave it out"
    async with StageSwarm(problem_of(), 1, at=3) as swarm:
        swarm.kill("2a")
        await swarm.sleep(TOLD_S + 6.0)
        assert (swarm["0a"].warnings, swarm["1a"].warnings) == ([line], [line])
        again = await swarm.restart("2a", via=["0a"])
        await swarm.until(lambda: again.trainer.step > 3, 60.0)
        assert swarm["0a"].warnings == [line]
        swarm.kill("2a")
        await swarm.sleep(TOLD_S)
        assert swarm["0a"].warnings == [line, line]
        assert not moved(swarm)


async def test_without_stage_0_the_others_end_with_an_error():
    """They go on where it starts again in time."""
    async with StageSwarm(problem_of(), 1, at=3) as swarm:
        others = [swarm["1a"], swarm["2a"]]
        swarm.kill("0a")
        await swarm.sleep(TOLD_S)
        again = await swarm.restart("0a", via=["1a"])
        await swarm.sleep(30.0)
        assert min(peer.trainer.step for peer in (again, *others)) > 3
        swarm.kill("0a")
        await swarm.sleep(TOLD_S)
        for peer in others:
            assert peer.warnings == 2 * ["stage 0 has no replica left: nobody begins microbatches"]
            assert not peer.train.ended
        await swarm.sleep(30.0)
        for peer in others:
            error = peer.train.error
            assert isinstance(error, PeersUnreachable)
            assert "stage 0 has no replica left" in str(error)
            assert "\n" not in str(error)


async def test_who_has_trained_to_the_end_and_left_is_not_missed():
    async with StageSwarm(problem_of(6, rebuild=True), {0: 1, 1: 1, 2: 2}) as swarm:
        await swarm.finished()
        for name in ("0a", "1a"):
            swarm[name].node.close()
        await swarm.sleep(30.0)
        assert not moved(swarm)
        assert not any(peer.warnings for peer in swarm.peers.values())


async def test_a_stage_without_room_for_a_microbatch_says_what_to_raise():
    async with StageSwarm(problem_of(), 1) as swarm:
        refusing = swarm["1a"]
        refusing.node.stages.context.budget.limit_bytes = 10
        await swarm.sleep(5.0)
        assert refusing.train.error is None  # whoever sends it may say what it likes
        told = refusing.warnings[0].removeprefix("a stage call of 0a has failed: ")
        assert "raise memory_mib on this machine" in told
        assert "\n" not in told
        assert swarm["0a"].warnings == [
            f"a microbatch goes past stage 1, though 1a serves it: {told}"
        ]


async def test_a_stage_that_an_origin_does_not_reach_is_told_of():
    """Others do, so that its replica is not taken to be gone."""
    async with StageSwarm(problem_of(), 1, at=3) as swarm:
        swarm.network.cut("0a", "1a")
        await swarm.until(lambda: bool(swarm["0a"].warnings), 30.0)
        await swarm.sleep(2.0)
        (told,) = swarm["0a"].warnings
        assert str(told).startswith("a microbatch goes past stage 1, though 1a serves it: ")
        assert not swarm["1a"].warnings


async def test_an_origin_that_cannot_go_on_ends(monkeypatch):
    """It alone begins its microbatches: the others would wait for its report for ever."""
    async with StageSwarm(problem_of(), 1, at=3) as swarm:
        error = ZeroDivisionError("no routes")
        monkeypatch.setattr(swarm["0a"].node.stages.planner, "routes", Mock(side_effect=error))
        await swarm.sleep(5.0)
        assert swarm["0a"].train.error is error


async def test_an_origin_without_routes_drops_microbatches(monkeypatch):
    """Stage 0 by itself would learn to be a model of its own."""
    async with StageSwarm(problem_of(2), 1) as swarm:
        none = Mock(return_value=([()] * 2, 0))
        monkeypatch.setattr(swarm["0a"].node.stages.planner, "routes", none)
        await swarm.finished()
        assert swarm.total("dropped") == 4
        assert not any(told.counted for told in swarm["0a"].replica.iterations)
        assert not any(job is JobKind.LOSS for job, _, _ in swarm["0a"].replica.jobs)


async def silent(_: Stream) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("does", ["has another", "is ahead", "says the others'", "is silent"])
async def test_what_most_replicas_hold_is_fetched_in_a_few_seconds(does, ends):
    meets = replace(PRESETS["diloco"], inner_steps=2)
    async with StageSwarm(problem_of(6 if ends else 10_000, plan=meets), 3, at=4) as swarm:
        if ends:
            await swarm.finished()
        node, said = swarm["1a"].node, swarm["1a"].node.gossip.me.digests
        if does == "is silent":
            node.server.streams[Method.FETCH] = silent
        else:
            lie(node, 50 if does == "is ahead" else 0)
        if does == "says the others'":
            node.gossip.update(digests=said)
        await swarm.sleep(1.0)
        states = {1: swarm["1b"].trainer.states, 2: swarm["2b"].trainer.states}
        sizes = {
            stage: {i: (each.anchor.numel(), each.momentum.numel()) for i, each in enumerate(held)}
            for stage, held in states.items()
        }
        began = swarm.loop.time()
        found = await fetch_stages(swarm["0a"].node.stages.context, sizes, 30.0)
        assert swarm.loop.time() - began < 6.0
        assert found.keys() == {1, 2}
        for anchor, state in zip(found[1], states[1], strict=True):
            assert not torch.all(anchor == 3.0)
            assert torch.equal(anchor, state.anchor) or not ends
        if ends:
            told = swarm["0a"].warned("1a gives another state of stage 1 than it announces")
            assert told == (does == "says the others'")
