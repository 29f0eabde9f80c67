"""What the components of a stage share on the I/O thread: peers, counts, memory, computing."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from algorithms.codecs import Codec
from protos.events import EventKind, new_event
from worker.exchange.context import Offload
from worker.membership import Member
from worker.pipeline.config import MicrobatchDropped, StagesConfig
from worker.pipeline.profile import StageMeasurements
from worker.pipeline.stage_call import Incarnation, serves
from worker.training.inbox import JobKind, StageJob, StageJobDone, StageMove, Stop, ToTrain
from worker.transport import Transport


@dataclass
class StageCounts:
    """Since the start of this process, on whichever stages it has served."""

    visits: int = 0  # microbatches computed here to the end, the origin's own included
    repeated: int = 0  # calls made again after a peer before this one was lost
    rerouted: int = 0  # calls sent on to another replica than planned
    skipped: int = 0  # calls sent on past a stage without a replica
    dropped: int = 0  # microbatches lost: begun here, or had straight from an origin that is gone
    lost: int = 0  # microbatches that came back here, and died with a replica that had counted them
    other_snapshots: int = 0  # origins that planned with other measurements, by iteration
    discarded: int = 0  # iterations whose gradient could not be vouched for


@dataclass(kw_only=True)
class StageContext:
    """Args:
    me, run, stage: this peer, the run's id, the stage served here.
    config: how the model is cut and routed; codec: of activations.
    transport: to the others; members: all peers of the swarm, as known now.
    suspect: has membership probe a peer.
    post: takes messages for the train thread; offload: runs heavy work off the loop.
    clock: monotonic seconds.
    log: takes events as plain values.
    """

    me: str
    run: int
    seed: int
    stage: int
    config: StagesConfig
    codec: Codec
    transport: Transport
    members: Callable[[], Sequence[Member]]
    suspect: Callable[[str], None]
    post: Callable[[ToTrain], None]
    offload: Offload
    clock: Callable[[], float]
    log: Callable[[dict[str, object]], None]
    counts: StageCounts = field(default_factory=StageCounts)
    ended: bool = field(default=False, init=False)

    @cached_property
    def measurements(self) -> StageMeasurements:
        """Of this peer's links and stage."""
        return StageMeasurements(self.config.memory_bytes, self.clock)

    @cached_property
    def budget(self) -> "MemoryBudget":
        """For the calls that are under way here."""
        return MemoryBudget(self.config.memory_bytes)

    @cached_property
    def compute(self) -> "ComputeQueue":
        """The way to the train thread."""
        return ComputeQueue(self.post, self.measurements)

    def member(self, peer: str) -> Member | None:
        return next((member for member in self.members() if member.peer == peer), None)

    @property
    def incarnation(self) -> Incarnation:
        """This peer's, as the others know it."""
        member = self.member(self.me)
        assert member is not None, "a peer knows itself"
        return Incarnation.of(member)

    def serving(self) -> list[Member]:
        """The members to which calls may be sent."""
        return list(filter(serves, self.members()))

    def replicas(self, stage: int) -> list[str]:
        """The peers that serve a stage now, sorted."""
        return sorted(member.peer for member in self.serving() if member.stage == stage)

    def event(self, kind: EventKind, **fields: object) -> None:
        """Logs an event."""
        self.log(new_event(kind, **fields))

    def end(self, why: Exception | StageMove) -> None:
        """Ends this peer's part in the run, or on this stage; once."""
        if not self.ended:
            self.ended = True
            self.post(why if isinstance(why, StageMove) else Stop(str(why), why))


class MemoryBudget:
    """Bytes that calls hold between forward and backward, granted in order of arrival.

    Only forwards wait for memory. Backwards, which free it, never wait, nor does what holds
    nothing. One call always fits, however large, so that nothing waits for ever. io thread only.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = self.peak_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> None:
        """Returns once this many bytes may be held."""
        if not size or not (self._waiting or not self._fits(size)):
            self._hold(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)
            else:
                self._waiting.remove((size, turn))
                self._grant()
            raise

    def release(self, size: int) -> None:
        """This many bytes are held no longer."""
        self.held_bytes -= size
        self._grant()

    def _fits(self, size: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + size <= self.limit_bytes

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _grant(self) -> None:
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
    """Hands jobs to the train thread, and their results back. io thread only.

    Args:
        post: takes a message for the train thread.
        measurements: learn how long jobs take.
    """

    def __init__(self, post: Callable[[ToTrain], None], measurements: StageMeasurements) -> None:
        self._post, self._measurements = post, measurements
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
        """Has the train thread do one job. Raises MicrobatchDropped: its result is of no use."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._post(StageJob(number, iteration, job, microbatch, shape, values, gradient))
        try:
            worked: StageJobDone = await answer
        finally:
            self._open.pop(number, None)
        if worked.problem:
            raise MicrobatchDropped(worked.problem)
        self._measurements.computed(_TIMED[job], worked.seconds)
        if job is JobKind.ENTER or job is JobKind.FORWARD:
            self._measurements.activation_bytes = len(values_of(worked))
        return worked

    def handle(self, message: StageJobDone) -> None:
        """A job is done."""
        answer = self._open.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)


def values_of(worked: StageJobDone) -> memoryview:
    """The values of a job that has some."""
    assert worked.values is not None
    return worked.values
