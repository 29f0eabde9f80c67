"""An event loop whose clock jumps to the next timer, and which can hold a peer still.

Nothing sleeps in real time: when no callback is ready, the clock moves on to the next one. Every
callback belongs to the peer whose context it runs in; while that peer is frozen its callbacks are
kept, in order, as by SIGSTOP.
"""

import asyncio
import contextvars
import gc
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PEER: contextvars.ContextVar[str | None] = contextvars.ContextVar("peer", default=None)


class Stalled(AssertionError):
    """Nothing is left to happen, or not in time."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. `problems` are the exceptions that nobody handled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.problems: list[str] = []
        self._parked: dict[str | None, list[asyncio.Handle]] = {}
        super().__init__()
        self.set_exception_handler(self._note_problem)

    def time(self) -> float:
        return self.now

    def freeze(self, peer: str) -> None:
        """From now on nothing of the peer runs."""
        self._parked.setdefault(peer, [])

    def thaw(self, peer: str) -> None:
        """What has become due meanwhile runs now, in order."""
        self._ready.extend(self._parked.pop(peer, ()))

    def thaw_all(self) -> None:
        for peer in list(self._parked):
            self.thaw(peer)

    def _run_once(self) -> None:
        """Runs what is ready; where nothing is, the clock jumps to the next timer."""
        self._forget_cancelled()
        ready, timers = self._ready, self._scheduled
        if not ready and not self._stopping:
            if not timers:
                raise Stalled(f"nothing is left to happen at {self.now:.3f} s")
            self.now += max(0.0, timers[0]._when - self.now)
        until = self.now + self._clock_resolution
        while timers and timers[0]._when < until:
            ready.append(self._pop())
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled and not self._parks(handle):
                handle._run()

    def _forget_cancelled(self) -> None:
        """Keeps the heap short: most timers are time-outs of what came in time."""
        if (count := len(self._scheduled)) > 100 and self._timer_cancelled_count > count / 2:
            self._scheduled = [each for each in self._scheduled if not each._cancelled]
            heapq.heapify(self._scheduled)
            self._timer_cancelled_count = 0
        while self._scheduled and self._scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            self._pop()

    def _pop(self) -> asyncio.TimerHandle:
        handle: asyncio.TimerHandle = heapq.heappop(self._scheduled)
        handle._scheduled = False
        return handle

    def _parks(self, handle: asyncio.Handle) -> bool:
        """Keeps the callback back if its peer is frozen."""
        parked = self._parked.get(handle._context.get(PEER)) if self._parked else None
        if parked is None:
            return False
        parked.append(handle)
        return True

    def _note_problem(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context['message']}: {context.get('exception')!r}")


def in_peer(peer: str) -> contextvars.Context:
    """A context whose callbacks belong to the peer."""
    context = contextvars.copy_context()
    context.run(PEER.set, peer)
    return context


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs to the end on a fresh virtual clock; an exception that nobody handled fails the test."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        result = runner.run(work)
        gc.collect()  # tasks report what nobody awaited when they go
        problems = loop.problems
    assert not problems, problems
    return result
