"""Bytes that visits may hold between forward and backward."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable

from worker.pipeline.config import Dropped
from worker.pipeline.profile import Measuring
from worker.training.inbox import JobKind, StageJob, StageJobDone, ToTrain


class MemoryBudget:
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


_TIMED = {
    JobKind.FORWARD: "forward_s",
    JobKind.ENTER: "forward_s",
    JobKind.BACKWARD: "backward_s",
    JobKind.LEAVE: "backward_s",
    JobKind.LOSS: "loss_s",
}


class ComputeQueue:
    """io thread only.

    Args:
        post: takes a message for the train thread.
        measuring: learns how long jobs take.
    """

    def __init__(self, post: Callable[[ToTrain], None], measuring: Measuring) -> None:
        self._post, self._measuring = post, measuring
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[StageJobDone]] = {}

    async def do(
        self,
        job: JobKind,
        iteration: int,
        microbatch: int,
        shape: tuple[int, ...] = (),
        values: memoryview | None = None,
        gradient: memoryview | None = None,
    ) -> StageJobDone:
        """Has the train thread do one job. Raises Dropped: its result is not to be used."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._post(StageJob(number, iteration, job, microbatch, shape, values, gradient))
        try:
            worked: StageJobDone = await answer
        finally:
            self._open.pop(number, None)
        if worked.problem:
            raise Dropped(worked.problem)
        self._measuring.computed(_TIMED[job], worked.seconds)
        if job is JobKind.ENTER or job is JobKind.FORWARD:
            self._measuring.visit_bytes(len(given(worked)))
        return worked

    def worked(self, message: StageJobDone) -> None:
        """A job is done."""
        answer = self._open.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)


def given(worked: StageJobDone) -> memoryview:
    """The values of a job that has some."""
    assert worked.values is not None
    return worked.values
