"""Visits that arrive at a stage, or come back to their origin for the loss.

A visit holds its stream open until the gradient has come back over the rest of the route, so that
whoever sent it learns at once when a peer further on is gone, and asks another replica. What a
visit has come to stays here until the iteration is over: asked again, a peer answers, and computes
nothing twice.
"""

import asyncio
from collections.abc import Callable, Coroutine

from protos import murmuration_pb2 as pb
from worker import wire
from worker.errors import ConfigError
from worker.pipeline.config import Dropped, Elsewhere
from worker.pipeline.context import StageContext
from worker.pipeline.forwarder import Forwarder
from worker.pipeline.memory_budget import ComputeQueue, MemoryBudget, given
from worker.pipeline.planner import RoutePlanner
from worker.pipeline.profile import Measuring, visit_held
from worker.pipeline.stage_call import Back, Key, StageCall
from worker.pipeline.tracker import IterationTracker
from worker.training.inbox import JobKind
from worker.transport import Stream
from worker.wire.visits import VisitTooLarge, gradient_header, visit_failed, visit_of

_AT_ONCE_S = 0.001


class StageServer:
    """io thread only.

    Args:
        onward: sends a visit to the next stage.
        schedule: what this peer plans with; an origin that plans otherwise is talked to at once.
        end: ends this peer's part in the run: it has no room for the run's microbatches.
    """

    def __init__(
        self,
        context: StageContext,
        desk: ComputeQueue,
        room: MemoryBudget,
        counting: IterationTracker,
        onward: Forwarder,
        schedule: RoutePlanner,
        measuring: Measuring,
        end: Callable[[Exception], None],
    ) -> None:
        self._context, self._desk, self._room = context, desk, room
        self._counting, self._onward = counting, onward
        self._schedule, self._measuring, self._end = schedule, measuring, end
        self._kept: dict[tuple[Key, int], int] = {}
        self._held: dict[tuple[Key, int], asyncio.Task[Back]] = {}
        self._began = asyncio.Condition()
        self._told_otherwise: set[str] = set()
        self._orphaned = 0  # of the microbatches that are counted as dropped

    async def serve(self, stream: Stream) -> None:
        """Answers one visit. Raises TransportError: the sender is gone; its visit goes on."""
        context = self._context
        try:
            raw = await stream.receive()
            header = wire.parse(pb.VisitUp, raw or b"").header
            visit = visit_of(header, context.run, context.codec, self._room.limit_bytes)
            self._compare_schedules(visit)
            back = await self._back(visit, header, stream)
        except Dropped as error:
            await stream.send(visit_failed(str(error), elsewhere=False))
        except (Elsewhere, wire.WireError) as error:
            await stream.send(visit_failed(str(error), elsewhere=True))
            if isinstance(error, VisitTooLarge):
                self._end(ConfigError(str(error)))
        else:
            payload = wire.Payload.of(back.gradient)
            with self._measuring.transfer() as transfer:
                began = context.clock()
                await stream.send(gradient_header(payload, back.path))
                for message, _, _ in wire.payload_messages(pb.VisitDown, payload):
                    await stream.send(message)
                taken, seconds = await stream.receive(), context.clock() - began
            if taken:
                size, alone = len(payload.raw), transfer.alone
                self._measuring.sent(visit.sender, size, seconds, alone=alone)

    async def begin(self, iteration: int) -> None:
        """The train thread goes on to this iteration: what is left of others is of no use."""
        for place in [place for place in self._held if place[0].iteration < iteration]:
            self._held.pop(place).cancel()
            self._kept.pop(place, None)
        self._told_otherwise.clear()
        self._count_orphans()
        async with self._began:
            self._began.notify_all()

    def over(self, iteration: int) -> None:
        """What has not come back by now is asked for by nobody any more."""
        for (key, _), task in self._held.items():
            if key.iteration <= iteration:
                task.cancel()
        for origin, left in self._counting.orphans(iteration).items():
            self._context.log(
                {
                    "event": "orphaned",
                    "iteration": iteration,
                    "origin": origin.peer,
                    "epoch": origin.epoch,
                    "microbatches": sorted(left.began),
                    "counted": sorted(left.counted),
                }
            )
        self._count_orphans()

    async def close(self) -> None:
        for task in self._held.values():
            task.cancel()
        await asyncio.gather(*self._held.values(), return_exceptions=True)

    # ----------------------------------------------------------------------------------- inside

    def _count_orphans(self) -> None:
        """Microbatches that are lost with their origin were dropped; unless it was only away."""
        orphaned = self._counting.orphaned
        self._context.counts.dropped += orphaned - self._orphaned
        self._orphaned = orphaned

    def _compare_schedules(self, visit: StageCall) -> None:
        """Gossips with an origin that plans with other measurements, once an iteration."""
        origin = visit.key.origin.peer
        if origin == self._context.me or origin in self._told_otherwise:
            return
        if not self._schedule.knows(visit.schedule):
            self._told_otherwise.add(origin)
            self._context.counts.other_schedules += 1
            self._context.doubt(origin)

    async def _back(self, visit: StageCall, header: pb.VisitHeader, stream: Stream) -> Back:
        place = (visit.key, visit.stage)
        if place in self._held:
            self._context.counts.repeated += 1
        else:
            came = self._context.clock()
            await self._reached(visit)
            if visit.stage > 0:
                self._counting.heard(visit.key.iteration, visit.key.origin)
            size = self._size(visit, header.total_bytes)
            await self._room.take(size)
            try:
                began = self._context.clock()
                values = await self._arrived(header, stream)
                taken = pb.Taken(waited=began - came > _AT_ONCE_S)
                await stream.send(pb.VisitDown(taken=taken).SerializeToString())
                self._refuse_late(visit)
            except BaseException:
                self._room.give(size)
                raise
            if visit.stage > 0 and visit.sender == visit.key.origin.peer:
                self._counting.began(visit.key)
            if place in self._held:  # asked again meanwhile, by another way
                self._room.give(size)
            else:
                self._hold(place, self._visit(visit, values), size)
        task = self._held[place]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Dropped("the iteration is over") from None
            raise

    def _hold(self, place: tuple[Key, int], work: Coroutine[None, None, Back], size: int) -> None:
        """Begins a visit, which gives its room back in the end. Those that are done stay to be
        asked for again, as far as there is room for that; beyond, asking again costs a second
        computation and is counted once all the same. One that has failed may not fail again.
        """
        task = self._held[place] = asyncio.get_running_loop().create_task(work)

        def ended(task: asyncio.Task[Back]) -> None:
            self._room.give(size)
            if task.cancelled() or self._held.get(place) != task:
                return
            if task.exception() is not None:
                del self._held[place]
                return
            self._kept[place] = len(task.result().gradient)
            while sum(self._kept.values()) > self._room.limit_bytes:
                oldest = next(iter(self._kept))
                del self._kept[oldest], self._held[oldest]

        task.add_done_callback(ended)

    async def _reached(self, visit: StageCall) -> None:
        """Waits until this peer is at the visit's iteration.

        Raises:
            Elsewhere: it never will be.
            Dropped: this origin has begun anew, and has nothing of what it began before.
        """
        context, origin = self._context, visit.key.origin
        if context.stage != visit.stage or (visit.stage == 0 and origin.peer != context.me):
            raise Elsewhere(f"stage {visit.stage} is not served here")
        if visit.stage == 0 and origin != context.life:
            raise Dropped(f"its origin {origin.peer} has started again")
        counting, iteration = self._counting, visit.key.iteration
        async with self._began:
            await self._began.wait_for(
                lambda: counting.iteration >= iteration or counting.is_far(iteration)
            )
        if counting.is_far(iteration):
            raise Elsewhere(f"iteration {iteration} is far ahead of {counting.iteration} here")
        self._refuse_late(visit)

    def _refuse_late(self, visit: StageCall) -> None:
        if self._counting.is_over(visit.key.iteration):
            raise Elsewhere(f"iteration {visit.key.iteration} is over here")

    @staticmethod
    async def _arrived(header: pb.VisitHeader, stream: Stream) -> memoryview:
        """The activations. Unread, what gRPC does not take ahead (some 5 MB) is not sent."""
        incoming = wire.Incoming(header.total_bytes, header.hash)
        while not incoming.complete:
            raw = await stream.receive()
            incoming.add(wire.parse(pb.VisitUp, raw or b"").frame)
        incoming.verify()
        return incoming.buffer

    async def _visit(self, visit: StageCall, values: memoryview) -> Back:
        key, shape = visit.key, visit.shape
        if visit.stage == 0:
            loss = await self._desk.do(JobKind.LOSS, key.iteration, key.microbatch, shape, values)
            return Back(given(loss), ())
        forward = await self._desk.do(JobKind.FORWARD, key.iteration, key.number, shape, values)
        back = await self._onward.send(visit, given(forward))
        # From here on the train thread may have counted it, before word of that is back.
        new = self._counting.counted(key)
        try:
            done = await self._desk.do(
                JobKind.BACKWARD, key.iteration, key.number, shape, values, back.gradient
            )
        except Dropped:
            if new:  # else it is in the sum since an earlier visit
                self._counting.failed(key)
            raise
        self._context.counts.visits += 1
        return Back(given(done), (self._context.me, *back.path))

    @staticmethod
    def _size(visit: StageCall, total_bytes: int) -> int:
        """A loss holds nothing for long, and must never be deferred."""
        return visit_held(total_bytes) if visit.stage else 0
