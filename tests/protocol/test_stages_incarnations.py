"""Peers that start again while an iteration of their earlier incarnation is under way. Calls of
the two are told apart: an origin begins all of that iteration's microbatches again."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import PRESETS
from murmuration.worker.training.mailbox import JobKind
from tests.protocol.stage_swarm import StagedProblem, StageSwarm, incarnation_of, numbers_in
from tests.protocol.virtual_time import run

ITERATION = 3
SLOW = StagedProblem(
    count=3,
    layers=3,
    microbatches=2,
    steps=4,
    plan=replace(PRESETS["diloco"], inner_steps=100),  # replicas of a stage never meet
    forward_s={"0a": 0.6},  # it holds iterations up
)
SLOWER = replace(SLOW, forward_s={"0a": 0.6, "2a": 0.25, "2b": 0.25})


async def started_again(swarm: StageSwarm) -> None:
    """0b is killed, and starts again in the same iteration; who asks it for losses knows that."""
    swarm.kill("0b")
    await swarm.sleep(0.1)
    await swarm.restart("0b", via=["2b"])


async def arrived(swarm: StageSwarm, microbatches: int) -> None:
    """Until 1b has done the forward of so many, of all incarnations of 0b."""
    jobs, forwards = swarm["1b"].replica.jobs, (JobKind.FORWARD, ITERATION)
    await swarm.until(lambda: len([j for j in jobs if j[:2] == forwards]) >= microbatches, 60)


def assert_begun_anew(swarm: StageSwarm) -> None:
    """The new incarnation's microbatches have come back, and no others' answers with them."""
    again = swarm["0b"].replica
    assert again.iterations[ITERATION - 1].counted == {0, 1}
    for job in (JobKind.ENTER, JobKind.LOSS, JobKind.LEAVE):
        assert [again.jobs[job, ITERATION, n] for n in range(2)] == [1, 1], job
    assert swarm.total("discarded") == 0


def test_what_an_earlier_incarnation_has_reported_stays() -> None:
    """It was further on when it was killed: the calls of both are vouched for, each by its own."""

    async def scenario() -> None:
        async with StageSwarm(SLOW) as swarm:
            await swarm.start_all(2)
            await swarm.reached(ITERATION)
            before = swarm["0b"]
            await swarm.until(lambda: before.trainer.step > ITERATION, 60)
            assert swarm["1b"].trainer.step == ITERATION
            await started_again(swarm)
            await swarm.finished()
            swarm.assert_accounted()
            assert_begun_anew(swarm)
            assert swarm.total("dropped") == 0
            for stage in (1, 2):
                counted = swarm.counted(stage, ITERATION)
                for incarnation in (incarnation_of(before), incarnation_of(swarm["0b"])):
                    assert [counted[incarnation, n] for n in range(2)] == [1, 1]

    run(scenario())


@pytest.mark.parametrize(
    ("after_s", "counted"),
    [(0.1, []), (0.4, [0]), (1.0, [0, 1])],
    ids=["forward", "one counted", "all counted"],
)
def test_what_an_earlier_incarnation_had_under_way_is_dropped_once(
    after_s: float, counted: list[int]
) -> None:
    """Its microbatches are between the stages, or between them and it; they find the new one."""

    async def scenario() -> None:
        async with StageSwarm(SLOWER) as swarm:
            await swarm.start_all(2)
            await arrived(swarm, 1)
            await swarm.sleep(after_s)
            before = incarnation_of(swarm["0b"])
            await started_again(swarm)
            await swarm.finished()
            swarm.assert_accounted()
            assert_begun_anew(swarm)
            (event,) = swarm["1b"].of_kind("orphaned")
            assert (event["origin"], event["epoch"]) == (before.peer, before.epoch)
            assert (event["iteration"], event["counted"]) == (ITERATION, counted)
            assert sorted(numbers_in(event)) == [0, 1]
            assert swarm.total("dropped") == 2

    run(scenario())


def test_each_of_three_incarnations_in_one_iteration_counts_by_itself() -> None:
    async def scenario() -> None:
        async with StageSwarm(replace(SLOW, forward_s={"0a": 0.9, "2b": 0.4})) as swarm:
            await swarm.start_all(2)
            for incarnation in (1, 2):
                await arrived(swarm, 2 * incarnation)
                await swarm.sleep(0.3)
                await started_again(swarm)
            await swarm.finished()
            swarm.assert_accounted()
            assert_begun_anew(swarm)
            assert len(swarm["1b"].of_kind("orphaned")) == 2
            # An incarnation that had not heard yet how far the others are began what is over there.
            late = [e for peer in swarm.peers.values() for e in peer.of_kind("dropped")]
            assert {event["iteration"] for event in late} <= {ITERATION - 1}
            assert swarm.total("dropped") == 4 + len(late)

    run(scenario())


def test_an_origin_that_hears_of_an_earlier_incarnation_with_a_clock_ahead_goes_on() -> None:
    """In an iteration it takes a later epoch than that one's, as if it were another incarnation."""

    async def scenario() -> None:
        async with StageSwarm(SLOW) as swarm:
            await swarm.start_all(2)
            await swarm.reached(ITERATION)
            gossip = swarm["0b"].node.gossip
            ahead = replace(gossip.me, epoch=gossip.me.epoch + 10_000)
            gossip.hear((ahead,))
            assert gossip.me.epoch > ahead.epoch
            await swarm.finished()
            for told in swarm["0b"].replica.iterations:
                assert told.counted == {0, 1} or told.iteration == ITERATION
            for stage in (1, 2):
                of_last = [p.replica.iterations[-1] for p in swarm.of_stage(stage)]
                assert sum(len(told.counted) for told in of_last) == 4

    run(scenario())


def test_nobody_waits_for_the_earlier_incarnation_of_a_replica() -> None:
    """Its machine has lost its power: no connection breaks, and the name is back at once."""

    async def scenario() -> None:
        async with StageSwarm(replace(SLOW, forward_s={})) as swarm:
            await swarm.start_all(2)
            await swarm.reached(ITERATION)
            await swarm.sleep(0.03)
            swarm.freeze("1a")
            before = swarm.peers["1a, frozen"] = swarm.peers.pop("1a")
            before.killed = True
            await swarm.join("1a", via=["0a"], address="1a'")
            await swarm.finished()
            swarm.assert_accounted()
            assert swarm.total("rerouted") > 0
            assert (swarm.total("dropped"), swarm.total("discarded")) == (0, 0)

    run(scenario())
