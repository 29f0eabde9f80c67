"""An asyncio loop on the virtual clock, on which the live coroutines of all peers run.

What is ready runs at once, and then the clock goes on. Every callback belongs to the peer in whose
context it was asked for: that of a dead peer never runs, that of a frozen one when it wakes.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

from murmuration.worker.simulation.clock import Act, Clock

_PEER: contextvars.ContextVar[int | None] = contextvars.ContextVar("peer", default=None)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs while the clock does; closing it ends all tasks.

    Args:
        clock: virtual time.
        act: does something at a peer, if and when it lives.
        shuffle: draws which of the ready callbacks is next; without it, the one that has waited
            longest.
    """

    def __init__(
        self, clock: Clock, act: Callable[[int, Act], None], shuffle: Random | None = None
    ) -> None:
        super().__init__()
        self._clock, self._act, self._shuffle = clock, act, shuffle
        self._due: deque[tuple[int | None, asyncio.Handle]] = deque()
        self.problems: list[str] = []
        self.set_exception_handler(self._note_problem)
        clock.settle = self._settle

    def time(self) -> float:
        return self._clock.now

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
        entry = (_peer_of(context), handle)
        self._clock.at(max(when, self.time()), lambda: self._due.append(entry))
        return handle

    def close(self) -> None:
        """Ends all tasks, of whatever peer."""
        for task in asyncio.all_tasks(self):
            task.cancel()
        while self._due:
            _run(self._due.popleft()[1])
        super().close()

    def _settle(self) -> None:
        due, shuffle = self._due, self._shuffle
        while due:
            if shuffle is not None:
                due.rotate(-shuffle.randrange(len(due)))
            peer, handle = due.popleft()
            if peer is None:
                _run(handle)
            else:
                self._act(peer, partial(_run, handle))

    def _note_problem(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context['message']}: {context.get('exception')!r}")


@contextmanager
def running(
    clock: Clock, act: Callable[[int, Act], None], shuffle: Random | None = None
) -> Iterator[SimulatedLoop]:
    """A loop that whatever the clock does runs on; its arguments are those of `SimulatedLoop`."""
    loop = SimulatedLoop(clock, act, shuffle)
    asyncio._set_running_loop(loop)
    try:
        yield loop
    finally:
        loop.close()
        asyncio._set_running_loop(None)


def context_of(peer: int) -> contextvars.Context:
    """A context whose callbacks belong to the peer."""
    context = contextvars.copy_context()
    context.run(_PEER.set, peer)
    return context


def _peer_of(context: contextvars.Context | None) -> int | None:
    return _PEER.get() if context is None else context.get(_PEER)


def _run(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()
