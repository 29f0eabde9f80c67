"""Room for visits: in order of arrival, never above the limit, and nobody waits for ever."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worker.pipeline.memory_budget import MemoryBudget


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_fits_goes_in_and_what_does_not_waits_its_turn() -> None:
    async def scenario() -> None:
        room, entered = MemoryBudget(10), []

        async def enter(name: str, size: int) -> None:
            await room.take(size)
            entered.append(name)

        tasks = [
            asyncio.create_task(enter(name, size)) for name, size in (("a", 6), ("b", 6), ("c", 1))
        ]
        await settle()
        assert entered == ["a"]  # c would fit, but b came first
        room.give(6)
        await settle()
        assert entered == ["a", "b", "c"]
        assert (room.held_bytes, room.peak_bytes) == (7, 7)
        await asyncio.gather(*tasks)

    run(scenario())


def test_what_holds_nothing_passes_those_that_wait() -> None:
    """A loss behind a deferred forward: it frees what the forward waits for."""

    async def scenario() -> None:
        room = MemoryBudget(10)
        await room.take(10)
        waiting = asyncio.create_task(room.take(10))
        await settle()
        async with asyncio.timeout(1):
            await room.take(0)
        assert not waiting.done()
        room.give(10)
        await waiting

    run(scenario())


def test_one_visit_fits_however_large() -> None:
    async def scenario() -> None:
        room = MemoryBudget(10)
        async with asyncio.timeout(1):
            await room.take(50)
        assert room.held_bytes == 50

    run(scenario())


def test_who_gives_up_waiting_leaves_the_queue_to_others() -> None:
    async def scenario() -> None:
        room = MemoryBudget(10)
        await room.take(6)
        large, small = asyncio.create_task(room.take(9)), asyncio.create_task(room.take(4))
        await settle()
        large.cancel()
        await settle()
        assert small.done()
        assert room.held_bytes == 10

    run(scenario())


def test_who_is_let_in_while_giving_up_gives_its_room_back() -> None:
    async def scenario() -> None:
        room = MemoryBudget(10)
        await room.take(10)
        waiting = asyncio.create_task(room.take(10))
        await settle()
        room.give(10)  # lets it in
        waiting.cancel()  # before it has run
        await settle()
        assert waiting.cancelled()
        assert room.held_bytes == 0

    run(scenario())


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20))
def test_everyone_gets_in_and_the_limit_holds(sizes: list[int]) -> None:
    async def scenario() -> None:
        room, entered = MemoryBudget(12), []

        async def visit(number: int, size: int) -> None:
            await room.take(size)
            entered.append(number)
            await asyncio.sleep(0)
            room.give(size)

        await asyncio.gather(*(visit(n, size) for n, size in enumerate(sizes)))
        large = [n for n, size in enumerate(sizes) if size]
        assert [n for n in entered if sizes[n]] == large  # in order of arrival
        assert room.held_bytes == 0
        assert room.peak_bytes <= 12

    run(scenario())
