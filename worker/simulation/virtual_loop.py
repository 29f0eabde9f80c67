"""An asyncio loop whose clock jumps to what comes next, on which the live code of all peers runs.

What is ready runs at once, and then the clock goes on to the next act or timer; of those at one
time the first that was asked for comes first. Every callback belongs to the peer in whose context
it was asked for: that of a dead peer never runs, that of a frozen one when it thaws.
"""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

Act = Callable[[], object]

_PEER: contextvars.ContextVar[Hashable | None] = contextvars.ContextVar("peer", default=None)


class Stalled(AssertionError):
    """Nothing is left to happen."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Starts at 0 s. `problems` are the exceptions that nobody handled. Where there is a `shuffle`,
    it draws which of the ready callbacks is next; else it is the one that has waited longest."""

    _stopping: bool  # of asyncio's

    def __init__(self, shuffle: Random | None = None) -> None:
        super().__init__()
        self.now, self.events, self.problems = 0.0, 0, list[str]()
        self._shuffle = shuffle
        self._heap: list[tuple[float, int, Act]] = []
        self._asked = 0
        self._due: deque[tuple[Hashable | None, asyncio.Handle]] = deque()
        self._dead, self._parked = set[Hashable](), dict[Hashable, list[Act]]()
        self.set_exception_handler(self._note_problem)

    def __del__(self) -> None:
        """A loop that was never closed holds nothing of the machine's."""

    def time(self) -> float:
        return self.now

    def after(self, delay_s: float, act: Act) -> None:
        self.at(self.now + delay_s, act)

    def at(self, time_s: float, act: Act) -> None:
        """Does `act` at that time, which is not past."""
        self._asked += 1
        heapq.heappush(self._heap, (time_s, self._asked, act))

    def call_soon(  # type: ignore[override]  # typeshed's is generic in the arguments
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append((_peer_of(context), handle))
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.at(max(when, self.now), partial(self._due.append, (_peer_of(context), handle)))
        return handle

    def act(self, peer: Hashable, act: Act) -> None:
        """Does something at a peer: not if it is dead, and not before it thaws."""
        if (parked := self._parked.get(peer)) is not None:
            parked.append(act)
        elif peer not in self._dead:
            act()

    def freeze(self, peer: Hashable) -> None:
        self._parked.setdefault(peer, [])

    def thaw(self, peer: Hashable) -> None:
        """Runs what has become due meanwhile next, in order."""
        for act in self._parked.pop(peer, ()):
            self.at(self.now, partial(self.act, peer, act))

    def kill(self, peer: Hashable) -> None:
        self._dead.add(peer)
        self._parked.pop(peer, None)

    def settle(self) -> None:
        """Runs what is ready, and what that makes ready."""
        due, shuffle = self._due, self._shuffle
        while due and not self._stopping:
            if shuffle is not None:
                due.rotate(-shuffle.randrange(len(due)))
            peer, handle = due.popleft()
            if peer in self._parked:
                self._parked[peer].append(partial(_run, handle))
            elif peer not in self._dead:
                _run(handle)

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Goes on until that holds, nothing is left to do, or the time is over."""
        self.settle()
        while self._heap and self._heap[0][0] <= limit_s and not until():
            self._next()
            self.settle()

    def _run_once(self) -> None:
        """As the loops of asyncio have it, for `run_forever`."""
        if not self._due and not self._stopping:
            if not self._heap:
                raise Stalled(f"nothing is left to happen at {self.now:.3f} s")
            self._next()
        self.settle()

    def close(self) -> None:
        """Ends all tasks, of whatever peer."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        while self._due:
            _run(self._due.popleft()[1])
        super().close()

    def _next(self) -> None:
        self.now, _, act = heapq.heappop(self._heap)
        self.events += 1
        act()

    def _note_problem(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context['message']}: {context.get('exception')!r}")


@contextmanager
def running(loop: VirtualLoop) -> Iterator[VirtualLoop]:
    """Whatever the loop does runs on it, without a task around all; at the end it is closed."""
    asyncio._set_running_loop(loop)
    try:
        yield loop
    finally:
        loop.close()
        asyncio._set_running_loop(None)


def context_of(peer: Hashable) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(_PEER.set, peer)
    return context


def _peer_of(context: contextvars.Context | None) -> Hashable | None:
    return _PEER.get() if context is None else context.get(_PEER)


def _run(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()
