"""The microbatches that begin on a replica of stage 0, and the last word on each iteration."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from worker.exchange.context import Tasks
from worker.membership import Phase
from worker.pipeline.barrier import Teller
from worker.pipeline.config import Dropped
from worker.pipeline.context import StageContext, serves
from worker.pipeline.forwarder import Onward
from worker.pipeline.memory_budget import Desk, Room, given
from worker.pipeline.planner import Schedule
from worker.pipeline.profile import visit_held
from worker.pipeline.stage_call import Hop, Key, Life, Visit
from worker.pipeline.tracker import Counting
from worker.training.inbox import Job

_AGAIN_S = 0.25


class Origin:
    """io thread only.

    Args:
        end: ends this peer's part in the run: nobody else begins its microbatches.
    """

    def __init__(
        self,
        context: StageContext,
        desk: Desk,
        room: Room,
        counting: Counting,
        onward: Onward,
        schedule: Schedule,
        end: Callable[[Exception], None],
    ) -> None:
        self._end = end
        self.life = Life(context.me, 0)  # that has begun the latest iteration
        self._context, self._desk, self._room = context, desk, room
        self._counting, self._onward, self._schedule = counting, onward, schedule
        self._held_bytes = 0  # by a microbatch in flight, as the last one has shown
        self._shown = asyncio.Event()  # the first one has
        self._teller = Teller(context)
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
        others = [card.peer for card in self._context.cards() if card.live and card.stage > 0]
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
        for card in self._context.cards():
            if card.stage > 0 and card.live and card.phase in (Phase.READY, Phase.TRAINING):
                steps[card.stage] = max(card.step, steps.get(card.stage, 0))
        return bool(steps) and min(steps.values()) >= iteration

    async def _someone_serves(self) -> None:
        """Waits while there is no other stage: stage 0 by itself would learn to be a model."""
        told = False
        while not any(card.stage > 0 and serves(card) for card in self._context.cards()):
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
            entered = await self._desk.do(Job.ENTER, iteration, number)
            values = given(entered)
            self._held_bytes = visit_held(len(values))
            if not self._shown.is_set():
                self._shown.set()
                await self._room.take(self._held_bytes)
                size = self._held_bytes
            key = Key(iteration, self.life, number)
            visit = Visit(key, 0, rest, entered.shape, schedule, self._context.me)
            back = await self._onward.send(visit, values)
            await self._desk.do(Job.LEAVE, iteration, number, entered.shape, gradient=back.gradient)
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
