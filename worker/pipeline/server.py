"""Calls that arrive at a stage, or at their origin for the loss.

A call holds its stream open until the gradient has come back over the rest of the route. So its
sender learns at once when a peer further on is gone, and asks another replica. Results stay here
until the iteration is over: a repeated call is answered, and nothing is computed twice.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import Warnings
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.background import cancel
from murmuration.worker.pipeline.barrier import IterationTracker
from murmuration.worker.pipeline.context import StageContext, values_of
from murmuration.worker.pipeline.forwarder import Forwarder
from murmuration.worker.pipeline.planner import RoutePlanner
from murmuration.worker.pipeline.stage_call import (
    JobFailed,
    MicrobatchDropped,
    StageCall,
    StageCallKey,
    StageCallTooLarge,
    StageReply,
    TryElsewhere,
    call_bytes,
    call_failed,
    call_of,
    gradient_header,
)
from murmuration.worker.training.mailbox import JobKind
from murmuration.worker.transport import Stream

_AT_ONCE_S = 0.001
_FRAME_S = 120.0  # for a frame of 1 MiB, on a link that 16 calls share


class StageServer:
    """Serves stage calls. io thread only. Gossips at once with an origin that plans otherwise."""

    def __init__(
        self,
        context: StageContext,
        tracker: IterationTracker,
        forwarder: Forwarder,
        planner: RoutePlanner,
    ) -> None:
        self._context, self._budget = context, context.budget
        self._tracker, self._forwarder, self._planner = tracker, forwarder, planner
        # By call and stage: work under way or done, and the size of what is kept of it.
        self._calls: dict[tuple[StageCallKey, int], asyncio.Task[StageReply]] = {}
        self._kept: dict[tuple[StageCallKey, int], int] = {}
        self._began = asyncio.Condition()
        self._disagreeing: set[str] = set()
        self._warnings = Warnings(context.log)
        self._orphaned = 0  # of the microbatches that are counted as dropped

    async def serve(self, stream: Stream) -> None:
        """Answers one call. Raises TransportError: the sender is gone; its call goes on."""
        context = self._context
        try:
            raw = await stream.receive()
            header = wire.parse(pb.StageCallUp, raw or b"").header
            limit_bytes, stages = self._budget.limit_bytes, context.config.count
            shape = context.activation_shape
            call = call_of(header, context.run, context.codec, limit_bytes, stages, shape)
            if call.key.microbatch >= context.config.microbatches:
                raise wire.WireError("a microbatch more than its origin has in an iteration")
            origin = call.key.origin.peer
            known = {context.me, *self._disagreeing}
            if origin not in known and not self._planner.knows(call.snapshot):
                self._disagreeing.add(origin)  # it plans with other measurements
                context.counts.other_snapshots += 1
                context.suspect(origin)
            reply = await self._reply(call, header, stream)
        except MicrobatchDropped as error:
            if isinstance(error, JobFailed):
                self._warnings.add(f"a stage call of {shown(call.sender)} has failed", str(error))
            await stream.send(call_failed(str(error), elsewhere=False))
        except (TryElsewhere, wire.WireError) as error:
            await stream.send(call_failed(str(error), elsewhere=True))
            if isinstance(error, StageCallTooLarge):  # or so its sender says
                self._warnings.add(str(error))
        else:
            payload = wire.Payload.of(reply.gradient)
            with context.measurements.sending() as sample:
                began = context.clock()
                await stream.send(gradient_header(payload, reply.path))
                for message, _, _ in wire.payload_messages(pb.StageCallDown, payload):
                    await stream.send(message)
                async with asyncio.timeout(_FRAME_S):
                    received, seconds = await stream.receive(), context.clock() - began
            if received:
                size = len(payload.raw)
                context.measurements.sent(call.sender, size, seconds, alone=sample.alone)

    async def begin(self, iteration: int) -> None:
        """The train thread goes on to this iteration: what is left of others is of no use."""
        for place in [place for place in self._calls if place[0].iteration < iteration]:
            self._calls.pop(place).cancel()
            self._kept.pop(place, None)
        self._budget.begin()
        self._disagreeing.clear()
        self._count_orphans()
        async with self._began:
            self._began.notify_all()

    def over(self, iteration: int) -> None:
        """Nobody asks any more for what has not come back by now."""
        for (key, _), task in self._calls.items():
            if key.iteration <= iteration:
                task.cancel()
        for origin, left in self._tracker.orphans(iteration).items():
            where = {"iteration": iteration, "origin": origin.peer, "epoch": origin.epoch}
            microbatches, counted = sorted(left.began), sorted(left.counted)
            self._context.event("orphaned", **where, microbatches=microbatches, counted=counted)
        self._count_orphans()

    async def close(self) -> None:
        await cancel(self._calls.values())

    def _count_orphans(self) -> None:
        """Microbatches that are lost with their origin were dropped; unless it was only away."""
        orphaned = self._tracker.orphaned
        self._context.counts.dropped += orphaned - self._orphaned
        self._orphaned = orphaned

    async def _reply(
        self, call: StageCall, header: pb.StageCallHeader, stream: Stream
    ) -> StageReply:
        place, clock = (call.key, call.stage), self._context.clock
        if place in self._calls:
            self._context.counts.repeated += 1
        else:
            came = clock()
            await self._reached(call)
            if call.stage > 0:
                self._tracker.heard(call.key.iteration, call.key.origin)
            # A loss holds nothing for long, and must never wait for memory.
            size = call_bytes(header.total_bytes) if call.stage else 0
            release = partial(self._budget.release, size, call.sender)
            await self._budget.acquire(size, call.sender)
            try:
                began = clock()
                values = await _activations(header, stream)
                received = pb.Received(waited=began - came > _AT_ONCE_S)
                await stream.send(pb.StageCallDown(received=received).SerializeToString())
                self._refuse_late(call)
            except BaseException:
                release()
                raise
            if call.stage > 0 and call.sender == call.key.origin.peer:
                self._tracker.began(call.key)
            if place in self._calls:  # asked again meanwhile, by another way
                release()
            else:
                self._start(call, values, release)
        task = self._calls[place]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise MicrobatchDropped("the iteration is over") from None
            raise

    def _start(self, call: StageCall, values: memoryview, release: Callable[[], None]) -> None:
        """Begins a call, which releases its memory in the end. Results but failures are kept for
        repeated calls, up to the limit of the budget; beyond, a repeated call is computed again,
        and counts once."""
        place, work = (call.key, call.stage), self._compute(call, values)
        task = self._calls[place] = asyncio.get_running_loop().create_task(work)

        def ended(task: asyncio.Task[StageReply]) -> None:
            release()
            if task.cancelled() or self._calls.get(place) != task:
                return
            if task.exception() is not None:
                del self._calls[place]
                return
            self._kept[place] = len(task.result().gradient)
            while sum(self._kept.values()) > self._budget.limit_bytes:
                oldest = next(iter(self._kept))
                del self._kept[oldest], self._calls[oldest]

        task.add_done_callback(ended)

    async def _reached(self, call: StageCall) -> None:
        """Waits until this peer is at the call's iteration. Raises TryElsewhere: it never will be;
        WireError: the loss of what is not under way from here, or has another shape;
        MicrobatchDropped: this origin has started again."""
        context, origin = self._context, call.key.origin
        if context.stage != call.stage or (call.stage == 0 and origin.peer != context.me):
            raise TryElsewhere(f"stage {call.stage} is not served here")
        if call.stage == 0 and origin != context.incarnation:
            raise MicrobatchDropped(f"its origin {origin.peer} has started again")
        tracker, iteration = self._tracker, call.key.iteration
        async with self._began:
            await self._began.wait_for(
                lambda: tracker.iteration >= iteration or tracker.is_far(iteration)
            )
        if tracker.is_far(iteration):
            raise TryElsewhere(f"iteration {iteration} is far ahead of {tracker.iteration} here")
        self._refuse_late(call)
        if call.stage == 0 and (sent := self._forwarder.under_way.get(call.key)) != call.shape:
            raise wire.WireError(f"a loss of shape {call.shape}; what was sent has {sent}")

    def _refuse_late(self, call: StageCall) -> None:
        if self._tracker.is_over(call.key.iteration):
            raise TryElsewhere(f"iteration {call.key.iteration} is over here")

    async def _compute(self, call: StageCall, values: memoryview) -> StageReply:
        key, shape, compute = call.key, call.shape, self._context.compute
        if call.stage == 0:
            loss = await compute.do(JobKind.LOSS, key.iteration, key.microbatch, shape, values)
            return StageReply(values_of(loss), ())
        forward = await compute.do(JobKind.FORWARD, key.iteration, key.number, shape, values)
        reply = await self._forwarder.send(call, values_of(forward))
        # From here on the train thread may have counted it, before its answer is back.
        new = self._tracker.counted(key)
        try:
            backward = (JobKind.BACKWARD, key.iteration, key.number, shape)
            done = await compute.do(*backward, values, reply.gradient)
        except MicrobatchDropped:
            if new:  # else an earlier call has put it into the sum
                self._tracker.failed(key)
            raise
        self._context.counts.visits += 1
        return StageReply(values_of(done), (self._context.me, *reply.path))


async def _activations(header: pb.StageCallHeader, stream: Stream) -> memoryview:
    """What is not read is not sent, but for the half MiB that gRPC takes ahead. Small frames must
    come the sooner: all together may take as long as full ones."""
    incoming = wire.Incoming(header.total_bytes, header.hash)
    frames = -(-header.total_bytes // wire.MAX_FRAME_BYTES)
    try:
        async with asyncio.timeout(frames * _FRAME_S):
            while not incoming.complete:
                async with asyncio.timeout(_FRAME_S):
                    raw = await stream.receive()
                incoming.add(wire.parse(pb.StageCallUp, raw or b"").frame)
    except TimeoutError:
        raise wire.Again(
            f"{incoming.received_bytes} of {header.total_bytes} bytes of activations came in time: "
            f"each MiB has {_FRAME_S:g} s"
        ) from None
    incoming.verify()
    return incoming.buffer
