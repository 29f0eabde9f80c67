"""What a node does for its stage: the parts of this package put together, on the I/O thread."""

from collections.abc import Callable
from contextlib import suppress

from protos import murmuration_pb2 as pb
from worker.errors import PeersUnreachable
from worker.exchange import Offload
from worker.exchange.context import Tasks
from worker.mailbox import Iterating, Move, StageWorked, Stop, ToTrain
from worker.membership import Phase
from worker.stages.context import StageContext
from worker.stages.counting import Counting
from worker.stages.desk import Desk
from worker.stages.moving import Moving
from worker.stages.onward import Onward
from worker.stages.origin import Origin, on_finished
from worker.stages.profile import Measuring
from worker.stages.room import Room
from worker.stages.schedule import Schedule
from worker.stages.serving import Serving
from worker.stages.unserved import Unserved
from worker.transport import Stream, TransportError

_PROBE_BYTES = 48 * 1024
_PROBE_LIMIT_S = 10.0
_MOST_PROBES = 32


class StageNode:
    """io thread only.

    Args:
        post: takes messages for the train thread.
        publish: takes this peer's measurements, packed, to be gossiped.
    """

    def __init__(
        self,
        context: StageContext,
        offload: Offload,
        post: Callable[[ToTrain], None],
        publish: Callable[[bytes], None],
    ) -> None:
        self.context, self._post, self._publish = context, post, publish
        limit_bytes = context.config.memory_bytes
        self.room, self.counting = Room(limit_bytes), Counting()
        self.measuring = Measuring(limit_bytes)
        self._desk, self._onward = Desk(post, self.measuring), Onward(context, self.measuring)
        self.schedule = Schedule(context, offload)
        self._serving = Serving(
            context,
            self._desk,
            self.room,
            self.counting,
            self._onward,
            self.schedule,
            self.measuring,
        )
        self._origin = Origin(
            context, self._desk, self.room, self.counting, self._onward, self.schedule
        )
        self._probed = self._ends = False
        self._moving = Moving(context.me, context.config.count)
        self._unserved = Unserved(context.config.count)
        self._tasks = Tasks()

    @property
    def links(self) -> dict[str, object] | None:
        """What this peer has planned with at last, for `murmur plan --links`."""
        return self.schedule.document

    async def serve(self, stream: Stream) -> None:
        """Answers `Data/Visit`."""
        await self._serving.serve(stream)

    def on_finished(self, request: bytes) -> bytes:
        """Answers `Control/Finished`."""
        answer = on_finished(request, self.context.run, self.counting)
        self.tick()
        return answer

    async def iterating(self, message: Iterating) -> None:
        """The train thread has begun an iteration."""
        self.counting.begin(message.iteration)
        self.measuring.gradient_norm = message.gradient_norm
        if not self._probed:
            self._probed = True
            self._tasks.spawn(self._probe())
        await self._serving.begin(message.iteration)
        if self.context.stage == 0:
            self._origin.begin(message.iteration)
        self.tick()

    def worked(self, message: StageWorked) -> None:
        """The train thread has done a job."""
        self._desk.worked(message)

    def viewed(self) -> None:
        """The swarm has changed."""
        self._onward.viewed()
        self.tick()

    def tick(self) -> None:
        """Looks whether the iteration is over, and whether there is something to tell."""
        context, counting = self.context, self.counting
        if counting.iteration > counting.ended:
            origins = [card for card in context.cards() if card.stage == 0]
            if context.stage == 0:
                origins = [card for card in origins if card.peer == context.me]
            if over := counting.over(origins, context.clock()):
                self._serving.over(over.iteration)
                if over.discard:
                    context.counts.discarded += 1
                    context.log({"event": "discarded", "iteration": over.iteration})
                self._post(over)
        if self._trains and not self._ends:
            self._look_after_stages()
        if profile := self.measuring.news(context.clock()):
            self._publish(profile.pack())

    @property
    def _trains(self) -> bool:
        card = self.context.card(self.context.me)
        training = card is not None and card.live and card.phase is Phase.TRAINING
        return training and self.counting.iteration > 0

    def _look_after_stages(self) -> None:
        """Says which have no replica left, and ends this peer's part in the run where that has to
        be: by a move to another stage, or because there is no stage 0."""
        context, cards, now = self.context, self.context.cards(), self.context.clock()
        for stage, line in self._unserved.look(cards, now).items():
            context.log({"event": "warning", "text": line, "stage": stage})
        if self._unserved.ends(now):
            self._ends = True
            reason = (
                "stage 0 has no replica left, so nobody begins microbatches; start a worker with "
                "--stage 0, and this one again with --resume"
            )
            self._post(Stop(reason, PeersUnreachable(reason)))
        elif context.config.rebuild and (to := self._moving.look(cards, now)) is not None:
            self._ends = True
            context.log({"event": "moves", "stage": context.stage, "to": to.stage})
            self._post(Move(to.stage, to.bare))

    async def _probe(self) -> None:
        """Measures the links to peers of other stages, one after another."""
        context = self.context
        others = [card for card in context.cards() if card.stage != context.stage]
        request = pb.MeasureRequest(payload=bytes(_PROBE_BYTES)).SerializeToString()
        for card in others[:_MOST_PROBES]:
            began = context.clock()
            with suppress(TransportError):
                await context.transport.call(
                    card.address, "Control/Measure", request, _PROBE_LIMIT_S
                )
                self.measuring.sent(card.peer, _PROBE_BYTES, context.clock() - began)

    async def close(self) -> None:
        await self._tasks.close()
        await self.schedule.close()
        await self._origin.close()
        await self._serving.close()
        await self._onward.close()
