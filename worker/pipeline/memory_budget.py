"""Bytes that visits may hold between forward and backward."""

import asyncio
from collections import deque


class Room:
    """Lets in as much as fits, in order of arrival. io thread only.

    Only forwards ask: who holds no room is deferred, and backwards, which free it, never are; nor
    is what holds nothing. One visit always fits, however large, so that nothing waits for ever.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = self.peak_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Returns once so many bytes may be held."""
        if size and (self._waiting or not self._fits(size)):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give(size)
                else:
                    self._waiting.remove((size, turn))
                    self._let_in()
                raise
        else:
            self._hold(size)

    def give(self, size: int) -> None:
        """So many bytes are held no longer."""
        self.held_bytes -= size
        self._let_in()

    def _fits(self, size: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + size <= self.limit_bytes

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _let_in(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._hold(size)
                turn.set_result(None)
