"""What a stage has counted of visits that break off, fail or are asked for again."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from algorithms.codecs import codec_by_name
from protos import murmuration_pb2 as pb
from tests.unit.worker.pipeline.members import cards_of
from worker import wire
from worker.membership import Health
from worker.pipeline.config import Elsewhere, StagesConfig
from worker.pipeline.context import StageContext
from worker.pipeline.forwarder import Forwarder
from worker.pipeline.memory_budget import ComputeQueue, MemoryBudget
from worker.pipeline.planner import RoutePlanner
from worker.pipeline.profile import Measuring
from worker.pipeline.serving import StageServer
from worker.pipeline.stage_call import Back, Incarnation, Key, StageCall
from worker.pipeline.tracker import IterationTracker
from worker.training.inbox import IterationOver, JobKind, StageJob, StageJobDone, ToTrain
from worker.transport.memory import MemoryNetwork, MemoryTransport
from worker.wire.visits import visit_header

T = TypeVar("T")

ITERATION = 2
CARDS = cards_of(0, 1, 2)
"""p0 begins microbatches; p1 is the stage that is looked at."""

ORIGIN = Incarnation.of(CARDS[0])
VALUES = memoryview(bytes(16))


async def unasked(work: Callable[[], T], /) -> T:
    raise AssertionError("whoever only answers searches for no routes")


class Stream:
    """One visit's, whose sender has said this and no more."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages, self.answers = list(messages), list[pb.VisitDown]()

    async def send(self, message: bytes) -> None:
        self.answers.append(pb.VisitDown.FromString(message))

    async def done(self) -> None: ...

    async def receive(self) -> bytes | None:
        return self._messages.pop(0) if self._messages else None

    def cancel(self) -> None: ...


class Next(Forwarder):
    """The rest of a route: fails as often as it is told to."""

    failures = 0

    async def send(self, visit: StageCall, values: memoryview) -> Back:
        if self.failures:
            self.failures -= 1
            raise Elsewhere("the link is down")
        return Back(values, ("p2",))


class Stage:
    """p1, whose train thread answers at once: as it is told to, or with what it was given."""

    def __init__(self, limit_bytes: int = 1000) -> None:
        self.context = StageContext(
            me="p1",
            run=1,
            seed=3,
            stage=1,
            config=StagesConfig(count=3, microbatches=2),
            codec=codec_by_name("fp32"),
            transport=MemoryTransport(MemoryNetwork(), "p1"),
            members=lambda: CARDS,
            doubt=lambda peer: None,
            clock=lambda: 0.0,
            log=lambda event: None,
        )
        self.problems: dict[JobKind, str] = {}
        self.ended = list[Exception]()
        measuring = Measuring(limit_bytes)
        self.desk, self.counting = ComputeQueue(self._work, measuring), IterationTracker(ITERATION)
        self.onward = Next(self.context, measuring)
        self.serving = StageServer(
            self.context,
            self.desk,
            MemoryBudget(limit_bytes),
            self.counting,
            self.onward,
            RoutePlanner(self.context, unasked),
            measuring,
            self.ended.append,
        )

    def _work(self, message: ToTrain) -> None:
        assert isinstance(message, StageJob)
        problem = self.problems.get(message.kind, "")
        self.desk.worked(StageJobDone(message.number, message.values, problem=problem))

    async def visited(
        self, microbatch: int, *, whole: bool = True, iteration: int = ITERATION
    ) -> str | None:
        """By p0's microbatch, or only by its header; how the answer ends."""
        context, payload = self.context, wire.Payload.of(VALUES)
        visit = StageCall(Key(iteration, ORIGIN, microbatch), 1, (), (1, 1, 4), 0, "p0")
        messages = [visit_header(visit, context.run, context.codec, payload)]
        if whole:
            messages += [message for message, _, _ in wire.payload_messages(pb.VisitUp, payload)]
        stream = Stream(messages)
        await self.serving.serve(stream)
        bodies = [answer.WhichOneof("body") for answer in stream.answers]
        return next(body for body in bodies if body in ("gradient", "failed"))

    def over(self) -> IterationOver | None:
        return self.counting.over(CARDS[:1], 0.0)


def test_a_microbatch_that_has_not_arrived_has_not_begun_here() -> None:
    """Its origin sends it to another replica, and is lost: it is that one's to tell."""

    async def scenario() -> None:
        stage = Stage()
        assert await stage.visited(0, whole=False) == "failed"
        assert await stage.visited(1) == "gradient"
        stage.counting.finished(ITERATION, Incarnation("other", 1), [])
        gone, other = replace(CARDS[0], health=Health.DEAD), replace(CARDS[0], peer="other")
        assert stage.counting.over([gone, other], 0.0) == IterationOver(ITERATION, discard=False)
        assert stage.counting.orphans(ITERATION)[ORIGIN].began == {1}

    asyncio.run(scenario())


def test_a_visit_from_far_ahead_is_not_waited_with() -> None:
    """Another replica may be there. A little later this one will be."""

    async def scenario() -> None:
        stage = Stage()
        assert await stage.visited(0, iteration=5000) == "failed"
        soon = asyncio.ensure_future(stage.visited(0, iteration=ITERATION + 1))
        await asyncio.sleep(0)
        assert not soon.done()
        stage.counting.begin(ITERATION + 1)
        await stage.serving.begin(ITERATION + 1)
        assert await soon == "gradient"

    asyncio.run(scenario())


def test_a_visit_that_has_failed_is_tried_again_when_it_is_asked_for_again() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.onward.failures = 1
        assert await stage.visited(0) == "failed"
        assert await stage.visited(0) == "gradient"
        assert stage.context.counts.repeated == 0

    asyncio.run(scenario())


def test_a_repeated_visit_that_fails_leaves_what_was_counted() -> None:
    async def scenario() -> None:
        stage = Stage(limit_bytes=len(VALUES))  # one answer is kept
        for microbatch in (0, 1):
            assert await stage.visited(microbatch) == "gradient"
        stage.problems[JobKind.BACKWARD] = "damaged"
        assert await stage.visited(0) == "failed"
        stage.counting.finished(ITERATION, ORIGIN, [0, 1])
        assert stage.over() == IterationOver(ITERATION, discard=False)

    asyncio.run(scenario())


def test_a_visit_that_fails_at_first_is_not_counted() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.problems[JobKind.BACKWARD] = "damaged"
        assert await stage.visited(0) == "failed"
        stage.counting.finished(ITERATION, ORIGIN, [])
        assert stage.over() == IterationOver(ITERATION, discard=False)

    asyncio.run(scenario())
