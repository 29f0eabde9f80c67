"""An origin's last word on an iteration: how it is told, and what the answer vouches for.

A peer answers when the iteration is over there, with its sum complete. Until then what it has
counted may die with it, also when it has the word of this origin, and waits for another's.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from protos import murmuration_pb2 as pb
from worker import wire
from worker.membership import Member
from worker.pipeline.context import StageContext
from worker.pipeline.stage_call import Incarnation
from worker.pipeline.tracker import IterationTracker
from worker.transport import TransportError

_TELL_S = 2.0
_AGAIN_S = 0.25
_HOLD_S = 0.5  # an answer is held back; well below _TELL_S


class BarrierSender:
    """An origin's side. io thread only."""

    def __init__(self, context: StageContext) -> None:
        self._context = context

    async def tell(
        self, origin: Incarnation, peer: str, iteration: int, counted: Sequence[int]
    ) -> None:
        """Until the peer has it, and has ended the iteration if it has counted visits in it; or
        until it is gone, and what it had counted too if amid the iteration.

        A peer that does not answer is known to be gone only seconds later. What it has counted is
        told as `unconfirmed` at once: this origin may be gone itself by then. Else it tells later
        that it is `lost`, or `confirmed`.

        Args: origin: this peer, as its visits of the iteration have named it.
        """
        context, first = self._context, self._context.member(peer)
        epoch = first.epoch if first is not None else None
        request = pb.FinishedRequest(
            run=context.run,
            origin=origin.peer,
            epoch=origin.epoch,
            iteration=iteration,
            counted=counted,
        ).SerializeToString()
        unconfirmed = over = False
        while not over and (member := self._member(peer, epoch)) is not None and member.live:
            try:
                answer = await context.transport.call(
                    member.address, "Control/Finished", request, _TELL_S
                )
                over = not counted or wire.parse(pb.FinishedReply, answer).over
            except (TransportError, wire.WireError):
                context.doubt(peer)
                if counted and not unconfirmed:
                    self._log("unconfirmed", iteration, peer, counted)
                    unconfirmed = True
                await asyncio.sleep(_AGAIN_S)
        if counted and not over and (member is None or member.step < iteration):
            context.counts.lost += len(counted)
            self._log("lost", iteration, peer, counted)
        elif unconfirmed:
            self._log("confirmed", iteration, peer, counted)

    def _member(self, peer: str, epoch: int | None) -> Member | None:
        """Of that life; a later one has counted nothing."""
        member = self._context.member(peer)
        return member if member is not None and member.epoch == epoch else None

    def _log(self, kind: str, iteration: int, peer: str, counted: Sequence[int]) -> None:
        self._context.log(
            {"event": kind, "iteration": iteration, "replica": peer, "microbatches": list(counted)}
        )


class BarrierReceiver:
    """A stage's side. io thread only."""

    def __init__(self, run: int, counting: IterationTracker, heard: Callable[[], None]) -> None:
        """Args:
        heard: looks whether the iteration is over now.
        """
        self._run, self._counting, self._heard = run, counting, heard
        self._turned = asyncio.Event()

    def turned(self) -> None:
        """An iteration is over, or another has begun."""
        self._turned.set()
        self._turned = asyncio.Event()

    async def answer(self, request: bytes) -> bytes:
        """Takes an origin's last word. Raises WireError."""
        finished, counting = wire.parse(pb.FinishedRequest, request), self._counting
        if finished.run != self._run:
            raise wire.WireError("a last word on another run")
        origin = Incarnation(finished.origin, finished.epoch)
        counting.finished(finished.iteration, origin, finished.counted)
        self._heard()
        if finished.counted:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_S):
                    while not counting.is_over(finished.iteration):
                        await self._turned.wait()
        over = counting.is_over(finished.iteration)
        return pb.FinishedReply(over=over).SerializeToString()
