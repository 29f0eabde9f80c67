"""Fragments in turn, overlapping the steps, and few bits: a peer out of step holds nobody up,
and after a fault all agree. Here a peer waits for one fragment while another waits for it with
the next, so that whoever falls out of step costs the grace in every round, unless it falls into
step again."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.membership.swim import MembershipConfig
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm

STEP_S = 0.2
PROBLEM = Problem(
    layers=(300, 200),
    steps=30,
    plan=Plan(inner_steps=2, fragments=2, overlap_steps=1, merge_alpha=0.5, codec="bf16"),
    step_s=dict.fromkeys("abcd", STEP_S),
)
DETECTION_S = MembershipConfig().detection_s(3)

Fault = Callable[[Swarm], Awaitable[None]]


async def late_joiner(swarm: Swarm) -> None:
    await swarm.join("d", via="a")


async def frozen(swarm: Swarm, seconds: float) -> None:
    swarm.freeze("c")
    await swarm.sleep(seconds)
    swarm.thaw("c")


async def crash(swarm: Swarm) -> None:
    swarm.kill("c")


async def cut_link(swarm: Swarm) -> None:
    swarm.network.cut("a", "b")
    await swarm.sleep(1)
    swarm.network.heal("a", "b")


async def restart(swarm: Swarm, after_s: float) -> None:
    swarm.kill("c")
    await swarm.sleep(after_s)
    await swarm.restart("c", via="a")


FAULTS: dict[str, tuple[Fault, float]] = {
    "late joiner": (late_joiner, 0.0),
    "short freeze": (partial(frozen, seconds=2), 2.0),
    "long freeze": (partial(frozen, seconds=10), 10.0),
    "crash": (crash, DETECTION_S),
    "cut link": (cut_link, 1.0),
    "restarted peer": (partial(restart, after_s=7), DETECTION_S),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_costs_time_once(name):
    """In all less than the quorum's grace once, on top of what the fault itself takes."""
    fault, costs_s = FAULTS[name]
    at_s, delay_s = (0.87, 0.05) if len(name) % 2 else (1.36, 0.1)
    async with Swarm(PROBLEM, "abc", delay_s=delay_s) as swarm:
        await swarm.sleep(at_s)
        await fault(swarm)
        await swarm.ends_equal(120)
        assert swarm.loop.time() < PROBLEM.steps * STEP_S + costs_s + RoundConfig().grace_s
