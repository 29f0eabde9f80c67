"""Runs what a coroutine starts beside itself: other coroutines, and heavy work off the loop."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from murmuration.worker.exchange.view import View

T = TypeVar("T")


class Offload(Protocol):
    """Runs a function of numpy and torch calls off the loop."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


def workers(threads: int = 2) -> Offload:
    """Works on so many threads. Each call of torch has Python's lock for a moment: a training loop
    that gives a card its work would stand in line for it with many threads at once."""
    pool = concurrent.futures.ThreadPoolExecutor(threads, "murmur-work")

    async def offload(work: Callable[[], T], /) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    return offload


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


class Tasks:
    """Background tasks whose failures are never silent, and which all end together."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # they end in order

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        await cancel(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a background task failed", "exception": error, "task": task}
            )


class Component(Protocol):
    """A part of the node, which answers what matters to it. io thread only."""

    def on_view(self, view: "View") -> None:
        """Membership has changed."""
        return

    def tick(self) -> None:
        """Time passes."""
        return

    async def close(self) -> None:
        """The node ends."""
        return
