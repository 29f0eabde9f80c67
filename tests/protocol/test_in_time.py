"""A member takes its time, again and again: rounds go on, and the others say who it is."""

from dataclasses import replace

import pytest

from murmuration.algorithms.plan import Plan
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.liar import LATE

PROBLEM = Problem(plan=Plan(inner_steps=5), steps=1_000_000)
ROUND_S = 0.55


@pytest.mark.parametrize(
    ("others", "lie"),
    [("abc", lie) for lie in LATE]
    # Among three, once for what it gives and once for what it takes.
    + [("ab", "contributes nothing"), ("ab", "reduces nothing")],
)
def test_whoever_is_late_again_and_again_is_named_and_not_waited_for(others: str, lie: str) -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start(*others, "d")
            honest = [swarm[name] for name in others]
            await swarm.until(lambda: min(swarm["a"].versions) >= 4, 60)
            LATE[lie](swarm["d"].node)
            await swarm.until(lambda: all(peer.warnings for peer in honest), 30)
            before = min(swarm["a"].versions)
            await swarm.sleep(11)
            assert min(swarm["a"].versions) >= before + 0.9 * 11 / ROUND_S
            for peer in honest:
                (told,) = peer.warnings
                assert told.startswith("d ")
                assert peer.of_kind("adopted") == peer.of_kind("round_failed") == []

    run(scenario())


def test_a_peer_that_paused_is_waited_for_again() -> None:
    """Its training stands still for half a minute, and goes on."""

    async def scenario() -> None:
        pace = dict(PROBLEM.step_s)
        async with Swarm(replace(PROBLEM, step_s=pace)) as swarm:
            await swarm.start(*"abcd")
            first = swarm["a"]
            await swarm.until(lambda: min(first.versions) >= 4, 60)
            pace["d"] = 30.0
            await swarm.until(lambda: "d" in first.node.gossip.view.cut_off, 60)
            pace["d"] = 0.1
            await swarm.until(lambda: "d" not in first.node.gossip.view.cut_off, 75)
            begun = len(first.of_kind("round"))
            await swarm.sleep(6)
            assert {event["contributors"] for event in first.of_kind("round")[begun:]} == {4}

    run(scenario())
