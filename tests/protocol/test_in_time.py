"""A member takes its time, again and again: rounds go on, and the others say who it is."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.membership import Health, evidence
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.support.liar import LATE

# At the floor the payload takes 10 s: many rounds.
FLOOR = RoundConfig(floor_mbps=8e-6 * 1200 / 10)
PROBLEM = Problem(plan=Plan(inner_steps=5), steps=1_000_000, rounds=FLOOR)
ROUND_S = 0.55
MOST_SLOW = 3  # rounds that take more than three times as long as usual


@pytest.mark.parametrize(
    ("others", "lie"),
    [("abc", lie) for lie in LATE if not any(s in lie for s in ("7 s", "15 s", "does nothing"))]
    # Among three, once for what it gives and once for what it takes.
    + [("a", "contributes nothing"), ("ab", "contributes nothing"), ("ab", "reduces nothing")]
    + [("abcefgh", "flips whom it reaches")],
)
async def test_whoever_is_often_late_is_named_and_not_waited_for(others, lie):
    # That is slower than the floor.
    problem = replace(PROBLEM, rounds=RoundConfig()) if lie == "trickles" else PROBLEM
    async with Swarm(problem, [*others, "d"]) as swarm:
        honest = [swarm[name] for name in others]
        await swarm.until(lambda: min(swarm["a"].versions) >= 4, 60)
        LATE[lie](swarm["d"].node)
        slow, until_s = 0, swarm.loop.time() + 40
        while not all(peer.warnings for peer in honest):
            began, version = swarm.loop.time(), min(swarm["a"].versions)
            await swarm.until(lambda: min(swarm["a"].versions) > version, 30)  # noqa: B023
            slow += swarm.loop.time() - began > 3 * ROUND_S
            assert slow <= MOST_SLOW
            assert swarm.loop.time() < until_s
        before = min(swarm["a"].versions)
        await swarm.sleep(4)
        assert min(swarm["a"].versions) >= before + 0.9 * 4 / ROUND_S
        for peer in honest:
            (told,) = peer.warnings
            assert told.startswith("d ")
            assert peer.of_kind("adopted") == peer.of_kind("round_failed") == []


async def test_a_link_that_becomes_slow_is_waited_for():
    """A payload that has begun is waited for, in later rounds for as long as it took."""
    problem = replace(PROBLEM, layers=(40_000,), rounds=RoundConfig(floor_mbps=0.1))
    async with Swarm(problem, "abcd") as swarm:
        await swarm.until(lambda: min(swarm["a"].versions) >= 4, 60)
        swarm.links_mbps["d"] = 0.3
        await swarm.sleep(20)
        for peer in swarm.alive:
            assert not peer.warned("in vain")
            assert {event["contributors"] for event in peer.of_kind("round")} == {4}


async def test_a_peer_that_paused_is_waited_for_again(monkeypatch):
    """Its training stands still, and goes on."""
    monkeypatch.setattr(evidence, "_MARKED_S", 10.0)
    pace = dict(PROBLEM.step_s)
    async with Swarm(replace(PROBLEM, step_s=pace), "abcd") as swarm:
        first = swarm["a"]
        await swarm.until(lambda: min(first.versions) >= 4, 60)
        pace["d"] = 15.0
        await swarm.until(lambda: "d" in first.node.gossip.view.cut_off, 60)
        pace["d"] = 0.1
        await swarm.until(lambda: "d" not in first.node.gossip.view.cut_off, 40)
        begun = len(first.of_kind("round"))
        await swarm.sleep(3)
        assert {event["contributors"] for event in first.of_kind("round")[begun:]} == {4}


async def test_who_says_that_a_round_is_over_is_not_left_out():
    """One of two holds the other for gone, on a stranger's word, and goes on alone for a second."""
    problem = Problem(plan=PROBLEM.plan, steps=1_000_000, step_s=dict.fromkeys("ab", 0.01))
    async with Swarm(problem, "ab") as swarm:
        first, second = swarm["a"], swarm["b"]
        await swarm.until(lambda: min(second.versions) >= 3, 200)
        own = second.node.gossip.me
        said = replace(own, health=Health.LEFT, incarnation=own.incarnation + 900)
        first.node.gossip.hear((said,), "b")
        await swarm.until(lambda: first.of_kind("round")[-1]["contributors"] == 1, 5)
        await swarm.until(
            lambda: all(p.of_kind("round")[-1]["contributors"] == 2 for p in swarm.alive), 10
        )
