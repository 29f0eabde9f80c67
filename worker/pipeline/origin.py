"""The microbatches that begin on a replica of stage 0, and what it reports of each iteration."""

import asyncio
from collections import defaultdict

from murmuration.worker.background import Tasks
from murmuration.worker.membership import Phase
from murmuration.worker.pipeline.barrier import IterationTracker, report_iteration
from murmuration.worker.pipeline.context import StageContext, values_of
from murmuration.worker.pipeline.forwarder import Forwarder
from murmuration.worker.pipeline.planner import RoutePlanner
from murmuration.worker.pipeline.stage_call import (
    Hop,
    Incarnation,
    StageCall,
    StageCallKey,
    call_bytes,
)
from murmuration.worker.pipeline.stages_config import MicrobatchDropped
from murmuration.worker.training.mailbox import JobKind

_AGAIN_S = 0.25


class RouteOrigin:
    """Sends microbatches on their way, and waits until they are back. io thread only."""

    def __init__(
        self,
        context: StageContext,
        tracker: IterationTracker,
        forwarder: Forwarder,
        planner: RoutePlanner,
    ) -> None:
        self._context, self._tracker = context, tracker
        self._forwarder, self._planner = forwarder, planner
        self.incarnation = Incarnation(context.me, 0)  # that has begun the latest iteration
        self._held_bytes = 0  # by a microbatch in flight, as the last one has shown
        self._shown = asyncio.Event()  # the first one has
        self._tasks = Tasks()
        self._iterating: asyncio.Task[None] | None = None

    def begin(self, iteration: int) -> None:
        """Sends this iteration's microbatches on their way."""
        if self._iterating is not None:
            self._iterating.cancel()
        self.incarnation = self._context.incarnation
        self._iterating = self._tasks.spawn(self._iterate_or_end(iteration))

    async def close(self) -> None:
        await self._tasks.close()

    async def _iterate_or_end(self, iteration: int) -> None:
        try:
            await self._iterate(iteration)
        except Exception as error:  # whatever it is, the others would wait for this origin
            self._context.end(error)

    async def _iterate(self, iteration: int) -> None:
        await self._someone_serves()
        if self._is_late(iteration):
            self._context.event("late", iteration=iteration)
            self._tracker.reported(iteration, self.incarnation, [])
            return
        routes, snapshot = self._planner.routes(iteration)
        count = self._context.config.microbatches
        paths = await asyncio.gather(
            *(self._microbatch(iteration, n, routes[n], snapshot) for n in range(count))
        )
        counted: defaultdict[str, list[int]] = defaultdict(list)
        for microbatch, path in enumerate(paths):
            for peer in path or ():
                counted[peer].append(microbatch)
        others = [
            member.peer for member in self._context.members() if member.live and member.stage > 0
        ]
        for peer in dict.fromkeys((*others, *counted)):
            came = counted.get(peer, [])
            self._tasks.spawn(
                report_iteration(self._context, self.incarnation, peer, iteration, came)
            )
        done = [n for n, path in enumerate(paths) if path is not None]
        for microbatch in done:
            self._tracker.counted(StageCallKey(iteration, self.incarnation, microbatch))
        self._tracker.reported(iteration, self.incarnation, done)

    def _is_late(self, iteration: int) -> bool:
        """Whether every other stage has ended the iteration without this origin, which was away.
        One replica of a stage is enough to tell: gossip of the others may only be slower."""
        steps: dict[int, int] = {}
        for member in self._context.members():
            if member.stage > 0 and member.live and member.phase in (Phase.READY, Phase.TRAINING):
                steps[member.stage] = max(member.step, steps.get(member.stage, 0))
        return bool(steps) and min(steps.values()) >= iteration

    async def _someone_serves(self) -> None:
        """Waits while there is no other stage: stage 0 by itself would learn to be a model."""
        warned = False
        while not any(member.stage > 0 for member in self._context.serving()):
            if not warned:
                self._context.event("warning", text="no other stage is served: waiting")
            warned = True
            await asyncio.sleep(_AGAIN_S)

    async def _microbatch(
        self, iteration: int, number: int, rest: tuple[Hop, ...], snapshot: int
    ) -> tuple[str, ...] | None:
        """The peers that have taken part; None when it was lost."""
        if number > 0:
            await self._shown.wait()
        size, budget, compute = self._held_bytes, self._context.budget, self._context.compute
        await budget.acquire(size)
        try:
            entered = await compute.do(JobKind.ENTER, iteration, number)
            values = values_of(entered)
            self._held_bytes = call_bytes(len(values))
            if not self._shown.is_set():
                self._shown.set()
                await budget.acquire(self._held_bytes)
                size = self._held_bytes
            key = StageCallKey(iteration, self.incarnation, number)
            call = StageCall(key, 0, rest, entered.shape, snapshot, self._context.me)
            reply = await self._forwarder.send(call, values)
            await compute.do(
                JobKind.LEAVE, iteration, number, entered.shape, gradient=reply.gradient
            )
        except MicrobatchDropped as error:
            self._context.counts.dropped += 1
            lost = {"iteration": iteration, "microbatch": number}
            self._context.event("dropped", **lost, reason=str(error))
            return None
        finally:
            self._shown.set()
            budget.release(size)
        self._context.counts.visits += 1
        return reply.path
