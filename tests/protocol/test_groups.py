"""A member lies about who contributes, or about who is to: no group changes by its word alone."""

from collections.abc import Callable

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.allreduce.closing import DueMean
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run
from tests.support.liar import closes, only_itself, with_ghosts

PROBLEM = Problem(plan=Plan(inner_steps=5), steps=1_000_000)


@pytest.mark.parametrize("lie", [only_itself, with_ghosts], ids=["only itself", "ghosts"])
def test_a_liar_leaves_nobody_out_and_slows_nobody(lie: Callable[[DueMean, str], DueMean]) -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start(*"abcd")
            first = swarm["a"]
            await swarm.until(lambda: min(first.versions) >= 3, 60)
            closes(swarm["d"].node, lie)
            before = min(first.versions)
            await swarm.sleep(30)
            assert min(first.versions) >= before + 0.9 * 30 / 0.55
            assert set("abcd") <= set(first.trainer.states[0].group)
            assert len(first.trainer.states[0].group) <= 8
            await swarm.join("e", via="a")
            await swarm.until(lambda: "e" in first.trainer.states[0].group, 20)

    run(scenario())
