"""A member that answers, says that it trains, and contributes nothing: rounds go on without it."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.membership import Health
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

PLAN = Plan(inner_steps=5)
NEVER_S = 1e9


@pytest.mark.parametrize("others", ["abc", "a"])
def test_who_never_contributes_is_waited_for_once(others: str) -> None:
    """Its training thread hangs, or it lies. A shard that it is to reduce goes to another."""

    async def scenario() -> None:
        pace = {**dict.fromkeys(others, 0.5), "d": NEVER_S}
        problem = Problem(plan=PLAN, steps=1_000_000, step_s=pace)
        async with Swarm(problem) as swarm:
            await swarm.start(*others, "d")
            first = swarm["a"]
            await swarm.until(lambda: min(first.versions) >= 3, 200)
            before = min(first.versions)
            await swarm.sleep(40)  # sixteen rounds of five steps
            assert min(first.versions) >= before + 14
            assert first.warned("d says that it trains")

    run(scenario())


def test_who_is_slow_for_a_while_comes_back() -> None:
    async def scenario() -> None:
        pace = {**dict.fromkeys("abc", 0.5), "d": 5.0}
        problem = Problem(plan=PLAN, steps=1_000_000, step_s=pace)
        async with Swarm(problem) as swarm:
            await swarm.start(*"abcd")
            first = swarm["a"]
            await swarm.until(lambda: "d" in first.node.gossip.me.idle, 200)
            pace["d"] = 0.5
            begun = len(first.of_kind("round"))
            await swarm.until(
                lambda: any(e["contributors"] == 4 for e in first.of_kind("round")[begun:]), 200
            )

    run(scenario())


def test_who_says_that_a_round_is_over_is_not_left_out() -> None:
    """One of two holds the other for gone, on a stranger's word, and goes on alone for a second."""

    async def scenario() -> None:
        problem = Problem(plan=PLAN, steps=1_000_000, step_s=dict.fromkeys("ab", 0.01))
        async with Swarm(problem) as swarm:
            await swarm.start(*"ab")
            first, second = swarm["a"], swarm["b"]
            await swarm.until(lambda: min(second.versions) >= 3, 200)
            own = second.node.gossip.me
            said = replace(own, health=Health.LEFT, incarnation=own.incarnation + 900)
            first.node.gossip.hear((said,), "b")
            await swarm.until(lambda: first.of_kind("round")[-1]["contributors"] == 1, 5)
            await swarm.until(
                lambda: all(p.of_kind("round")[-1]["contributors"] == 2 for p in swarm.alive), 10
            )

    run(scenario())
