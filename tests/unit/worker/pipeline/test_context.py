"""Memory for calls: in order of arrival, never above the limit, and nobody waits for ever."""

import asyncio

from hypothesis import given, strategies as st

from murmuration.worker.pipeline.context import MemoryBudget


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_holds_nothing_passes_those_that_wait():
    """A loss behind a deferred forward: it frees what the forward waits for."""
    budget = MemoryBudget(10)
    await budget.acquire(10)
    waiting = asyncio.create_task(budget.acquire(10))
    await let_others_run()
    async with asyncio.timeout(1):
        await budget.acquire(0)
    assert not waiting.done()
    budget.release(10)
    await waiting


async def test_who_gives_up_waiting_leaves_the_queue_to_others():
    budget = MemoryBudget(10)
    await budget.acquire(6)
    large, small = (asyncio.create_task(budget.acquire(size)) for size in (9, 4))
    await let_others_run()
    large.cancel()
    await let_others_run()
    assert small.done()
    assert budget.held_bytes == 10
    waiting = asyncio.create_task(budget.acquire(10))
    await let_others_run()
    budget.release(10)  # lets it in
    waiting.cancel()  # before it has run: it gives its memory back
    await let_others_run()
    assert waiting.cancelled()
    assert budget.held_bytes == 0


async def test_a_caller_that_keeps_what_it_holds_leaves_others_their_share():
    budget = MemoryBudget(12)
    greedy = [asyncio.create_task(budget.acquire(2, "greedy")) for _ in range(9)]
    await let_others_run()
    assert sum(task.done() for task in greedy) == 5  # the sixth is for another
    honest = [asyncio.create_task(budget.acquire(2, "honest")) for _ in range(3)]
    await let_others_run()
    assert sum(task.done() for task in honest) == 1
    for _ in range(2):  # down to its half: it has no more, though it waits first
        budget.release(2, "greedy")
        await let_others_run()
    assert sum(task.done() for task in greedy) == 5
    assert sum(task.done() for task in honest) == 2
    budget.release(2, "honest")
    await let_others_run()
    assert all(task.done() for task in honest)
    assert budget.held_bytes == 10
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


async def test_who_calls_no_more_has_no_share_two_iterations_later():
    budget = MemoryBudget(12)
    await budget.acquire(2, "gone")
    budget.release(2, "gone")
    mine = [asyncio.create_task(budget.acquire(2, "here")) for _ in range(5)]
    await let_others_run()
    assert sum(task.done() for task in mine) == 3
    budget.begin()
    await let_others_run()
    assert sum(task.done() for task in mine) == 3
    budget.begin()
    await let_others_run()
    assert all(task.done() for task in mine)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from("abc")), min_size=1, max_size=20),
    st.integers(1, 6),
)
def test_all_calls_of_all_callers_get_in(calls, kept):
    """Though mallory holds half of the memory at most, for ever; it may hold none at all if one
    call takes more than that."""

    async def scenario() -> None:
        budget, entered = MemoryBudget(12), list[int]()
        hostile = [asyncio.create_task(budget.acquire(kept, "mallory")) for _ in range(12)]
        await let_others_run()

        async def call(number: int, size: int, caller: str) -> None:
            await budget.acquire(size, caller)
            entered.append(number)
            assert budget.held_bytes <= budget.limit_bytes
            await asyncio.sleep(0)
            budget.release(size, caller)

        fitting = [(n, c) for n, c in calls if n <= 12 - kept * max(1, 12 // kept - 1)]
        async with asyncio.timeout(10):
            await asyncio.gather(*(call(n, size, c) for n, (size, c) in enumerate(fitting)))
        assert sorted(entered) == list(range(len(fitting)))
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)

    asyncio.run(scenario())
