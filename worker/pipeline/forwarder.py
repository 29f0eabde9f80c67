"""A visit sent on to the next stage; to another replica when one is lost; past a stage without."""

import asyncio
from dataclasses import replace

from worker import wire
from worker.exchange.context import Tasks
from worker.pipeline.client import call_visit
from worker.pipeline.config import Dropped, Elsewhere
from worker.pipeline.context import StageContext
from worker.pipeline.profile import Measuring
from worker.pipeline.stage_call import Back, Hop, Incarnation, StageCall
from worker.transport import TransportError, Unreachable

_PATIENCE_S = 10.0  # that a replica is silent and is not known to be gone


class Forwarder:
    """io thread only."""

    def __init__(self, context: StageContext, measuring: Measuring) -> None:
        self._context, self._measuring = context, measuring
        self._thanks = Tasks()
        self._gone: dict[Incarnation, asyncio.Event] = {}
        self._passed_by: dict[int, float] = {}  # since when, stages that have replicas
        self._told: set[int] = set()

    async def close(self) -> None:
        await self._thanks.close()

    def viewed(self) -> None:
        """The swarm has changed: who waits for a peer that is gone waits no longer."""
        live = {Incarnation.of(member) for member in self._context.members() if member.live}
        for life, gone in self._gone.items():
            if life not in live:
                gone.set()
        self._gone = {life: gone for life, gone in self._gone.items() if not gone.is_set()}
        for stage in [stage for stage in self._passed_by if not self._context.replicas(stage)]:
            del self._passed_by[stage]
            self._told.discard(stage)

    async def send(self, visit: StageCall, values: memoryview) -> Back:
        """The gradient of this stage's output, which `values` are.

        Raises:
            Dropped: the microbatch is lost.
            Elsewhere: this peer does not get through to the origin; another may.
        """
        if not visit.rest and visit.stage == 0:
            # It would ask itself for the loss, and learn to be a model of its own.
            raise Dropped("no other stage is on its route")
        origin, rest, tried = visit.key.origin, list(visit.rest), set()
        counts = self._context.counts
        while True:
            hop = rest[0] if rest else Hop(0, origin.peer)
            onward = replace(visit, stage=hop.stage, rest=tuple(rest[1:]), sender=self._context.me)
            try:
                return await self._ask(hop.peer, onward, values)
            except (TransportError, wire.WireError, Elsewhere) as error:
                if isinstance(error, TransportError):
                    self._context.doubt(hop.peer)
                if not rest:
                    raise self._lost_at_origin(origin, error) from error
                tried.add(hop.peer)
                left = [p for p in self._context.replicas(hop.stage) if p not in tried]
                if left:
                    rest[0] = Hop(hop.stage, left[visit.key.number % len(left)])
                    counts.rerouted += 1
                else:
                    rest.pop(0)
                    counts.skipped += 1
                    self._tell_of_skip(hop.stage, error)
                self._context.log(
                    {
                        "event": "rerouted",
                        "iteration": visit.key.iteration,
                        "microbatch": visit.key.microbatch,
                        "origin": origin.peer,
                        "epoch": origin.epoch,
                        "stage": hop.stage,
                        "lost": hop.peer,
                        "instead": rest[0].peer if left else None,
                        "reason": str(error),
                    }
                )
                if not rest and origin.peer == self._context.me:
                    # Stage 0 by itself would learn to be a model of its own.
                    raise Dropped(f"no stage takes it; the last: {error}") from error

    def _tell_of_skip(self, stage: int, error: Exception) -> None:
        """Once of a stage that still has replicas: none takes a microbatch, or none is reached, and
        not because it is about to be known as gone."""
        context, now = self._context, self._context.clock()
        replicas = context.replicas(stage)
        if not replicas or stage in self._told:
            return
        silent = isinstance(error, TransportError)
        if silent and now - self._passed_by.setdefault(stage, now) < _PATIENCE_S:
            return
        self._passed_by.setdefault(stage, now)
        self._told.add(stage)
        text = (
            f"a microbatch goes past stage {stage}, though {', '.join(replicas)} "
            f"{'serves' if len(replicas) == 1 else 'serve'} it: {error}"
        )
        context.log({"event": "warning", "text": text, "stage": stage})

    def _lost_at_origin(self, origin: Incarnation, error: Exception) -> Exception:
        """Asked in vain for the loss: another peer may reach an origin that lives."""
        member, me = self._context.member(origin.peer), self._context.me
        lives = member is not None and member.live and member.epoch <= origin.epoch
        there = lives and origin.peer != me and not isinstance(error, Elsewhere)
        reason = f"its origin {origin.peer} does not answer {me}: {error}"
        return (Elsewhere if there else Dropped)(reason)

    async def _ask(self, peer: str, visit: StageCall, values: memoryview) -> Back:
        member = self._context.member(peer)
        if member is None or not member.live:
            raise Unreachable(f"{peer} is gone")
        gone = asyncio.ensure_future(
            self._gone.setdefault(Incarnation.of(member), asyncio.Event()).wait()
        )
        call = asyncio.ensure_future(
            call_visit(self._context, member, visit, values, self._measuring, self._thanks)
        )
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Unreachable(f"{peer} is gone")
            return call.result()
        finally:
            gone.cancel()
            call.cancel()
            if call.done() and not call.cancelled():
                call.exception()  # nobody asks for it when this was cancelled meanwhile
