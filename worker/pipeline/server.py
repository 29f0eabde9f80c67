"""Calls that arrive at a stage, or at their origin for the loss; and the reports of origins. Why a
call holds its stream until the gradient is back: docs/adr/0012."""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import check_name
from murmuration.protos.events import Warnings
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.background import cancel
from murmuration.worker.pipeline import stage_call
from murmuration.worker.pipeline.barrier import IterationTracker
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.forwarder import Forwarder
from murmuration.worker.pipeline.planner import RoutePlanner
from murmuration.worker.pipeline.stage_call import StageCall, StageReply, TryElsewhere
from murmuration.worker.training.mailbox import JobKind
from murmuration.worker.transport import Stream

_AT_ONCE_S = 0.001
_FRAME_S = 120.0  # for a frame of 1 MiB, on a link that 16 calls share
_UNKNOWN_S, _LOOK_S = 2.0, 0.1  # until gossip has told of an origin that has just begun
_HOLD_S = 0.5  # an answer to a report is held back; well below the time that its origin waits


class StageServer:
    """Serves stage calls and origins' reports. io thread only. Gossips at once with an origin that
    plans otherwise. Args: reported: is called after a report, which may end an iteration."""

    def __init__(
        self,
        context: StageContext,
        tracker: IterationTracker,
        forwarder: Forwarder,
        planner: RoutePlanner,
        reported: Callable[[], None],
    ) -> None:
        self._context, self._budget, self._reported = context, context.budget, reported
        self._tracker, self._forwarder, self._planner = tracker, forwarder, planner
        # By call and stage: work under way or done, and the size of what is kept of it.
        self._calls: dict[tuple[stage_call.StageCallKey, int], asyncio.Task[StageReply]] = {}
        self._kept: dict[tuple[stage_call.StageCallKey, int], int] = {}
        self._turned = asyncio.Event()  # another iteration has begun, or one is over
        self._disagreeing: set[str] = set()
        self._warnings = Warnings(context.log)
        self._orphaned = 0  # of the microbatches that are counted as dropped

    async def serve(self, stream: Stream) -> None:
        """Answers one call. Raises TransportError: the sender is gone; its call goes on."""
        context = self._context
        try:
            asked = wire.parse(pb.StageCallUp, await stream.receive() or b"").header
            call = self._call_of(asked)
            origin, known = call.key.origin.peer, {context.me, *self._disagreeing}
            unlike = origin not in known and not self._planner.knows(call.snapshot)
            if unlike and context.member(origin) is not None:
                self._disagreeing.add(origin)  # it plans with other measurements
                context.counts.other_snapshots += 1
                context.suspect(origin)
            reply = await self._reply(call, asked, stream)
        except (stage_call.MicrobatchDropped, TryElsewhere, wire.WireError) as error:
            elsewhere = not isinstance(error, stage_call.MicrobatchDropped)
            failed = pb.StageCallFailed(reason=str(error), elsewhere=elsewhere)
            if isinstance(error, stage_call.JobFailed | stage_call.StageCallTooLarge):
                self._warnings.add(f"a stage call of {shown(asked.sender)} has failed", str(error))
            await stream.send(pb.StageCallDown(failed=failed).SerializeToString())
        else:
            payload = wire.Payload.of(reply.gradient)
            size, path = len(payload.raw), reply.path
            header = pb.Gradient(total_bytes=size, hash=payload.hash, path=path)
            with context.measurements.sending() as sample:
                began = context.clock()
                await stream.send(pb.StageCallDown(gradient=header).SerializeToString())
                for message, _, _ in wire.payload_messages(pb.StageCallDown, payload):
                    await stream.send(message)
                async with asyncio.timeout(_FRAME_S):
                    received, seconds = await stream.receive(), context.clock() - began
            if received:
                context.measurements.sent(call.sender, size, seconds, alone=sample.alone)

    async def finished(self, request: bytes) -> bytes:
        """Answers an origin's report, if it can when the iteration is over. Raises WireError."""
        report, tracker = wire.parse(pb.FinishedRequest, request), self._tracker
        if report.run != self._context.run:
            raise wire.WireError("a report on another run")
        if max(report.counted, default=0) >= self._context.config.microbatches:
            raise wire.WireError("a report on a microbatch more than its origin has")
        origin = stage_call.PeerProcess(report.origin, report.start_ms)
        tracker.reported(report.iteration, origin, report.counted)
        self._reported()
        if report.counted:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_S):
                    while not tracker.is_over(report.iteration):
                        await self._turned.wait()
        return pb.FinishedReply(over=tracker.is_over(report.iteration)).SerializeToString()

    def begin(self, iteration: int) -> None:
        """The train thread goes on to this iteration: what is left of others is of no use."""
        for place in [place for place in self._calls if place[0].iteration < iteration]:
            self._calls.pop(place).cancel()
            self._kept.pop(place, None)
        self._budget.begin()
        self._disagreeing.clear()
        self._turn()

    def over(self, iteration: int) -> None:
        """Nobody asks any more for what has not come back by now."""
        for (key, _), task in self._calls.items():
            if key.iteration <= iteration:
                task.cancel()
        for origin, (began, counted) in self._tracker.orphans(iteration).items():
            where = {"iteration": iteration, "origin": origin.peer, "start_ms": origin.start_ms}
            left = {"microbatches": sorted(began), "counted": sorted(counted)}
            self._context.event("orphaned", **where, **left)
        self._turn()

    async def close(self) -> None:
        await cancel(self._calls.values())

    def _turn(self) -> None:
        """Microbatches that are lost with their origin were dropped; unless it was only away."""
        orphaned = self._tracker.orphaned
        self._context.counts.dropped += orphaned - self._orphaned
        self._orphaned = orphaned
        self._turned.set()
        self._turned = asyncio.Event()

    def _call_of(self, header: pb.StageCallHeader) -> StageCall:
        """Reads a header. Raises WireError: it is of another run, or does not fit the model or
        itself; StageCallTooLarge: its sizes fit one another, but are above a limit of this peer."""
        context, limit_bytes = self._context, self._budget.limit_bytes
        codec, shape = context.codec, tuple(header.shape)
        if header.run != context.run:
            raise wire.WireError("a stage call of another run")
        if header.codec != codec.wire_id:
            raise wire.WireError(f"activations in codec {header.codec}; this run's is {codec.name}")
        if len(shape) != 3 or min(shape) < 1:
            raise wire.WireError(f"activations of shape {shape}")
        size = codec.encoded_bytes(math.prod(shape))
        if header.total_bytes != size:
            raise wire.WireError(f"activations of {header.total_bytes} bytes; {shape} takes {size}")
        most = context.activation_shape or shape
        if shape[2] != most[2]:
            raise wire.WireError(f"activations of width {shape[2]}; this run's have {most[2]}")
        if shape[0] > most[0] or shape[1] > most[1]:
            raise stage_call.StageCallTooLarge(
                f"activations of shape {shape}; a batch of this run: {most}"
            )
        if size > limit_bytes:
            raise stage_call.StageCallTooLarge(
                f"[stages] memory_mib: the activations of one microbatch take {size / 2**20:.2g} "
                f"MiB, of which {limit_bytes / 2**20:.2g} are taken here; raise memory_mib on this "
                "machine, or make batches smaller"
            )
        route = [header.stage, *(hop.stage for hop in header.rest)]
        known = max(route) < context.config.count and 0 not in route[1:]
        if not known or len(set(route)) < len(route):
            raise wire.WireError(f"a route of {len(route)} stages that this model does not have")
        if header.microbatch >= context.config.microbatches:
            raise wire.WireError("a microbatch more than its origin has in an iteration")
        for name in (header.origin, *(hop.peer for hop in header.rest)):
            check_name(name, wire.WireError)
        origin = stage_call.PeerProcess(header.origin, header.start_ms)
        key = stage_call.StageCallKey(header.iteration, origin, header.microbatch)
        rest = tuple(stage_call.Hop(hop.stage, hop.peer) for hop in header.rest)
        return StageCall(key, header.stage, rest, shape, header.snapshot, header.sender)

    async def _reply(
        self, call: StageCall, header: pb.StageCallHeader, stream: Stream
    ) -> StageReply:
        place, came = (call.key, call.stage), self._context.clock()
        if place in self._calls:
            self._context.counts.repeated += 1
        else:
            await self._reached(call)
            if call.stage > 0:
                self._tracker.heard(call.key.iteration, call.key.origin)
            # A loss holds nothing for long, and must never wait for memory.
            size = stage_call.call_bytes(header.total_bytes) if call.stage else 0
            release = partial(self._budget.release, size, call.sender)
            await self._budget.acquire(size, call.sender)
            try:
                waited = self._context.clock() - came > _AT_ONCE_S
                values = await _activations(header, stream)
                received = pb.Received(waited=waited)
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
                raise stage_call.MicrobatchDropped("the iteration is over") from None
            raise

    def _start(self, call: StageCall, values: memoryview, release: Callable[[], None]) -> None:
        """Begins a call, which releases its memory in the end. Results are kept up to the limit of
        the budget; beyond, a repeated call is computed again, and counts once."""
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
        MicrobatchDropped: its origin has started again, or is no present peer of stage 0."""
        context, origin = self._context, call.key.origin
        if context.stage != call.stage or (call.stage == 0 and origin.peer != context.me):
            raise TryElsewhere(f"stage {call.stage} is not served here")
        if call.stage == 0 and origin != context.process:
            raise stage_call.MicrobatchDropped(f"its origin {origin.peer} has started again")
        tracker, iteration, came = self._tracker, call.key.iteration, context.clock()
        while call.stage > 0 and not context.is_origin(origin):
            if context.clock() >= came + _UNKNOWN_S:
                raise stage_call.MicrobatchDropped(f"{origin.peer} has begun no such microbatch")
            await asyncio.sleep(_LOOK_S)
        if call.stage > 0 and (origin.peer, call.sender) in tracker.left_out:
            raise TryElsewhere(f"{origin.peer} does not report what {call.sender} sends of it")
        while tracker.iteration < iteration and not tracker.is_far(iteration):
            await self._turned.wait()
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
            loss = await compute(JobKind.LOSS, key.iteration, key.microbatch, shape, values)
            return StageReply(loss.values, ())
        forward = await compute(JobKind.FORWARD, key.iteration, key.number, shape, values)
        reply = await self._forwarder.send(call, forward.values)
        # From here on the train thread may have counted it, before its answer is back.
        new = self._tracker.counted(key, call.sender)
        try:
            given = (key.iteration, key.number, shape, values, reply.gradient)
            backward = await compute(JobKind.BACKWARD, *given)
        except stage_call.MicrobatchDropped:
            if new:  # else an earlier call has put it into the sum
                self._tracker.failed(key)
            raise
        self._context.counts.visits += 1
        return StageReply(backward.values, (self._context.me, *reply.path))


async def _activations(header: pb.StageCallHeader, stream: Stream) -> memoryview:
    """Receives activations. What is not read is not sent, but for the half MiB that gRPC takes
    ahead. Small frames must come the sooner: all together may take as long as full ones."""
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
    return incoming.raw
