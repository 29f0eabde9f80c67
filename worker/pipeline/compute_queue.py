"""Where the I/O thread leaves computations for the train thread, and finds their results."""

import asyncio
import itertools
from collections.abc import Callable

from worker.pipeline.errors import Dropped
from worker.pipeline.profile import Measuring
from worker.training.inbox import Job, StageWork, StageWorked, ToTrain

_TIMED = {
    Job.FORWARD: "forward_s",
    Job.ENTER: "forward_s",
    Job.BACKWARD: "backward_s",
    Job.LEAVE: "backward_s",
    Job.LOSS: "loss_s",
}


class Desk:
    """io thread only.

    Args:
        post: takes a message for the train thread.
        measuring: learns how long jobs take.
    """

    def __init__(self, post: Callable[[ToTrain], None], measuring: Measuring) -> None:
        self._post, self._measuring = post, measuring
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[StageWorked]] = {}

    async def do(
        self,
        job: Job,
        iteration: int,
        microbatch: int,
        shape: tuple[int, ...] = (),
        values: memoryview | None = None,
        gradient: memoryview | None = None,
    ) -> StageWorked:
        """Has the train thread do one job. Raises Dropped: its result is not to be used."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._post(StageWork(number, iteration, job, microbatch, shape, values, gradient))
        try:
            worked: StageWorked = await answer
        finally:
            self._open.pop(number, None)
        if worked.problem:
            raise Dropped(worked.problem)
        self._measuring.computed(_TIMED[job], worked.seconds)
        if job is Job.ENTER or job is Job.FORWARD:
            self._measuring.visit_bytes(len(given(worked)))
        return worked

    def worked(self, message: StageWorked) -> None:
        """A job is done."""
        answer = self._open.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)


def given(worked: StageWorked) -> memoryview:
    """The values of a job that has some."""
    assert worked.values is not None
    return worked.values
