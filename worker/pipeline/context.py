"""The context of a stage's components on the I/O thread: peers, counts, memory, computing."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from murmuration.algorithms.codecs import Codec
from murmuration.protos.events import EventKind, Log, new_event
from murmuration.worker.background import Offload
from murmuration.worker.membership import Member
from murmuration.worker.pipeline.profile import StageMeasurements
from murmuration.worker.pipeline.stage_call import JobFailed, MicrobatchDropped, PeerProcess, serves
from murmuration.worker.pipeline.stages_config import StagesConfig
from murmuration.worker.training import mailbox as mail
from murmuration.worker.transport import Transport

_MOST_CALLERS = 4096  # that are told apart
_TIMED = {
    mail.JobKind.FORWARD: "forward_s",
    mail.JobKind.ENTER: "forward_s",
    mail.JobKind.BACKWARD: "backward_s",
    mail.JobKind.LEAVE: "backward_s",
    mail.JobKind.LOSS: "loss_s",
}


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
    """The surroundings of a stage."""

    me: str
    run: int
    seed: int
    stage: int
    config: StagesConfig
    codec: Codec
    transport: Transport
    members: Callable[[], Sequence[Member]]  # all peers; others when one has changed
    suspect: Callable[[str], None]  # has membership probe one
    post: Callable[[mail.ToTrain], None]  # takes messages for the train thread
    offload: Offload
    clock: Callable[[], float]  # monotonic seconds
    log: Log  # events as plain values
    counts: StageCounts = field(default_factory=StageCounts)
    # (B, T, D) of the largest microbatch; None where the task does not say.
    activation_shape: tuple[int, int, int] | None = None
    ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.measurements = StageMeasurements(self.config.memory_bytes, self.clock)
        self.budget = MemoryBudget(self.config.memory_bytes)
        self._numbers = itertools.count()
        self._jobs: dict[int, asyncio.Future[mail.StageJobDone]] = {}

    def member(self, peer: str) -> Member | None:
        return next((member for member in self.members() if member.peer == peer), None)

    @property
    def process(self) -> PeerProcess:
        """This peer's, as the others know it."""
        member = self.member(self.me)
        assert member is not None, "a peer knows itself"
        return PeerProcess.of(member)

    def is_origin(self, process: PeerProcess) -> bool:
        """Tells whether it is the present process of a peer that lives and serves stage 0."""
        origins = (member for member in self.members() if member.live and member.stage == 0)
        return process in map(PeerProcess.of, origins)

    def serving(self) -> list[Member]:
        """The members to which calls may be sent."""
        return list(filter(serves, self.members()))

    def replicas(self, stage: int) -> list[str]:
        """The peers that serve a stage now, sorted."""
        return sorted(member.peer for member in self.serving() if member.stage == stage)

    def event(self, kind: EventKind, **fields: object) -> None:
        self.log(new_event(kind, **fields))

    def end(self, why: Exception | mail.StageMove) -> None:
        """Ends this peer's part in the run, or on this stage; once."""
        if not self.ended:
            self.ended = True
            self.post(why if isinstance(why, mail.StageMove) else mail.Stop(str(why), why))

    async def compute(
        self,
        job: mail.JobKind,
        iteration: int,
        microbatch: int,
        shape: tuple[int, ...] = (),
        values: memoryview = mail.NO_VALUES,
        gradient: memoryview = mail.NO_VALUES,
    ) -> mail.StageJobDone:
        """Has the train thread do one job. Raises MicrobatchDropped: its result is of no use."""
        number = next(self._numbers)
        answer = self._jobs[number] = asyncio.get_running_loop().create_future()
        self.post(mail.StageJob(number, iteration, job, microbatch, shape, values, gradient))
        try:
            worked: mail.StageJobDone = await answer
        finally:
            self._jobs.pop(number, None)
        if worked.problem:
            raise (JobFailed if worked.failed else MicrobatchDropped)(worked.problem)
        self.measurements.computed(_TIMED[job], worked.seconds)
        if _TIMED[job] == "forward_s":
            self.measurements.activation_bytes = len(worked.values)
        return worked

    def computed(self, message: mail.StageJobDone) -> None:
        answer = self._jobs.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)


class MemoryBudget:
    """Bytes that calls hold from forward to backward, granted in order of arrival. io thread only.

    Only forwards wait for memory; backwards free it. One call always fits, however large. A caller
    that holds some has more only within its share, an equal one for each caller of this iteration
    and the last, and if as much again is left for one that holds none. Others pass it meanwhile."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = self.peak_bytes = 0
        self._waiting: deque[tuple[int, str | None, asyncio.Future[None]]] = deque()
        self._held_by: Counter[str] = Counter()
        self._callers, self._earlier = set[str](), set[str]()

    def begin(self) -> None:
        """Another iteration has begun: who has not called in the last one has no share any more."""
        self._callers, self._earlier = set(), self._callers
        self._grant()

    async def acquire(self, size: int, caller: str | None = None) -> None:
        """Returns once this many bytes may be held; this peer itself (None) has a share of all."""
        if not size:
            return
        if caller is not None and len(self._callers) < _MOST_CALLERS:
            self._callers.add(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, caller, turn))
        self._grant()
        try:
            if not turn.done():
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size, caller)
            else:
                with suppress(ValueError):  # passed over since it was given up
                    self._waiting.remove((size, caller, turn))
                self._grant()
            raise

    def release(self, size: int, caller: str | None = None) -> None:
        """This many bytes are held no longer. Args: caller: as they were acquired."""
        self.held_bytes -= size
        if caller is not None:
            self._held_by[caller] -= size
            if not self._held_by[caller]:
                del self._held_by[caller]
        self._grant()

    def _is_due(self, size: int, caller: str | None) -> bool:
        """Tells whether the caller may have so much, as far as the other callers are concerned."""
        if caller is None or not (held := self._held_by[caller]):
            return True
        callers = len({*self._callers, *self._earlier, *self._held_by})
        share = self.limit_bytes // callers
        return held + size <= share and self.held_bytes + 2 * size <= self.limit_bytes

    def _grant(self) -> None:
        passed: list[tuple[int, str | None, asyncio.Future[None]]] = []
        while self._waiting:
            size, caller, turn = self._waiting[0]
            if not turn.done():
                if not self._is_due(size, caller):
                    passed.append(self._waiting.popleft())
                    continue
                if self.held_bytes and self.held_bytes + size > self.limit_bytes:
                    break
                self.held_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.held_bytes)
                if caller is not None:
                    self._held_by[caller] += size
                turn.set_result(None)
            self._waiting.popleft()
        self._waiting.extendleft(reversed(passed))
