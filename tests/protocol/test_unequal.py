"""Peers of unequal speed: rounds are due everywhere at about the same time, work is what
counts."""

import asyncio
from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.plan import PRESETS, Plan
from murmuration.worker.wire import WireError
from tests.protocol.problem import Problem, Synthetic
from tests.protocol.swarm import Peer, Swarm
from tests.support.liar import says_it_is_fast

BY_SPEED = Plan(inner_steps=20, dylu=True, weighting="work")
PLANS = {
    "diloco": BY_SPEED,
    "streaming": replace(BY_SPEED, fragments=2, overlap_steps=5, merge_alpha=0.5, codec="e3m0"),
    "noloco": replace(PRESETS["noloco"], inner_steps=20, dylu=True, weighting="work"),
}
STEP_S = {"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.5}


def inner_steps(peer: Peer) -> int:
    return peer.trainer.metrics.inner_steps


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
async def test_a_slow_peer_makes_fewer_steps_and_holds_nobody_up(plan):
    problem = Problem(layers=(64, 32), steps=200, plan=plan, step_s=STEP_S)
    async with Swarm(problem, STEP_S) as swarm:
        await swarm.finished()
        for name in "abc":
            assert inner_steps(swarm[name]) == 200
            # The slow one's first period is a whole one: nobody knows its speed yet.
            assert swarm[name].trainer.metrics.stall_s < 0.15 * 40
        assert 40 <= inner_steps(swarm["d"]) <= 60
        assert all(peer.of_kind("round_failed") == [] for peer in swarm.alive)
        if plan.exchange == "mean":
            swarm.assert_equal()


async def test_what_one_says_of_its_speed_binds_nobody():
    problem = Problem(layers=(64, 32), steps=60, plan=BY_SPEED, step_s=STEP_S)
    async with Swarm(problem, STEP_S) as swarm:
        says_it_is_fast(swarm["a"].node)
        await swarm.finished()
        assert inner_steps(swarm["b"]) == inner_steps(swarm["c"]) == 60


async def test_a_peer_that_stands_still_holds_the_others_up_once():
    """For 5 s of each 20. What it has learned comes with a later round."""
    async with Swarm(Problem(layers=(64, 32), steps=650, plan=BY_SPEED), "abcd") as swarm:
        first, stalls = swarm["a"].trainer.metrics, []
        for _ in range(3):
            await swarm.sleep(16)
            swarm.freeze("d")
            await swarm.sleep(5)
            swarm.thaw("d")
            stalls.append(first.stall_s)
        assert stalls[0] < 2.0  # it reduces when it stops: 3.1 s were lost by that alone
        assert stalls[2] - stalls[1] < 0.15 * 10  # as much as without anybody who stands still
        assert "d" in swarm["a"].node.gossip.view.late
        await swarm.ends_equal()
        slow = swarm["d"].trainer
        assert slow.unsent_steps + slow.metrics.steps_lost == 0
        rounds = swarm["a"].of_kind("round")[20:]
        assert sum(event["contributors"] == 4 for event in rounds) > len(rounds) / 3


@pytest.mark.parametrize(
    ("change", "waited"),
    [("slow link", [5, 6, 7, 8]), ("half stand still", [5]), ("half leave", []), ("joins", [6])],
)
async def test_a_change_holds_the_others_up_in_few_rounds_and_names_nobody(change, waited):
    """A peer finds that its link is slow, and of two halves none goes on without the other."""
    first, second = "abcd", "efgh"
    pace = dict.fromkeys(first + second, 0.5)
    problem = Problem(layers=(72_000,), steps=240, plan=BY_SPEED, step_s=pace)
    async with Swarm(problem, first if change == "joins" else first + second) as swarm:
        await swarm.sleep(50.8 if change == "half leave" else 55)  # after a step or two of a round
        if change == "half leave":
            await asyncio.gather(*map(swarm.leave, second))
        if change == "slow link":
            swarm.links_mbps["d"] = 2.0
        for name in second if change == "half stand still" else ():
            swarm.freeze(name)
        for name in second if change == "joins" else ():
            await swarm.join(name, via=first)
        await swarm.sleep(2)
        for name in second if change == "half stand still" else ():
            swarm.thaw(name)
        await swarm.finished()
        for name in "abc":
            rounds = swarm[name].of_kind("round")
            assert not any(event["missed"] for event in rounds)
            assert {event["round"] for event in rounds if event["stall_s"] > 0.2} == {*waited}
            assert not swarm[name].warnings


async def test_means_are_by_work():
    """One round of one period, in which one peer makes twenty steps and the other ten."""
    plan = Plan(inner_steps=20, dylu=True, weighting="work", outer_lr=1.0, outer_momentum=0.0)
    problem = Problem(layers=(64,), steps=20, plan=plan)
    moved = {name: movement(problem, name, steps) for name, steps in (("a", 20), ("b", 10))}
    async with Swarm(problem, "ab") as swarm:
        swarm["b"].trainer.pace.stride = lambda: 2
        for steps in (0, 21, 2**31):
            with pytest.raises(WireError, match="inner steps; a period has 20"):
                swarm["a"].node.context.weight(steps)
        start = swarm["a"].trainer.states[0].anchor
        await swarm.ends_equal()
        assert (inner_steps(swarm["a"]), inner_steps(swarm["b"])) == (20, 10)
        expected = start + (20 * moved["a"] + 10 * moved["b"]) / 30
        assert torch.allclose(swarm["a"].trainer.states[0].anchor, expected, atol=1e-6)


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_the_others_are_given_steps_where_there_are_any(names):
    problem = Problem(steps=20, plan=Plan(inner_steps=20), step_s=dict.fromkeys(names, 2.0))
    async with Swarm(problem, names) as swarm:
        await swarm.sleep(10)
        await swarm.leave("a")
        assert len(swarm.peers.pop("a").of_kind("handed_in")) == len(names) - 1


@pytest.mark.parametrize("names", ["ab", "abcd"])
async def test_the_steps_of_a_peer_that_leaves_are_in_the_next_mean(names):
    """It leaves long before the others come to the round, and need not stay for it."""
    plan = Plan(inner_steps=20, outer_lr=1.0, outer_momentum=0.0)
    problem = Problem(layers=(64,), steps=20, plan=plan, step_s=dict.fromkeys(names, 2.0))
    async with Swarm(problem, names) as swarm:
        start = swarm["a"].trainer.states[0].anchor
        await swarm.sleep(10)
        began_s, last = swarm.loop.time(), names[-1]
        await swarm.leave(last)
        assert swarm.loop.time() - began_s < 2.0 + 1.0  # it ends the step that it is in
        await swarm.finished()
        steps = dict.fromkeys(names, 20) | {last: inner_steps(swarm.peers.pop(last))}
        assert 0 < steps[last] < 10
        moved = [movement(problem, name, taken) for name, taken in steps.items()]
        expected = start + torch.stack(moved).mean(dim=0)
        swarm.assert_equal()
        assert torch.allclose(swarm["a"].trainer.states[0].anchor, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fate", "at_s", "rounds"),
    [("dies", 49, [4, 3, 3]), ("stands still", 46, [4, 3, 4]), ("begins again", 40, [4, 4, 4])],
)
async def test_nobody_waits_for_a_peer_that_does_not_answer_nor_when_it_is_back(fate, at_s, rounds):
    """Inner steps do not go by speed. It goes just before a round, or for 20 s, or goes on 5 s
    later from the checkpoint of the last round, before the next one."""
    problem = Problem(steps=150, plan=Plan(inner_steps=50), step_s=dict.fromkeys("abcd", 0.5))
    async with Swarm(problem, "abcd") as swarm:
        await swarm.sleep(at_s)
        if fate == "stands still":
            swarm.freeze("d")
            await swarm.sleep(20)
            swarm.thaw("d")
        else:
            swarm.kill("d")
        if fate == "begins again":
            await swarm.sleep(5)
            again = await swarm.restart("d", "a", min_peers=None, before=swarm["d"])
            again.trainer.step = 50
        await swarm.ends_equal()
        assert swarm["a"].trainer.metrics.stall_s < 3.5
        assert [event["contributors"] for event in swarm["a"].of_kind("round")] == rounds
        assert fate == "dies" or swarm["d"].trainer.unsent_steps == 0


async def test_nobody_waits_for_a_peer_whose_state_has_parted_again():
    """It is cut off twice, and has ended a round alone each time. After the first time it has taken
    over the others' state, and rests before it does so again."""
    problem = Problem(steps=200, plan=Plan(inner_steps=50), step_s=dict.fromkeys("abcd", 0.5))
    async with Swarm(problem, "abcd") as swarm:
        await swarm.sleep(44)
        for _ in range(2):
            swarm.cut("d", "abc")
            await swarm.sleep(12)
            swarm.heal("d", "abc")
            await swarm.sleep(20)
        await swarm.ends_equal()
        assert swarm["a"].trainer.metrics.stall_s < 2.5


async def test_a_late_peer_asks_no_reducer_that_has_taken_the_round_over():
    """The first reducer of a shard has begun again from a checkpoint before the round, and has the
    round by the others' state. Another has stood still all the time, and contributes to it now."""
    problem = Problem(steps=150, plan=Plan(inner_steps=50), step_s=dict.fromkeys("abcde", 0.5))
    async with Swarm(problem, "abcde") as swarm:
        await swarm.sleep(40)
        swarm.kill("e")
        await swarm.sleep(8)
        swarm.freeze("d")
        await swarm.sleep(12)
        again = await swarm.restart("e", "a", min_peers=None, before=swarm["e"])
        again.trainer.step = 50
        await swarm.sleep(8)
        swarm.thaw("d")
        await swarm.ends_equal()
        assert max(swarm[name].trainer.metrics.stall_s for name in "abcd") < 8


def movement(problem: Problem, peer: str, steps: int) -> torch.Tensor:
    """How far so many inner steps take a peer by itself."""
    replica = Synthetic(problem, peer)
    (fragment,) = problem.fragments
    start = fragment.flatten(replica.parameters)
    for step in range(1, steps + 1):
        replica.inner_step(step, replica.backward(step))
    return fragment.flatten(replica.parameters) - start
