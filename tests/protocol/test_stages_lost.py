"""Microbatches that came back, and died with the replica that had counted them: told, even when the
replica dies late in the iteration or the origin soon afterwards."""

from dataclasses import replace

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.training.mailbox import JobKind
from tests.protocol.stage_swarm import StagedProblem, StageSwarm, numbers_in
from tests.protocol.virtual_time import run

DETECTION_S = MembershipConfig().detection_s(6)
PROBLEM = StagedProblem(
    count=3,
    layers=3,
    microbatches=2,
    steps=6,
    plan=replace(PRESETS["diloco"], inner_steps=100),  # replicas of a stage never meet
)


def test_microbatches_that_came_back_and_died_with_their_replica_are_told() -> None:
    """1a is killed when its answer has left: it is done for the origin, and in no sum."""

    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            await swarm.start_all(2)
            await swarm.until(lambda: swarm["0a"].replica.jobs[JobKind.LEAVE, 3, 0] > 0, 60)
            swarm.kill("1a")
            await swarm.finished()
            swarm.assert_accounted()
            (event,) = swarm["0a"].of_kind("lost")
            assert (event["iteration"], event["replica"]) == (3, "1a")
            assert swarm.total("lost") == len(numbers_in(event)) > 0
            assert (swarm.total("dropped"), swarm.total("discarded")) == (0, 0)

    run(scenario())


def test_microbatches_that_died_after_the_report_on_them_are_told() -> None:
    """0a is through with the iteration, and 1a has its word; then 1a is killed while it computes
    for the slower 0b. What it had of 0a's dies with it, although 0a is further on by then."""

    async def scenario() -> None:
        async with StageSwarm(replace(PROBLEM, forward_s={"0b": 0.1})) as swarm:
            await swarm.start_all(2)
            await swarm.until(lambda: len(swarm["0a"].replica.iterations) == 3, 60)
            await swarm.sleep(0.05)
            assert swarm["1a"].trainer.step == 3 > len(swarm["1a"].replica.iterations)
            swarm.kill("1a")
            await swarm.finished()
            swarm.assert_accounted()
            (event,) = swarm["0a"].of_kind("lost")
            assert (event["iteration"], event["replica"]) == (3, "1a")
            assert swarm.total("lost") >= len(numbers_in(event)) > 0

    run(scenario())


def test_microbatches_are_told_whose_replica_dies_and_then_their_origin() -> None:
    """0a is killed before it is known that 1a is gone: what it knew it has said at once."""

    async def scenario() -> None:
        async with StageSwarm(PROBLEM) as swarm:
            await swarm.start_all(2)
            await swarm.until(lambda: swarm["0a"].replica.jobs[JobKind.LEAVE, 3, 0] > 0, 60)
            swarm.kill("1a")
            await swarm.until(lambda: len(swarm["0a"].replica.iterations) == 3, DETECTION_S)
            await swarm.sleep(0.3)
            swarm.kill("0a")
            await swarm.finished()
            assert not swarm["0a"].of_kind("lost")
            swarm.assert_accounted()
            (event,) = swarm["0a"].of_kind("unconfirmed")
            assert (event["iteration"], event["replica"]) == (3, "1a")
            assert numbers_in(event)

    run(scenario())
