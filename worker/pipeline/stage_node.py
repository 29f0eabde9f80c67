"""A stage on the I/O thread: its components put together, and the microbatches that begin here."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.background import Tasks
from murmuration.worker.errors import PeersUnreachable
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Member, Phase
from murmuration.worker.pipeline import stage_call
from murmuration.worker.pipeline.barrier import IterationTracker, report_iteration
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.forwarder import Forwarder
from murmuration.worker.pipeline.planner import RoutePlanner
from murmuration.worker.pipeline.profile import PROBE_BYTES, LinkProber
from murmuration.worker.pipeline.rebalancing import OrphanedStages, Rebalancer
from murmuration.worker.pipeline.server import StageServer
from murmuration.worker.training.mailbox import IterationStarted, JobKind, StageJobDone
from murmuration.worker.transport import Method, TransportError

_PROBE_LIMIT_S = 10.0
_AGAIN_S = 0.25


class StageNode:
    """The work of a node for its stage; `publish` gossips its profile. io thread only."""

    def __init__(self, context: StageContext, publish: Callable[[bytes], None]) -> None:
        self.context, self._publish = context, publish
        self.tracker = IterationTracker(0, context.config.count, context.config.microbatches)
        self.planner = RoutePlanner(context)
        self._forwarder = Forwarder(context)
        self.server = StageServer(context, self.tracker, self._forwarder, self.planner, self.tick)
        self._prober = LinkProber(context.me, context.measurements.measured_at)
        self._rebalancer = Rebalancer(context.me, context.config.count)
        self._orphaned = OrphanedStages(context.config.count)
        self._tasks = Tasks()
        # Of the microbatches that begin here; the process has begun the latest iteration.
        self._process = stage_call.PeerProcess(context.me, 0)
        self._held_bytes = 0  # by a microbatch in flight, as the last one has shown
        self._shown = asyncio.Event()  # the first one has
        self._iterating: asyncio.Task[None] | None = None

    def on_view(self, view: View) -> None:
        self._forwarder.on_view()
        starts = {m.peer: m.start_ms for m in self.context.members() if m.live}
        self.context.measurements.on_view(starts)
        self.tick()

    async def handle(self, message: IterationStarted | StageJobDone) -> None:
        if isinstance(message, StageJobDone):
            self.context.computed(message)
            return
        self.tracker.begin(message.iteration)
        self.context.measurements.gradient_norm = message.gradient_norm
        self.server.begin(message.iteration)
        if self.context.stage == 0:
            if self._iterating is not None:
                self._iterating.cancel()
            self._process = self.context.process
            self._iterating = self._tasks.spawn(self._iterate(message.iteration))
        self.tick()

    def tick(self) -> None:
        """Sees to an iteration that is over, a link to be measured, and a profile to publish."""
        context = self.context
        self.planner.on_view()
        if self.tracker.iteration > self.tracker.ended:
            self._end_iteration()
        if self.tracker.iteration > 0 and not context.ended:
            self._watch_stages()
        if member := self._prober.next(context.members(), context.clock()):
            self._tasks.spawn(self._probe(member))
        if profile := context.measurements.poll(context.clock()):
            self._publish(profile.pack())

    async def close(self) -> None:
        await self._tasks.close()
        await self.planner.close()
        await self.server.close()
        await self._forwarder.acknowledgements.close()

    async def _iterate(self, iteration: int) -> None:
        context, me, warned = self.context, self._process, False
        try:
            while not any(member.stage > 0 for member in context.serving()):
                if not warned:  # stage 0 by itself would learn to be a model
                    context.event("warning", text="no other stage is served: waiting")
                warned = True
                await asyncio.sleep(_AGAIN_S)
            steps: dict[int, int] = {}
            for m in context.members():
                if m.stage > 0 and m.live and m.phase in (Phase.READY, Phase.TRAINING):
                    steps[m.stage] = max(m.step, steps.get(m.stage, 0))
            if steps and min(steps.values()) >= iteration:  # all stages have ended it without
                context.event("late", iteration=iteration)
                self.tracker.reported(iteration, me, [])
                return
            routes, snapshot = self.planner.routes(iteration)
            begun = (self._microbatch(iteration, n, way, snapshot) for n, way in enumerate(routes))
            paths = await asyncio.gather(*begun)
            others = [each for each in context.members() if each.stage > 0]
            served = {each.peer for each in others} | {hop.peer for way in routes for hop in way}
            counted: dict[str, list[int]] = {each.peer: [] for each in others if each.live}
            for microbatch, path in enumerate(paths):
                for peer in filter(served.__contains__, path or ()):  # any name may stand there
                    counted.setdefault(peer, []).append(microbatch)
            for peer, came in counted.items():
                self._tasks.spawn(report_iteration(context, me, peer, iteration, came))
            done = [n for n, path in enumerate(paths) if path is not None]
            for microbatch in done:
                self.tracker.counted(stage_call.StageCallKey(iteration, me, microbatch))
            self.tracker.reported(iteration, me, done)
        except Exception as error:  # whatever it is, the others would wait for this origin
            context.end(error)

    async def _microbatch(
        self, iteration: int, number: int, rest: tuple[stage_call.Hop, ...], snapshot: int
    ) -> tuple[str, ...] | None:
        """The peers that have taken part; None when it was lost."""
        if number > 0:
            await self._shown.wait()
        size, budget, compute = self._held_bytes, self.context.budget, self.context.compute
        await budget.acquire(size)
        try:
            entered = await compute(JobKind.ENTER, iteration, number)
            self._held_bytes = stage_call.call_bytes(len(entered.values))
            if not self._shown.is_set():
                self._shown.set()
                await budget.acquire(self._held_bytes)
                size = self._held_bytes
            key = stage_call.StageCallKey(iteration, self._process, number)
            call = stage_call.StageCall(key, 0, rest, entered.shape, snapshot, self.context.me)
            reply = await self._forwarder.send(call, entered.values)
            await compute(JobKind.LEAVE, iteration, number, entered.shape, gradient=reply.gradient)
        except stage_call.MicrobatchDropped as error:
            self.context.counts.dropped += 1
            self.context.event("dropped", iteration=iteration, microbatch=number, reason=str(error))
            return None
        finally:
            self._shown.set()
            budget.release(size)
        self.context.counts.visits += 1
        return reply.path

    def _end_iteration(self) -> None:
        context = self.context
        origins = [member for member in context.members() if member.stage == 0]
        if context.stage == 0:  # its own report is enough, of the process in its calls
            start_ms, own = self._process.start_ms, (m for m in origins if m.peer == context.me)
            origins = [m if m.start_ms == start_ms else replace(m, start_ms=start_ms) for m in own]
        before, left_out = set(self.tracker.given_up), self.tracker.left_out
        over = self.tracker.over(origins, context.clock())
        for peer in sorted(self.tracker.given_up - before):
            text = f"{peer} does not end its iterations in time: none waits for it until it does"
            context.event("warning", text=text)
        for origin, by in sorted(self.tracker.left_out - left_out):
            what = "it sends" if by == origin else f"{by} hands on, or {by} says so falsely"
            text = f"{origin} does not report what {what}: that is refused for a while"
            context.event("warning", text=text)
        if over:
            self.server.over(over.iteration)
            if over.discard:
                context.counts.discarded += 1
                context.event("discarded", iteration=over.iteration)
            context.post(over)

    def _watch_stages(self) -> None:
        """Warns of stages without a replica. Ends this peer's part: to move, or without stage 0."""
        context, members, now = self.context, self.context.members(), self.context.clock()
        me = context.member(context.me)
        if me is None or not me.live or me.phase is not Phase.TRAINING:
            return
        for stage in self._orphaned.tick(members, now):
            then = "routes leave it out" if stage else "nobody begins microbatches"
            text = f"stage {stage} has no replica left: {then}"
            context.event("warning", text=text, stage=stage)
        if self._orphaned.ends(now):
            reason = (
                "stage 0 has no replica left, so nobody begins microbatches; start a worker with "
                "--stage 0, and this one again with --resume"
            )
            context.end(PeersUnreachable(reason))
        elif context.config.rebuild and (move := self._rebalancer.tick(members, now)):
            context.event("moves", stage=context.stage, to=move.stage)
            context.end(move)

    async def _probe(self, member: Member) -> None:
        """Measures the link to a peer: small calls for its latency, a large one for its rate."""
        measurements, answered = self.context.measurements, False
        try:
            for _ in range(2):  # the first may have to open the connection
                measurements.round_trip(member.peer, await self._timed(member, b""))
            with measurements.sending() as sample:
                seconds = await self._timed(member, bytes(PROBE_BYTES))
            measurements.sent(member.peer, PROBE_BYTES, seconds, alone=sample.alone)
            answered = True
        except TransportError:
            pass  # it is tried again
        finally:
            self._prober.ended(member.peer, answered, self.context.clock())

    async def _timed(self, member: Member, payload: bytes) -> float:
        """Until the peer has it and says so (s). Raises TransportError."""
        request = pb.MeasureRequest(payload=payload).SerializeToString()
        began, transport = self.context.clock(), self.context.transport
        await transport.call(member.address, Method.MEASURE, request, _PROBE_LIMIT_S, member.peer)
        return self.context.clock() - began
