"""An event loop whose clock jumps to the next timer, and which can hold a peer still.

Nothing sleeps in real time: when no callback is ready, the clock moves on to the next one. Every
callback belongs to the peer whose context it runs in; while that peer is frozen its callbacks are
kept, in order, as by SIGSTOP.
"""

import asyncio
import contextvars
import gc
import selectors
from collections.abc import Callable, Coroutine
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
        self._parked: dict[str, list[_Gated]] = {}
        super().__init__(_Selector(self))
        self.set_exception_handler(self._note_problem)

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        gated = _Gated(self, callback, args, context)
        gated.handle = super().call_soon(gated, context=context)
        return gated.handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        gated = _Gated(self, callback, args, context)
        gated.handle = handle = super().call_at(when, gated, context=context)
        return handle

    def freeze(self, peer: str) -> None:
        """From now on nothing of the peer runs."""
        self._parked.setdefault(peer, [])

    def thaw(self, peer: str) -> None:
        """What has become due meanwhile runs now, in order."""
        for gated in self._parked.pop(peer, ()):
            super().call_soon(gated, context=gated.context)

    def thaw_all(self) -> None:
        for peer in list(self._parked):
            self.thaw(peer)

    def parks(self, gated: "_Gated") -> bool:
        """Keeps the callback back if its peer is frozen."""
        parked = self._parked.get(gated.peer) if gated.peer else None
        if parked is None:
            return False
        parked.append(gated)
        return True

    def _note_problem(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context['message']}: {context.get('exception')!r}")


class _Gated:
    """A callback that waits while its peer is frozen."""

    __slots__ = ("args", "callback", "context", "handle", "loop", "peer")

    def __init__(
        self,
        loop: VirtualLoop,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.loop, self.callback, self.args, self.context = loop, callback, args, context
        self.peer = PEER.get() if context is None else context.get(PEER)
        if context is None:
            self.context = contextvars.copy_context()
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        cancelled = self.handle is not None and self.handle.cancelled()  # while it was kept back
        if not cancelled and not self.loop.parks(self):
            self.callback(*self.args)


class _Selector(selectors.DefaultSelector):
    """Instead of waiting it moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled(f"nothing is left to happen at {self._loop.now:.3f} s")
        if timeout > 0:
            self._loop.now += timeout
        return []


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
