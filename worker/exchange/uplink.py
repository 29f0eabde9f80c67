"""What goes out first: a reduction before a contribution, since somebody waits for it already.

On a link that both fill, a peer that is ahead would otherwise share its uplink between the answer
to a round and its contribution to the next one. The others would get the answer late, contribute
late, and the two sides would take turns in using the link from then on.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from worker.transport import Stream


class Uplink:
    """Shared by all streams of this peer. io thread only.

    Args:
        clock: monotonic seconds.
        patience_s: how long contributions wait for answers that make no progress.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float) -> None:
        self.blocked_s = 0.0  # for which the network did not take what was to be sent, over all
        self._clock, self._patience_s = clock, patience_s
        self._answers = 0
        self._progress_at = 0.0
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While a reduction is being sent."""
        self._answers += 1
        self._progress_at = self._clock()
        self._free.clear()
        try:
            yield
        finally:
            self._answers -= 1
            if self._answers == 0:
                self._free.set()

    async def answer(self, stream: Stream, message: bytes) -> None:
        """Sends a frame of a reduction. Raises TransportError."""
        await self._send(stream, message)
        self._progress_at = self._clock()

    async def contribute(self, stream: Stream, message: bytes) -> None:
        """Sends a frame of a contribution, after the answers. Raises TransportError."""
        while self._answers and (left_s := self._left_s()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._free.wait()
        await self._send(stream, message)

    def _left_s(self) -> float:
        return self._progress_at + self._patience_s - self._clock()

    async def _send(self, stream: Stream, message: bytes) -> None:
        began = self._clock()
        await stream.send(message)
        self.blocked_s += self._clock() - began
