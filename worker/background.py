"""Runs things beside a coroutine: others, heavy work off the loop, a loop on its own thread."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from murmuration.protos.events import Log, new_event

if TYPE_CHECKING:
    from murmuration.worker.exchange.view import View

T = TypeVar("T")

_LOOK_S = 1.0
_LATE_S = 10.0
_END_S = 10.0


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


class LoopThread:
    """An event loop on a thread of its own: the caller's may have one that runs, as in a notebook.
    Args: log: is warned, once, of an answer that is late; failed: is called on that thread with
    what has ended it."""

    def __init__(
        self, name: str, log: Log, failed: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        self._log, self._failed, self._was_late = log, failed, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._close: Callable[[], None] | None = None  # called on the loop, ends it in good order
        self._ready: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> str:
        """Returns what the thread says once it is ready. Raises what it says instead."""
        self._thread.start()
        return self._ready.result()

    def ask(self, question: Callable[[], T]) -> T:
        """Calls a function on the loop's thread, and waits as long as the thread lives: a machine
        may be busy. Raises RuntimeError: it has ended, and says why."""
        if threading.current_thread() is self._thread:  # as of a handler of logging
            return question()

        async def answer() -> T:
            return question()

        return self._wait(answer(), tells=True)

    def do(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """Runs a coroutine on the loop, and waits for it; KeyboardInterrupt ends the coroutine.
        Raises TimeoutError; RuntimeError: the thread has ended."""

        async def limited() -> T:
            async with asyncio.timeout(timeout_s):
                return await work()

        return self._wait(limited())

    def _wait(self, work: Coroutine[Any, Any, T], *, tells: bool = False) -> T:
        assert self._loop is not None, "start() comes first"
        try:
            answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise self._end() from error
        late_at = time.monotonic() + _LATE_S
        try:
            while not concurrent.futures.wait([answer], _LOOK_S).done:
                if not self._thread.is_alive():
                    work.close()
                    raise self._end()
                if tells and not self._was_late and time.monotonic() > late_at:
                    self._was_late = True
                    text = f"{self._thread.name} has not answered for {_LATE_S:g} s: this machine "
                    text += "is busy, or the process was stopped; it is waited for"
                    self._log(new_event("warning", text=text))
        except BaseException:
            answer.cancel()
            raise
        if answer.cancelled():
            raise self._end()
        return answer.result()

    def _end(self) -> RuntimeError:
        self._thread.join(timeout=_LATE_S)  # it says why when it has ended
        why = f": {self._ended}" if self._ended is not None else ""
        return RuntimeError(f"{self._thread.name} has ended{why}")

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # handed to other threads, whatever it is
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._ended = error
            if not self._ready.done():
                self._ready.set_exception(error)
            self._failed(error)

    def close(self) -> None:
        """Waits for the thread to end, if it was started; a peer leaves the swarm before."""
        if self._thread.ident is None:
            return
        if self._loop is not None and self._close is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended meanwhile: its thread only says so yet
                self._loop.call_soon_threadsafe(self._close)
        self._thread.join(_END_S)

    async def _main(self) -> None:
        closing = asyncio.Event()
        self._loop, self._close = asyncio.get_running_loop(), closing.set
        self._ready.set_result("")
        await closing.wait()
