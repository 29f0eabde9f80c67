"""The microbatches that begin on a replica of stage 0, and the last word on each iteration."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from worker.exchange.context import Tasks
from worker.membership import Phase
from worker.pipeline.barrier import BarrierSender
from worker.pipeline.config import Dropped
from worker.pipeline.context import StageContext, serves
from worker.pipeline.forwarder import Forwarder
from worker.pipeline.memory_budget import ComputeQueue, MemoryBudget, given
from worker.pipeline.planner import RoutePlanner
from worker.pipeline.profile import visit_held
from worker.pipeline.stage_call import Hop, Incarnation, Key, StageCall
from worker.pipeline.tracker import IterationTracker
from worker.training.inbox import JobKind

_AGAIN_S = 0.25


class RouteOrigin:
    """io thread only.

    Args:
        end: ends this peer's part in the run: nobody else begins its microbatches.
    """

    def __init__(
        self,
        context: StageContext,
        desk: ComputeQueue,
        room: MemoryBudget,
        counting: IterationTracker,
        onward: Forwarder,
        schedule: RoutePlanner,
        end: Callable[[Exception], None],
    ) -> None:
        self._end = end
        self.life = Incarnation(context.me, 0)  # that has begun the latest iteration
        self._context, self._desk, self._room = context, desk, room
        self._counting, self._onward, self._schedule = counting, onward, schedule
        self._held_bytes = 0  # by a microbatch in flight, as the last one has shown
        self._shown = asyncio.Event()  # the first one has
        self._teller = BarrierSender(context)
        self._tasks = Tasks()
        self._iterating: asyncio.Task[None] | None = None

    def begin(self, iteration: int) -> None:
        """Sends this iteration's microbatches on their way."""
        if self._iterating is not None:
            self._iterating.cancel()
        self.life = self._context.life
        self._iterating = self._tasks.spawn(self._iterate_or_end(iteration))

    async def close(self) -> None:
        await self._tasks.close()

    async def _iterate_or_end(self, iteration: int) -> None:
        try:
            await self._iterate(iteration)
        except Exception as error:  # whatever it is, the others would wait for this origin
            self._end(error)

    async def _iterate(self, iteration: int) -> None:
        await self._someone_serves()
        if self._is_late(iteration):
            self._context.log({"event": "late", "iteration": iteration})
            self._counting.finished(iteration, self.life, [])
            return
        routes, schedule = self._schedule.routes(iteration)
        count = self._context.config.microbatches
        paths = await asyncio.gather(
            *(self._microbatch(iteration, n, routes[n], schedule) for n in range(count))
        )
        counted: defaultdict[str, list[int]] = defaultdict(list)
        for microbatch, path in enumerate(paths):
            for peer in path or ():
                counted[peer].append(microbatch)
        others = [
            member.peer for member in self._context.members() if member.live and member.stage > 0
        ]
        for peer in dict.fromkeys((*others, *counted)):
            told = counted.get(peer, [])
            self._tasks.spawn(self._teller.tell(self.life, peer, iteration, told))
        done = [n for n, path in enumerate(paths) if path is not None]
        for microbatch in done:
            self._counting.counted(Key(iteration, self.life, microbatch))
        self._counting.finished(iteration, self.life, done)

    def _is_late(self, iteration: int) -> bool:
        """Whether every other stage has ended the iteration without this origin, which was away.
        One replica is enough to tell: gossip lags, and the others may only not have told yet."""
        steps: dict[int, int] = {}
        for member in self._context.members():
            if member.stage > 0 and member.live and member.phase in (Phase.READY, Phase.TRAINING):
                steps[member.stage] = max(member.step, steps.get(member.stage, 0))
        return bool(steps) and min(steps.values()) >= iteration

    async def _someone_serves(self) -> None:
        """Waits while there is no other stage: stage 0 by itself would learn to be a model."""
        told = False
        while not any(member.stage > 0 and serves(member) for member in self._context.members()):
            if not told:
                self._context.log({"event": "warning", "text": "no other stage is served: waiting"})
            told = True
            await asyncio.sleep(_AGAIN_S)

    async def _microbatch(
        self, iteration: int, number: int, rest: tuple[Hop, ...], schedule: int
    ) -> tuple[str, ...] | None:
        """The peers that have taken part; None when it was lost."""
        if number > 0:
            await self._shown.wait()
        size = self._held_bytes
        await self._room.take(size)
        try:
            entered = await self._desk.do(JobKind.ENTER, iteration, number)
            values = given(entered)
            self._held_bytes = visit_held(len(values))
            if not self._shown.is_set():
                self._shown.set()
                await self._room.take(self._held_bytes)
                size = self._held_bytes
            key = Key(iteration, self.life, number)
            visit = StageCall(key, 0, rest, entered.shape, schedule, self._context.me)
            back = await self._onward.send(visit, values)
            await self._desk.do(
                JobKind.LEAVE, iteration, number, entered.shape, gradient=back.gradient
            )
        except Dropped as error:
            self._context.counts.dropped += 1
            self._context.log(
                {
                    "event": "dropped",
                    "iteration": iteration,
                    "microbatch": number,
                    "reason": str(error),
                }
            )
            return None
        finally:
            self._shown.set()
            self._room.give(size)
        self._context.counts.visits += 1
        return back.path
