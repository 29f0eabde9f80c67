"""What a node does for its stage: the parts of this package put together, on the I/O thread."""

from collections.abc import Callable

from worker.exchange import Offload
from worker.mailbox import Iterating, StageWorked, ToTrain
from worker.stages.context import StageContext
from worker.stages.counting import Counting
from worker.stages.desk import Desk
from worker.stages.onward import Onward
from worker.stages.origin import Origin, on_finished
from worker.stages.profile import Measuring
from worker.stages.room import Room
from worker.stages.schedule import Schedule
from worker.stages.serving import Serving
from worker.transport import Stream

_MIB = 1 << 20


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
        limit_bytes = round(context.config.memory_mib * _MIB)
        self.room, self.counting = Room(limit_bytes), Counting()
        self.measuring = Measuring(limit_bytes)
        self._desk, self._onward = Desk(post, self.measuring), Onward(context)
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
        self._over = 0

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
        await self._serving.begin(message.iteration)
        if self.context.stage == 0:
            self._origin.begin(message.iteration)

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
        if counting.iteration > self._over:
            origins = [card for card in context.cards() if card.stage == 0]
            if context.stage == 0:
                origins = [card for card in origins if card.peer == context.me]
            if over := counting.over(origins, context.clock()):
                self._over = over.iteration
                if over.discard:
                    context.counts.discarded += 1
                    context.log({"event": "discarded", "iteration": over.iteration})
                self._post(over)
        if profile := self.measuring.news():
            self._publish(profile.pack())

    async def close(self) -> None:
        await self._origin.close()
        await self._serving.close()
