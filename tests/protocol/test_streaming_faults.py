"""Fragments in turn, overlapping the steps: a peer out of step must not hold the others up.

Here a peer waits for one fragment while another waits for it with the next, so that whoever falls
out of step costs the grace in every round, unless it falls into step again.
"""

from collections.abc import Awaitable, Callable

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.worker.exchange.round_context import RoundConfig
from murmuration.worker.membership.swim import MembershipConfig
from tests.protocol.problem import Problem
from tests.protocol.swarm import Swarm
from tests.protocol.taps import Passing, spoiled_frame
from tests.protocol.virtual_time import run

STEP_S = 0.2
PROBLEM = Problem(
    layers=(300, 200),
    steps=40,
    plan=Plan(inner_steps=2, fragments=2, overlap_steps=1, merge_alpha=0.5, codec="bf16"),
    step_s=dict.fromkeys("abcd", STEP_S),
)

Fault = Callable[[Swarm], Awaitable[None]]


async def nothing(swarm: Swarm) -> None:
    pass


async def late_joiner(swarm: Swarm) -> None:
    await swarm.join("d", via="a")


async def short_freeze(swarm: Swarm) -> None:
    swarm.freeze("c")
    await swarm.sleep(2)
    swarm.thaw("c")


async def long_freeze(swarm: Swarm) -> None:
    swarm.freeze("c")
    await swarm.sleep(10)
    swarm.thaw("c")


async def crash(swarm: Swarm) -> None:
    swarm.kill("c")


async def short_cut(swarm: Swarm) -> None:
    swarm.network.cut("a", "b")
    await swarm.sleep(1)
    swarm.network.heal("a", "b")


async def damaged_frame(swarm: Swarm) -> None:
    spoiled = False

    def tap(passing: Passing) -> bytes:
        nonlocal spoiled
        if spoiled or not passing.up or passing.body != "frame":
            return passing.message
        spoiled = True
        return spoiled_frame(passing.message)

    swarm.tap = tap


async def restarted_peer(swarm: Swarm) -> None:
    swarm.kill("c")
    await swarm.sleep(7)
    await swarm.restart("c", via="a")


FAULTS: dict[str, tuple[Fault, float]] = {
    "none": (nothing, 0.0),
    "late joiner": (late_joiner, 0.0),
    "short freeze": (short_freeze, 2.0),
    "long freeze": (long_freeze, 10.0),
    "crash": (crash, MembershipConfig().detection_s(3)),
    "short cut": (short_cut, 1.0),
    "damaged frame": (damaged_frame, 0.0),
    "restarted peer": (restarted_peer, MembershipConfig().detection_s(3)),
}


@pytest.mark.parametrize(("at_s", "delay_s"), [(0.87, 0.05), (1.36, 0.1)])
@pytest.mark.parametrize(("fault", "costs_s"), FAULTS.values(), ids=FAULTS)
def test_a_fault_costs_time_once(fault: Fault, costs_s: float, at_s: float, delay_s: float) -> None:
    """In all less than the quorum's grace once, on top of what the fault itself takes."""

    async def scenario() -> None:
        async with Swarm(PROBLEM, delay_s) as swarm:
            await swarm.start(*"abc")
            await swarm.sleep(at_s)
            await fault(swarm)
            await swarm.finished(120)
            swarm.assert_equal()
            assert swarm.loop.time() < PROBLEM.steps * STEP_S + costs_s + RoundConfig().grace_s

    run(scenario())
