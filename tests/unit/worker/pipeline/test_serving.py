"""Visits that are refused, and with whom a peer gossips when one names other measurements than it
plans with."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from algorithms.codecs import codec_by_name
from protos import murmuration_pb2 as pb
from tests.unit.worker.pipeline.members import cards_of, telling
from worker import wire
from worker.membership import Member
from worker.pipeline.config import StagesConfig
from worker.pipeline.context import StageContext
from worker.pipeline.forwarder import Forwarder
from worker.pipeline.memory_budget import ComputeQueue, MemoryBudget
from worker.pipeline.network_snapshot import table_name
from worker.pipeline.planner import RoutePlanner
from worker.pipeline.profile import Measuring, Profile
from worker.pipeline.serving import StageServer
from worker.pipeline.stage_call import Incarnation, Key, StageCall
from worker.pipeline.tracker import IterationTracker
from worker.transport.memory import MemoryNetwork, MemoryTransport
from worker.wire.visits import visit_header

T = TypeVar("T")

LIMIT_BYTES = 1000
PLACED = cards_of(0, 0, 1, 2)
"""p0 and p1 are origins; what they begin goes by way of p2 to p3."""


def measured(seconds: float) -> list[Member]:
    """p2 has taken so long."""
    return [*PLACED[:2], telling(PLACED[2], Profile(forward_s=seconds)), PLACED[3]]


async def unasked(work: Callable[[], T], /) -> T:
    raise AssertionError("whoever only answers searches for no routes")


class Stream:
    """One visit's, whose sender has said what it says."""

    def __init__(self, header: bytes) -> None:
        self._header, self.answers = header, list[pb.VisitDown]()

    async def send(self, message: bytes) -> None:
        self.answers.append(pb.VisitDown.FromString(message))

    async def done(self) -> None: ...

    async def receive(self) -> bytes | None:
        return self._header

    def cancel(self) -> None: ...


class Peer:
    """Has begun iteration 2; what it is sent is of iteration 1, and refused when it is read."""

    def __init__(self, me: str) -> None:
        self.members, self.now, self.doubted = measured(0.1), 0.0, list[str]()
        self.ended = list[Exception]()
        config = StagesConfig(count=3, microbatches=2)
        self.context = StageContext(
            me=me,
            run=1,
            seed=3,
            stage=next(member.stage for member in PLACED if member.peer == me),
            config=config,
            codec=codec_by_name("fp32"),
            transport=MemoryTransport(MemoryNetwork(), me),
            members=lambda: self.members,
            doubt=self.doubted.append,
            clock=lambda: self.now,
            log=lambda event: None,
        )
        measuring = Measuring(LIMIT_BYTES)
        self.serving = StageServer(
            self.context,
            ComputeQueue(lambda message: None, measuring),
            MemoryBudget(LIMIT_BYTES),
            IterationTracker(iteration=2),
            Forwarder(self.context, measuring),
            RoutePlanner(self.context, unasked),
            measuring,
            self.ended.append,
        )

    def visited(
        self, origin: str, sender: str, schedule: int, epoch: int = 1, *, elsewhere: bool = True
    ) -> None:
        """By a microbatch of that origin, planned with the table of that name; it is refused."""
        context, life = self.context, Incarnation(origin, epoch)
        visit = StageCall(Key(1, life, 0), context.stage, (), (1, 1, 4), schedule, sender)
        payload = wire.Payload.of(memoryview(bytes(16)))
        stream = Stream(visit_header(visit, context.run, context.codec, payload))
        asyncio.run(self.serving.serve(stream))
        (answer,) = stream.answers
        assert answer.HasField("failed")
        assert answer.failed.elsewhere == elsewhere

    def next_iteration(self) -> None:
        asyncio.run(self.serving.begin(3))


def test_who_plans_with_the_same_measurements_is_left_in_peace() -> None:
    peer = Peer("p3")
    peer.visited("p0", "p2", table_name(peer.members))
    assert (peer.doubted, peer.context.counts.other_schedules) == ([], 0)


def test_the_origin_is_asked_and_not_who_has_passed_its_visit_on() -> None:
    """p2 only forwards the name; once for each origin and iteration."""
    peer, others = Peer("p3"), table_name(measured(0.3))
    for origin in ("p0", "p0", "p1"):
        peer.visited(origin, "p2", others)
    assert (peer.doubted, peer.context.counts.other_schedules) == (["p0", "p1"], 2)
    peer.next_iteration()
    peer.visited("p0", "p2", others)
    assert (peer.doubted, peer.context.counts.other_schedules) == (["p0", "p1", "p0"], 3)


def test_figures_that_change_while_an_iteration_runs_are_no_disagreement() -> None:
    peer, before = Peer("p3"), table_name(measured(0.1))
    peer.visited("p0", "p2", before)
    peer.members = measured(0.3)
    peer.visited("p0", "p2", before)
    assert (peer.doubted, peer.context.counts.other_schedules) == ([], 0)
    peer.now = 60.0  # the origin has not heard of it in all this time
    peer.visited("p0", "p2", before)
    assert (peer.doubted, peer.context.counts.other_schedules) == (["p0"], 1)


def test_an_origin_does_not_disagree_with_itself() -> None:
    peer = Peer("p0")
    peer.visited("p0", "p3", table_name(measured(0.3)))
    assert (peer.doubted, peer.context.counts.other_schedules) == ([], 0)


def test_no_loss_is_computed_of_what_an_earlier_life_has_begun() -> None:
    """Nor asked for by another way: nobody has its labels."""
    Peer("p0").visited("p0", "p3", table_name(measured(0.1)), epoch=0, elsewhere=False)
