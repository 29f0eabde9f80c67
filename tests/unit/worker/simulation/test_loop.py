"""The loop on the virtual clock: order, timers, peers that are dead or frozen, and the end."""

import asyncio
from random import Random

from murmuration.worker.simulation import Scenario
from murmuration.worker.simulation.clock import Clock
from murmuration.worker.simulation.faults import Crash, Freeze
from murmuration.worker.simulation.loop import context_of, running
from murmuration.worker.simulation.swarm import SimulatedSwarm


class Bystander:
    """A peer to which things happen."""

    def viewed(self, changed: object) -> None: ...

    def died(self) -> None: ...

    def broken(self, stream: object) -> None: ...


def order(shuffle: Random | None) -> list[int]:
    clock, seen = Clock(), list[int]()
    with running(clock, lambda peer, act: act(), shuffle) as loop:
        for number in range(20):
            loop.call_soon(seen.append, number)
        clock.run(lambda: False, 1.0)
    return seen


def test_what_is_ready_runs_in_order_or_in_one_that_a_seed_draws() -> None:
    assert order(None) == list(range(20))
    assert order(Random(1)) == order(Random(1)) != order(Random(2))
    assert sorted(order(Random(1))) == list(range(20))


def test_time_goes_on_to_the_next_timer_and_takes_none() -> None:
    clock, seen = Clock(), list[float]()

    async def work() -> None:
        await asyncio.sleep(1000.0)
        seen.append(clock.now)
        try:
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(clock.now)

    with running(clock, lambda peer, act: act()) as loop:
        task = loop.create_task(work())
        clock.run(task.done, 1e6)
    assert seen == [1000.0, 1005.0]


def test_the_dead_do_nothing_and_the_frozen_when_they_wake() -> None:
    swarm = SimulatedSwarm(Scenario(peers=3), (Crash(1, 1.5), Freeze(2, 1.5, 10.0)))
    swarm.endpoints = [Bystander()] * 3
    seen: list[tuple[int, float]] = []

    async def work(peer: int) -> None:
        while True:
            await asyncio.sleep(1.0)
            seen.append((peer, swarm.clock.now))

    with running(swarm.clock, swarm.act) as loop:
        tasks = [loop.create_task(work(peer), context=context_of(peer)) for peer in range(3)]
        swarm.clock.run(lambda: swarm.clock.now >= 13, 20.0)
    assert [time for peer, time in seen if peer == 0] == [float(n) for n in range(1, 14)]
    assert [time for peer, time in seen if peer == 1] == [1.0]
    assert [time for peer, time in seen if peer == 2] == [1.0, 11.5, 12.5]
    assert all(task.cancelled() for task in tasks)


def test_what_nobody_handles_is_noted() -> None:
    clock = Clock()

    async def work() -> None:
        raise ValueError("no")

    with running(clock, lambda peer, act: act()) as loop:
        loop.call_soon(lambda: 1 / 0)
        task = loop.create_task(work())
        clock.run(lambda: False, 1.0)
        assert ["division" in problem for problem in loop.problems] == [True]
        assert isinstance(task.exception(), ValueError)
