"""A member lies about who is to contribute: no group changes by its word alone."""

from murmuration.algorithms.plan import Plan
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.false_means import closing_falsely
from tests.support.liar import with_ghosts

PROBLEM = Problem(plan=Plan(inner_steps=5), steps=1_000_000)


def test_a_liar_that_names_ghosts_slows_nobody() -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start(*"abcd")
            first = swarm["a"]
            await swarm.until(lambda: min(first.versions) >= 3, 60)
            before = min(first.versions)
            with closing_falsely("d", with_ghosts):
                await swarm.sleep(30)
            assert min(first.versions) >= before + 0.9 * 30 / 0.55
            assert set("abcd") <= set(first.trainer.states[0].group)
            assert len(first.trainer.states[0].group) <= 8
            await swarm.join("e", via="a")
            await swarm.until(lambda: "e" in first.trainer.states[0].group, 20)

    run(scenario())
