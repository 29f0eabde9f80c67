"""Few bits, whose errors are lost or kept, three fragments, overlap: after faults all agree."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch

from murmuration.algorithms.plan import Plan
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.virtual_time import run

STEP_S = 0.2
STEPS = 90
MERGING = Plan(
    inner_steps=6,
    fragments=3,
    overlap_steps=2,
    merge_alpha=0.5,
    codec="e3m0",
    reduction_codec="int8",
)
PLANS = {
    "merging": MERGING,
    "keep": replace(MERGING, merge_alpha=0.0, codec="sign", merge="keep", consensus=True),
}

Fault = Callable[[Swarm], Awaitable[None]]


async def crash(swarm: Swarm) -> None:
    swarm.kill("c")


async def restart(swarm: Swarm) -> None:
    swarm.kill("c")
    await swarm.sleep(3)
    await swarm.restart("c", via="a")


async def short_cut(swarm: Swarm) -> None:
    swarm.network.cut("a", "b")
    await swarm.sleep(1.5)
    swarm.network.heal("a", "b")


async def frozen(swarm: Swarm) -> None:
    """Long enough to be given up for dead, and to come back to a swarm that has gone on."""
    swarm.freeze("c")
    await swarm.sleep(12)
    swarm.thaw("c")


FAULTS = {"crash": crash, "restart": restart, "cut link": short_cut, "freeze": frozen}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_after_a_fault_all_agree_and_rounds_go_on(fault: Fault, plan: Plan) -> None:
    problem = Problem(
        layers=(300, 200, 150), steps=STEPS, plan=plan, step_s=dict.fromkeys("abcd", STEP_S)
    )

    async def scenario() -> None:
        async with Swarm(problem) as swarm:
            await swarm.start(*"abc")
            await swarm.until(lambda: swarm["a"].versions[0] >= 3, 30)
            await fault(swarm)
            before = swarm["a"].versions
            await swarm.finished(120)
            swarm.assert_equal()
            assert min(now - was for was, now in zip(before, swarm["a"].versions, strict=True)) >= 2
            assert min(swarm["a"].versions) >= STEPS // plan.inner_steps - 1
            there = {"c"} & {peer.name for peer in swarm.alive}
            assert swarm["a"].of_kind("round")[-1]["contributors"] == 2 + len(there)
            for peer in swarm.alive:
                for fragment in peer.trainer.fragments:
                    assert torch.isfinite(fragment.local).all()
                    assert (fragment.in_flight, fragment.failed) == (None, False)

    run(scenario())
