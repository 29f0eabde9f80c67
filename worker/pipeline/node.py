"""What a node does for its stage: the parts of this package put together, on the I/O thread."""

from collections.abc import Callable
from dataclasses import replace

from protos import murmuration_pb2 as pb
from worker.errors import PeersUnreachable
from worker.exchange.context import Offload, Tasks
from worker.membership import Member, Phase
from worker.pipeline.barrier import BarrierReceiver
from worker.pipeline.context import StageContext
from worker.pipeline.forwarder import Forwarder
from worker.pipeline.memory_budget import ComputeQueue, MemoryBudget
from worker.pipeline.moving import Moving
from worker.pipeline.origin import RouteOrigin
from worker.pipeline.orphaned import OrphanedStages
from worker.pipeline.planner import RoutePlanner
from worker.pipeline.probing import PROBE_BYTES, Probing
from worker.pipeline.profile import Measuring
from worker.pipeline.rebalancing import StageExchange
from worker.pipeline.serving import StageServer
from worker.pipeline.tracker import IterationTracker
from worker.training.inbox import IterationStarted, StageJobDone, StageMove, Stop, ToTrain
from worker.transport import Stream, TransportError

_PROBE_LIMIT_S = 10.0


class StageNode:
    """io thread only.

    Args:
        exchange: of a stage's parameters, by which placement is judged.
        post: takes messages for the train thread.
        publish: takes this peer's measurements, packed, to be gossiped.
    """

    def __init__(
        self,
        context: StageContext,
        offload: Offload,
        exchange: StageExchange,
        post: Callable[[ToTrain], None],
        publish: Callable[[bytes], None],
    ) -> None:
        self.context, self._post, self._publish = context, post, publish
        limit_bytes = context.config.memory_bytes
        self.room, self.counting = MemoryBudget(limit_bytes), IterationTracker()
        self.measuring = Measuring(limit_bytes, context.clock)
        self._probing = Probing(context.me, self.measuring.measured_at)
        self._desk, self._onward = (
            ComputeQueue(post, self.measuring),
            Forwarder(context, self.measuring),
        )
        self.schedule = RoutePlanner(context, offload)
        self._serving = StageServer(
            context,
            self._desk,
            self.room,
            self.counting,
            self._onward,
            self.schedule,
            self.measuring,
            self._end,
        )
        self._origin = RouteOrigin(
            context, self._desk, self.room, self.counting, self._onward, self.schedule, self._end
        )
        self._listener = BarrierReceiver(context.run, self.counting, self.tick)
        self._ends = False
        self._moving = Moving(context.me, context.config.count, exchange)
        self._unserved = OrphanedStages(context.config.count)
        self._tasks = Tasks()

    @property
    def links(self) -> dict[str, object] | None:
        """What this peer has planned with at last, for `murmur plan --links`."""
        return self.schedule.document

    async def serve(self, stream: Stream) -> None:
        """Answers `Data/Visit`."""
        await self._serving.serve(stream)

    async def on_finished(self, request: bytes) -> bytes:
        """Answers `Control/Finished`."""
        return await self._listener.answer(request)

    async def iterating(self, message: IterationStarted) -> None:
        """The train thread has begun an iteration."""
        self.counting.begin(message.iteration)
        self._listener.turned()
        self.measuring.gradient_norm = message.gradient_norm
        await self._serving.begin(message.iteration)
        if self.context.stage == 0:
            self._origin.begin(message.iteration)
        self.tick()

    def worked(self, message: StageJobDone) -> None:
        """The train thread has done a job."""
        self._desk.worked(message)

    def viewed(self) -> None:
        """The swarm has changed."""
        self._onward.viewed()
        live = (member for member in self.context.members() if member.live)
        self.measuring.present({member.peer: member.epoch for member in live})
        self.tick()

    def tick(self) -> None:
        """Looks whether the iteration is over, and whether there is something to tell."""
        context, counting = self.context, self.counting
        self.schedule.look()
        if counting.iteration > counting.ended:
            origins = [member for member in context.members() if member.stage == 0]
            if context.stage == 0:  # its own word is enough, of the life that its visits name
                epoch = self._origin.life.epoch
                origins = [replace(c, epoch=epoch) for c in origins if c.peer == context.me]
            if over := counting.over(origins, context.clock()):
                self._serving.over(over.iteration)
                self._listener.turned()
                if over.discard:
                    context.counts.discarded += 1
                    context.log({"event": "discarded", "iteration": over.iteration})
                self._post(over)
        if self._trains and not self._ends:
            self._look_after_stages()
        if member := self._probing.next(context.members(), context.clock()):
            self._tasks.spawn(self._probe(member))
        if profile := self.measuring.news(context.clock()):
            self._publish(profile.pack())

    @property
    def _trains(self) -> bool:
        member = self.context.member(self.context.me)
        training = member is not None and member.live and member.phase is Phase.TRAINING
        return training and self.counting.iteration > 0

    def _look_after_stages(self) -> None:
        """Says which have no replica left, and ends this peer's part in the run where that has to
        be: by a move to another stage, or because there is no stage 0."""
        context, members, now = self.context, self.context.members(), self.context.clock()
        for stage, line in self._unserved.look(members, now).items():
            context.log({"event": "warning", "text": line, "stage": stage})
        if self._unserved.ends(now):
            reason = (
                "stage 0 has no replica left, so nobody begins microbatches; start a worker with "
                "--stage 0, and this one again with --resume"
            )
            self._end(PeersUnreachable(reason))
        elif context.config.rebuild and (to := self._moving.look(members, now)) is not None:
            self._ends = True
            context.log({"event": "moves", "stage": context.stage, "to": to.stage})
            self._post(StageMove(to.stage, to.bare))

    def _end(self, error: Exception) -> None:
        """Ends this peer's part in the run, once."""
        if not self._ends:
            self._ends = True
            self._post(Stop(str(error), error))

    async def _probe(self, member: Member) -> None:
        """Measures the link to a peer: small calls for its latency, a large one for its rate."""
        measuring, answered = self.measuring, False
        try:
            for _ in range(2):  # the first may have to open the connection
                measuring.round_trip(member.peer, await self._timed(member, b""))
            with measuring.transfer() as transfer:
                seconds = await self._timed(member, bytes(PROBE_BYTES))
            measuring.sent(member.peer, PROBE_BYTES, seconds, alone=transfer.alone)
            answered = True
        except TransportError:
            pass  # it is tried again
        finally:
            self._probing.ended(member.peer, answered, self.context.clock())

    async def _timed(self, member: Member, payload: bytes) -> float:
        """Until the peer has taken it and said so (s). Raises TransportError."""
        request = pb.MeasureRequest(payload=payload).SerializeToString()
        began = self.context.clock()
        await self.context.transport.call(
            member.address, "Control/Measure", request, _PROBE_LIMIT_S
        )
        return self.context.clock() - began

    async def close(self) -> None:
        await self._tasks.close()
        await self.schedule.close()
        await self._origin.close()
        await self._serving.close()
        await self._onward.close()
