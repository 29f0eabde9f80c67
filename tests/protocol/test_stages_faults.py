"""Peers of stages that die, freeze, lose each other or come back: training goes on, and every
microbatch is in a stage's gradient once or is said to be missing."""

import random
from dataclasses import replace

import pytest

from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.membership.swim import MembershipConfig
from murmuration.worker.training.mailbox import JobKind
from tests.protocol.stage_swarm import StageSwarm, numbers_in, three_stages
from tests.protocol.taps import Passing, once

DETECTION_S = MembershipConfig().detection_s(6)


class Answered:
    """Says whether a message is the first of an answer to a call of that iteration."""

    def __init__(self, asking: str, asked: str, iteration: int) -> None:
        self._ends, self._iteration = (asking, asked), iteration
        self._now = 0

    def __call__(self, passing: Passing) -> bool:
        if passing.method != "Data/StageCall" or (passing.source, passing.target) != self._ends:
            return False
        if passing.up:
            up = pb.StageCallUp.FromString(passing.message)
            self._now = up.header.iteration if up.HasField("header") else self._now
            return False
        down = pb.StageCallDown.FromString(passing.message)
        return self._now == self._iteration and down.HasField("gradient")


@pytest.mark.parametrize(("victim", "routing"), [("0b", "full"), ("1a", "full"), ("2b", "random")])
async def test_a_replica_killed_amid_an_iteration(victim, routing):
    async with StageSwarm(three_stages(8, routing=routing), 2, at=3) as swarm:
        await swarm.sleep(0.03)
        swarm.kill(victim)
        await swarm.ends_accounted()
        orphans = [n for p in swarm.alive for e in p.of_kind("orphaned") for n in numbers_in(e)]
        assert swarm.total("dropped") == len(orphans)
        assert bool(orphans) == (victim == "0b")
        assert swarm[victim].trainer.step == 3
        durations = swarm.durations("0a")  # the third is between the ends of 3 and 4
        assert max(durations[:2]) < DETECTION_S
        assert max(durations[3:]) < 2 * durations[0]
        if victim == "0b":  # others wait until it is known to be gone
            assert max(durations[1:3]) < DETECTION_S + 1
        else:
            assert max(durations) < 3 * durations[0]
            assert swarm.total("rerouted") > 0
        if victim == "1a":  # the mean is over the other's own visits
            visits = [len(told.counted) for told in swarm["1b"].replica.iterations]
            assert (visits[:2], visits[3:5]) == ([2, 2], [4, 4])
        assert swarm.total("discarded") == 0


async def test_a_microbatch_lost_after_its_loss_is_in_no_gradient():
    """The only other stage dies when it has the gradient of the loss: stage 0 has nothing of that
    microbatch in its sum, of final norm and head neither."""
    async with StageSwarm(three_stages(6, count=2, layers=2), 1) as swarm:

        def kill(passing: Passing) -> bytes:
            swarm.kill("1a")
            return passing.message

        swarm.tap = once(Answered("1a", "0a", 3), kill)
        await swarm.until(lambda: bool(swarm["0a"].of_kind("dropped")), 60)
        await swarm.restart("1a", via=["0a"])
        await swarm.finished()
        swarm.assert_counted_once()
        assert swarm.total("dropped") == 2
        third = swarm["0a"].replica.iterations[2]
        assert (third.iteration, third.counted) == (3, frozenset())
        assert swarm["0a"].replica.jobs[JobKind.LOSS, 3, 0] == 1
        assert not any(bool(value.any()) for value in third.gradient.values())
        assert swarm["0a"].replica.iterations[-1].counted == {0, 1}


async def test_all_replicas_of_a_stage_die_and_it_is_skipped():
    async with StageSwarm(three_stages(7), {0: 2, 1: 1, 2: 2}, at=3) as swarm:
        await swarm.sleep(0.03)
        swarm.kill("1a")
        await swarm.ends_accounted()
        assert swarm.total("dropped") == 0
        assert swarm.total("skipped") > 0
        for iteration in (4, 5, 6, 7):
            assert sum(swarm.counted(2, iteration).values()) == 4
        assert max(swarm.durations("0a")[3:]) < 2 * swarm.durations("0a")[0]


async def test_where_stages_are_missing_less_is_skipped():
    """The routes of one stage would be of stage 0 alone, as two of four stages are gone."""
    problem = three_stages(6, count=4, layers=4, routing="random", skip=0.5)
    async with StageSwarm(problem, 1, at=3) as swarm:
        swarm.kill("1a")
        swarm.kill("2a")
        await swarm.until(lambda: swarm["0a"].trainer.step >= 5, 60)
        await swarm.finished()
        assert sum(swarm.counted(3, 6).values()) == 2


async def test_an_origin_without_other_stages_waits_for_one():
    async with StageSwarm(three_stages(6, count=2, layers=2), 1, at=3) as swarm:
        swarm.kill("1a")
        await swarm.sleep(2 * DETECTION_S)
        assert swarm["0a"].trainer.step < 6
        assert sorted(swarm["0a"].warnings) == [
            "no other stage is served: waiting",
            "stage 1 has no replica left: routes leave it out",
        ]
        await swarm.restart("1a", via=["0a"])
        await swarm.finished()
        assert swarm["0a"].replica.iterations[-1].counted == {0, 1}
        swarm.assert_counted_once()


@pytest.mark.parametrize("reported", [False, True])
async def test_microbatches_that_died_with_their_replica_are_told(reported):
    """1a is killed when its answer has left: it is done for the origin, and in no sum. Or it has
    0a's word on it too, and computes for the slower 0b; 0a is further on by then."""
    async with StageSwarm(three_stages(6, forward_s={"0b": 0.1} if reported else {}), 2) as swarm:
        replica = swarm["0a"].replica
        if reported:
            await swarm.until(lambda: len(replica.iterations) == 3, 60)
            await swarm.sleep(0.05)
            assert swarm["1a"].trainer.step == 3 > len(swarm["1a"].replica.iterations)
        else:
            await swarm.until(lambda: replica.jobs[JobKind.LEAVE, 3, 0] > 0, 60)
        swarm.kill("1a")
        await swarm.ends_accounted()
        (event,) = swarm["0a"].of_kind("lost")
        assert (event["iteration"], event["replica"]) == (3, "1a")
        assert swarm.total("lost") >= len(numbers_in(event)) > 0
        assert reported or (swarm.total("dropped"), swarm.total("discarded")) == (0, 0)


async def test_microbatches_are_told_whose_replica_dies_and_then_their_origin():
    """0a is killed before it is known that 1a is gone: what it knew it has said at once."""
    async with StageSwarm(three_stages(6), 2) as swarm:
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


@pytest.mark.parametrize("victim", ["0a", "2b"])
async def test_a_frozen_replica_is_gone_round_and_comes_back(victim):
    other = "0b" if victim != "0b" else "0a"
    async with StageSwarm(three_stages(24), 2, at=3) as swarm:
        await swarm.sleep(0.03)
        swarm.freeze(victim)
        await swarm.until(lambda: swarm[other].trainer.step >= 6, 3 * DETECTION_S)
        await swarm.sleep(1.0)
        swarm.thaw(victim)
        await swarm.ends_accounted()
        own = [event for p in swarm.alive for event in p.of_kind("dropped")]
        thought = [event for p in swarm.alive for event in p.of_kind("orphaned")]
        assert bool(thought) == (victim == "0a")
        assert swarm.total("dropped") == len(own)  # who was only away tells what it has lost
        last = swarm[victim].replica.iterations[-1]
        assert (last.iteration, len(last.counted)) == (24, 2)
        assert max(swarm.durations(other)[-5:]) < 2 * swarm.durations(other)[0]


async def test_what_a_frozen_replica_has_computed_is_left_out():
    """Its calls were made to another meanwhile: it finds that out, and leaves its own out."""
    async with StageSwarm(three_stages(18), 2) as swarm:

        def freeze(passing: Passing) -> bytes:
            swarm.freeze("2a")
            return passing.message

        swarm.tap = once(Answered("1a", "2a", 3), freeze)
        await swarm.until(lambda: swarm["0b"].trainer.step >= 6, 3 * DETECTION_S)
        swarm.thaw("2a")
        await swarm.ends_accounted()
        assert swarm.total("dropped") == 0
        third = swarm["2a"].replica.iterations[2]
        assert (third.iteration, len(third.counted)) == (3, 0)


@pytest.mark.parametrize(("plan", "victim"), [("diloco", "0b"), ("ddp", "1a")])
async def test_a_replica_that_starts_again_takes_part_again(victim, plan):
    plans = {"diloco": replace(PRESETS["diloco"], inner_steps=5), "ddp": PRESETS["ddp"]}
    async with StageSwarm(three_stages(20, plan=plans[plan]), 2, at=4) as swarm:
        swarm.kill(victim)
        await swarm.sleep(0.5)
        await swarm.restart(victim, via=["0a", "1b"])
        await swarm.finished()
        swarm.assert_counted_once()
        swarm.assert_stages_agree()
        last = swarm[victim].replica.iterations[-1]
        assert (last.iteration, len(last.counted)) == (20, 2)


async def test_an_origin_that_starts_again_begins_nothing_in_iterations_that_are_over():
    """It goes through them for its place in the schedule; nobody is left to take a microbatch."""
    async with StageSwarm(three_stages(20), 2, at=12) as swarm:
        swarm.kill("0b")
        await swarm.sleep(0.5)
        again = await swarm.restart("0b", via=["0a", "1b"])
        await swarm.finished()
        swarm.assert_counted_once()
        assert not any(job is JobKind.ENTER and i < 10 for job, i, _ in again.replica.jobs)
        assert not [event for event in again.of_kind("dropped") if event["iteration"] < 10]
        late = {event["iteration"] for event in again.of_kind("late")}
        assert late >= set(range(1, 10))
        assert len(again.replica.iterations) == 20
        assert again.replica.iterations[-1].counted == {0, 1}


async def test_an_answer_that_is_lost_is_not_counted_twice():
    """2a has counted a microbatch when the link breaks; 1a asks 2b; 2a leaves its iteration out."""
    async with StageSwarm(three_stages(8), 2) as swarm:

        def cut(passing: Passing) -> bytes:
            swarm.network.cut("1a", "2a")
            return passing.message

        swarm.tap = once(Answered("1a", "2a", 3), cut)
        await swarm.until(lambda: swarm["0a"].trainer.step >= 6, 60)
        swarm.heal(["1a"], ["2a"])
        await swarm.ends_accounted()
        assert [e["iteration"] for e in swarm["2a"].of_kind("discarded")] == [3]
        assert swarm.total("discarded") == 1
        assert swarm.total("dropped") == 0
        assert len(swarm["2b"].replica.iterations[2].counted) == 4
        assert len(swarm["2a"].replica.iterations[-1].counted) == 2  # healed, it is asked again


async def test_a_last_stage_that_does_not_reach_the_origin_is_gone_round():
    async with StageSwarm(three_stages(8), 2, at=3) as swarm:
        swarm.network.cut("2a", "0a")
        await swarm.until(lambda: swarm["0a"].trainer.step >= 7, 120)
        swarm.heal(["2a"], ["0a"])
        await swarm.ends_accounted()
        assert swarm.total("dropped") == 0
        assert swarm.total("skipped") == 0
        assert sum(swarm.counted(2, 6).values()) == 4


async def test_a_damaged_call_is_made_to_another():
    async with StageSwarm(three_stages(4), 2) as swarm:

        def is_frame(p: Passing) -> bool:
            wanted = p.up and p.method == "Data/StageCall" and p.target == "1a"
            return wanted and pb.StageCallUp.FromString(p.message).HasField("frame")

        def spoil(p: Passing) -> bytes:
            up = pb.StageCallUp.FromString(p.message)
            payload = bytearray(up.frame.payload)
            payload[0] ^= 1
            up.frame.payload = bytes(payload)
            return up.SerializeToString()

        swarm.tap = once(is_frame, spoil)
        await swarm.ends_accounted()
        assert (swarm.total("rerouted"), swarm.total("dropped")) == (1, 0)
        assert sum(swarm.counted(1, 1).values()) == 4


@pytest.mark.parametrize("seed", range(2))
async def test_random_faults_lose_nothing_unsaid(seed):
    """Kills, freezes, cuts and restarts at random moments; then all that live finish and agree."""
    rng = random.Random(seed)
    problem = three_stages(
        30,
        routing=rng.choice(["full", "random", "stochastic"]),
        plan=replace(PRESETS["diloco"], inner_steps=8),
        seed=seed,
    )
    async with StageSwarm(problem, 2, at=2) as swarm:
        for _ in range(3):
            await swarm.sleep(rng.uniform(0.05, 1.0))
            victim = rng.choice(["0b", "1a", "1b", "2a", "2b"])
            match rng.choice(["restart", "freeze", "cut"]):
                case "restart":
                    swarm.kill(victim)
                    await swarm.sleep(rng.uniform(0.1, 2.0))
                    await swarm.restart(victim, via=["0a"])
                case "freeze":
                    swarm.freeze(victim)
                    await swarm.sleep(rng.uniform(0.5, 12.0))
                    swarm.thaw(victim)
                case "cut":
                    other = rng.choice([n for n in swarm.peers if n[0] != victim[0]])
                    if not swarm[other].killed:
                        swarm.cut([swarm[victim].address], [swarm[other].address])
                        await swarm.sleep(rng.uniform(0.1, 3.0))
                        swarm.heal([swarm[victim].address], [swarm[other].address])
        await swarm.finished(600)
        swarm.assert_counted_once()
        swarm.assert_stages_agree()
        for peer in swarm.alive:
            assert peer.trainer.step == problem.steps
        (visits,) = {sum(swarm.counted(stage, problem.steps).values()) for stage in range(3)}
        assert visits > 0
