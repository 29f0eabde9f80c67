"""Stages whose last replica is gone: told once, rebuilt where a peer can be spared, and the end
where nobody begins microbatches any more. And stages whose replicas live and take none."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.config import Config
from murmuration.worker.errors import PeersUnreachable
from murmuration.worker.membership import Health, Phase
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.training.mailbox import JobKind, StageMove, Stop
from tests.protocol.stage_swarm import StagedProblem, StageSwarm
from tests.protocol.virtual_time import run

DETECTION_S = MembershipConfig().detection_s(6)
TOLD_S = DETECTION_S + 5.0
NEVER = 10_000  # steps: nobody ends by itself
FORWARD_S = {f"{stage}{letter}": 0.1 for stage in range(3) for letter in "ab"}


@dataclass(frozen=True, kw_only=True)
class Rebuilding(StagedProblem):
    """Stages are rebuilt."""

    @property
    def config(self) -> Config:
        config = super().config
        return replace(config, stages=replace(config.stages, rebuild=True))


def problem_of(kind: type[StagedProblem] = StagedProblem, **changes: Any) -> StagedProblem:
    """Three stages; replicas of one never meet."""
    plan = replace(PRESETS["diloco"], inner_steps=NEVER)
    sizes = {"count": 3, "layers": 3, "microbatches": 2, "steps": NEVER, "plan": plan}
    return kind(**{**sizes, "forward_s": FORWARD_S, **changes})


async def interrupt(swarm: StageSwarm, name: str) -> None:
    """As SIGTERM: the peer leaves in good order, before its run has ended."""
    peer = swarm[name]
    peer.train.answer(Stop("SIGTERM"))
    await swarm.until(lambda: peer.train.ended, 10.0)
    peer.node.close()
    assert peer.task is not None
    await peer.task
    peer.killed = True


def moved(swarm: StageSwarm) -> dict[str, StageMove]:
    return {p.name: p.trainer.moves_to for p in swarm.alive if p.trainer.moves_to is not None}


@pytest.mark.parametrize("leaves", [False, True])
def test_one_peer_moves_to_a_stage_whose_last_replica_is_gone(leaves: bool) -> None:
    """Killed or interrupted, the stage is orphaned; the one that can be spared rebuilds it."""

    async def scenario() -> None:
        async with StageSwarm(problem_of(Rebuilding)) as swarm:
            await swarm.start_all({0: 1, 1: 1, 2: 2})
            await swarm.reached(3)
            if leaves:
                await interrupt(swarm, "1a")
            else:
                swarm.kill("1a")
            await swarm.until(lambda: bool(moved(swarm)), TOLD_S)
            await swarm.sleep(3.0)
            assert moved(swarm) == {"2b": StageMove(1, orphaned=True)}
            (event,) = swarm["2b"].of_kind("moves")
            assert (event["stage"], event["to"]) == (2, 1)

    run(scenario())


def test_only_who_has_trained_to_the_end_says_so() -> None:
    async def scenario() -> None:
        async with StageSwarm(problem_of(steps=6)) as swarm:
            await swarm.start_all({0: 1, 1: 2, 2: 1})
            await swarm.reached(3)
            await interrupt(swarm, "1b")
            await swarm.finished()
            members = {member.peer: member for member in swarm["0a"].node.gossip.members}
            assert (members["1b"].health, members["1b"].phase) == (Health.LEFT, Phase.TRAINING)
            assert {members[name].phase for name in ("0a", "1a", "2a")} == {Phase.DONE}

    run(scenario())


def test_a_stage_without_a_replica_is_told_once_until_it_is_served_again() -> None:
    line = "stage 2 has no replica left: routes leave it out"

    async def scenario() -> None:
        async with StageSwarm(problem_of()) as swarm:
            await swarm.start_all()
            await swarm.reached(3)
            swarm.kill("2a")
            await swarm.sleep(TOLD_S + 30.0)
            assert (swarm["0a"].warnings, swarm["1a"].warnings) == ([line], [line])
            again = await swarm.restart("2a", via=["0a"])
            await swarm.until(lambda: again.trainer.step > 3, 60.0)
            assert swarm["0a"].warnings == [line]
            swarm.kill("2a")
            await swarm.sleep(TOLD_S)
            assert swarm["0a"].warnings == [line, line]
            assert not moved(swarm)

    run(scenario())


def test_without_stage_0_the_others_end_with_an_error() -> None:
    async def scenario() -> None:
        async with StageSwarm(problem_of()) as swarm:
            await swarm.start_all()
            await swarm.reached(3)
            swarm.kill("0a")
            others = [swarm["1a"], swarm["2a"]]
            await swarm.sleep(TOLD_S)
            for peer in others:
                assert peer.warnings == ["stage 0 has no replica left: nobody begins microbatches"]
                assert not peer.train.ended
            await swarm.sleep(30.0)
            for peer in others:
                error = peer.train.error
                assert isinstance(error, PeersUnreachable)
                assert "stage 0 has no replica left" in str(error)
                assert "\n" not in str(error)

    run(scenario())


def test_a_replica_of_stage_0_that_starts_again_in_time_goes_on() -> None:
    async def scenario() -> None:
        async with StageSwarm(problem_of()) as swarm:
            await swarm.start_all()
            await swarm.reached(3)
            swarm.kill("0a")
            await swarm.sleep(TOLD_S)
            again = await swarm.restart("0a", via=["1a"])
            await swarm.sleep(30.0)
            assert again.trainer.step > 3
            assert swarm["1a"].trainer.step > 3
            assert not any(peer.train.ended for peer in swarm.alive)

    run(scenario())


def test_who_has_trained_to_the_end_and_left_is_not_missed() -> None:
    async def scenario() -> None:
        async with StageSwarm(problem_of(Rebuilding, steps=6)) as swarm:
            await swarm.start_all({0: 1, 1: 1, 2: 2})
            await swarm.finished()
            for name in ("0a", "1a"):
                swarm[name].node.close()
            await swarm.sleep(60.0)
            assert not moved(swarm)
            assert not any(peer.warnings for peer in swarm.peers.values())

    run(scenario())


# ------------------------------------------------------ replicas that live, and take nothing

REFUSED = StagedProblem(
    count=3,
    layers=3,
    microbatches=2,
    steps=10_000,
    plan=replace(PRESETS["diloco"], inner_steps=10_000),  # replicas of a stage never meet
    forward_s={"0a": 0.1, "1a": 0.1, "2a": 0.1},
)


def test_a_stage_without_room_for_a_microbatch_says_what_to_raise() -> None:
    async def scenario() -> None:
        async with StageSwarm(REFUSED) as swarm:
            await swarm.start_all()
            refusing = swarm["1a"]
            refusing.node.stages.context.budget.limit_bytes = 10
            await swarm.sleep(5.0)
            assert refusing.train.error is None  # whoever sends it may say what it likes
            (told,) = refusing.warnings
            assert "raise memory_mib on this machine" in told
            assert "\n" not in told
            assert swarm["0a"].warnings == [
                f"a microbatch goes past stage 1, though 1a serves it: {told}"
            ]

    run(scenario())


def test_a_stage_that_an_origin_does_not_reach_is_told_of() -> None:
    """Others do, so that its replica is not taken to be gone."""

    async def scenario() -> None:
        async with StageSwarm(REFUSED) as swarm:
            await swarm.start_all()
            await swarm.reached(3)
            swarm.network.cut("0a", "1a")
            await swarm.sleep(30.0)
            (told,) = swarm["0a"].warnings
            assert str(told).startswith("a microbatch goes past stage 1, though 1a serves it: ")
            assert not swarm["1a"].warnings

    run(scenario())


def test_an_origin_that_cannot_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone begins its microbatches: the others would wait for its report for ever."""

    async def scenario() -> None:
        async with StageSwarm(REFUSED) as swarm:
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
        async with StageSwarm(replace(REFUSED, steps=2)) as swarm:
            await swarm.start_all()
            none = Mock(return_value=([()] * 2, 0))
            monkeypatch.setattr(swarm["0a"].node.stages.planner, "routes", none)
            await swarm.finished()
            assert swarm.total("dropped") == 4
            assert not any(told.counted for told in swarm["0a"].replica.iterations)
            assert not any(job is JobKind.LOSS for job, _, _ in swarm["0a"].replica.jobs)

    run(scenario())
