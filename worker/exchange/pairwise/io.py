"""Pair rounds over the transport: carries out what `worker.exchange.pairwise.rounds` says.

Messages, values and time pass through here, and nothing is decided: what follows from anything that
happens stands in the machine.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from algorithms.fragment_state import FragmentState
from algorithms.schedule import Schedule
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.arrivals import Arrival
from worker.exchange.context import Context, Tasks, reason_of
from worker.exchange.pairwise.messages import PairValues, encoded, left_out, own_part, payload_of
from worker.exchange.pairwise.rounds import PairRounds
from worker.exchange.pairwise.stream import (
    CONTRIBUTION,
    Action,
    AverageAnchors,
    CheckPart,
    DropStream,
    EndStream,
    Misfit,
    OpenStream,
    PairBuffer,
    PairSettings,
    PairStaged,
    PairStream,
    Refusal,
    RoundEnded,
    Send,
    SendPart,
    StreamClosed,
    StreamEvent,
    TellAnchor,
)
from worker.exchange.types import Failed, Succeeded, Suspect, View, alike
from worker.training.inbox import Begin, PrefetchedAnchor, RoundDone, RoundFailed
from worker.transport import Stream, Transport, TransportError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False)
class _StreamLink:
    """What carries a `PairStream`: its transport stream, and what is still to be done on it."""

    transport: Stream | None  # None: no address is known
    arrival: Arrival  # of the partner's parts, one after another
    outbox: deque[Send | SendPart] = field(default_factory=deque)
    checks: deque[CheckPart] = field(default_factory=deque)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    overtaken: bool = False  # a refusal is to be sent instead of the rest
    ending: bool = False  # once all is sent
    broken: bool = False  # nothing can be sent any more

    def put(self, action: Send | SendPart) -> None:
        if isinstance(action, Send) and isinstance(action.message, Refusal):
            self.outbox.clear()
            self.overtaken = True
        self.outbox.append(action)
        self.more.set()

    def end(self) -> None:
        self.ending = True
        self.more.set()
        if self.broken:
            self.finished.set()


class Pairs:
    """This peer's pair rounds. io thread only.

    Args:
        context: run, plan, sizes, clock.
        schedule: of the whole run.
        transport, address_of: how to reach a peer.
        finished: takes each RoundDone and RoundFailed.
        prefetched: takes the anchors' mean of a round to come, or that it will not come in time.
        suspect: takes a peer whose stream broke.
    """

    def __init__(
        self,
        context: Context,
        schedule: Schedule,
        transport: Transport,
        address_of: Callable[[str], str | None],
        finished: Callable[[RoundDone | RoundFailed], None],
        prefetched: Callable[[PrefetchedAnchor], None],
        suspect: Callable[[str], None],
    ) -> None:
        self._context, self._transport, self._address_of = context, transport, address_of
        self._finished, self._prefetched, self._suspect = finished, prefetched, suspect
        self._tasks, self._values = Tasks(), PairValues(context)
        plan, fragments = context.plan, range(len(context.elements))
        self._rounds = PairRounds(
            PairSettings(
                me=context.me,
                run=context.run,
                forms=[self._values.forms(fragment) for fragment in fragments],
                rounds=[schedule.rounds(fragment) for fragment in fragments],
                config=context.config,
                group_size=plan.group_size,
                group_key=wire.group_hash,
                anchors_told=plan.shared_momentum,
                anchors_awaited=plan.overlap_steps == 0,
            )
        )
        self._timer: asyncio.TimerHandle | None = None

    @property
    def partners(self) -> frozenset[str]:
        """With whom this peer is to hold the rounds that it has come to."""
        return self._rounds.partners

    # ------------------------------------------------------------------------ events from outside

    def tick(self) -> None:
        """Time passes."""
        self._carry(self._rounds.tick(self._now()))

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._carry(self._rounds.on_view(view, self._now()))

    async def advanced(self, fragment: int, state: FragmentState) -> None:
        """This peer has come to a version: its anchor may go ahead to the next partner."""
        wanted = self._rounds.wants_anchor(fragment, state.version)
        self._carry(self._rounds.advanced(fragment, state.version, self._now()))
        if not wanted:
            return
        try:
            anchor = await self._values.anchor(fragment, state.anchor)
        except Exception:  # the round itself says so
            self._carry(self._rounds.cannot_lay(fragment, state.version))
            return
        self._carry(self._rounds.lay(fragment, state.version, anchor, self._now()))
        asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        self._carry(self._rounds.poll(self._now()))

    async def begin(self, begin: Begin) -> None:
        """Starts a round; it ends with `finished`."""
        key, context, anchor = (begin.fragment, begin.round), self._context, None
        try:
            payload, error = await context.encoded(
                self._values.codec(CONTRIBUTION),
                begin.values,
                exact=context.limbs(begin.fragment),
                error=context.plan.keeps,
            )
            if not self._rounds.is_laid(*key):
                assert begin.anchor is not None, "pairs exchange anchors"
                anchor = await self._values.anchor(begin.fragment, begin.anchor)
        except Exception as failure:  # too large for the codec, or a defect; nobody is told of it
            self._finished(RoundFailed(*key, reason_of(failure), (context.me,)))
            return
        contribution = own_part(payload, error, context.weight(begin.weight))
        self._carry(self._rounds.begin(key, contribution, anchor, self._now()))

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's round on its way, if there is one, as failed."""
        self._carry(self._rounds.give_up(fragment, reason, self._now()))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()

    # ------------------------------------------------------------------------------- the streams

    async def serve(self, stream: Stream) -> None:
        """Serves a partner's stream."""
        link = _StreamLink(stream, self._context.arrivals.payload())
        await self._run(self._rounds.accept(self._now(), link), link)

    async def _run(self, stream: PairStream, link: _StreamLink) -> None:
        """Hears and says what is to be heard and said, until the stream is over."""
        work = [self._tasks.spawn(self._hear(stream, link)), self._tasks.spawn(self._say(link))]
        try:
            await link.finished.wait()
        finally:
            for task in work:
                task.cancel()
            link.arrival.ends()
            self._rounds.forget(stream)
            if stream.calls and link.transport is not None:
                link.transport.cancel()

    async def _say(self, link: _StreamLink) -> None:
        with suppress(TransportError):  # the receiving side of the stream reports it
            while link.transport is not None:
                if not link.outbox:
                    if link.ending:
                        break
                    link.more.clear()
                    await link.more.wait()
                    continue
                match link.outbox.popleft():
                    case SendPart() as action:
                        await self._send_part(link, link.transport, action)
                    case Send(_, message):
                        await link.transport.send(encoded(message))
                        if isinstance(message, PairStaged | Refusal):
                            await link.transport.done()
        link.broken = True
        if link.ending:
            link.finished.set()

    async def _send_part(self, link: _StreamLink, transport: Stream, action: SendPart) -> None:
        context, codec = self._context, self._values.codec(action.header.part)
        await transport.send(encoded(action.header))
        payload, offset = payload_of(action.part), action.header.offset
        for message, size, raw in wire.payload_messages(pb.PairMessage, payload, offset):
            if link.overtaken:
                return
            context.counts.contributions_sent.add(size, raw, codec)
            await context.sent(transport, message)

    async def _hear(self, stream: PairStream, link: _StreamLink) -> None:
        try:
            if link.transport is None:
                raise TransportError("no address known")
            while (raw := await link.transport.receive()) is not None:
                self._handle(stream, self._values.event(stream, raw, link.arrival))
                while link.checks:
                    self._handle(stream, await self._values.checked(link.checks.popleft()))
            self._handle(stream, StreamClosed(None))
        except TransportError as error:
            self._handle(stream, StreamClosed(str(error)))
        if stream.over and not link.ending:
            link.finished.set()

    # ------------------------------------------------------------------------------- the machine

    def _handle(self, stream: PairStream, event: StreamEvent) -> None:
        self._carry(self._rounds.handle(stream, event, self._now()))

    def _carry(self, actions: list[Action]) -> None:
        """Does what the machine says, in its order."""
        for action in actions:
            match action:
                case OpenStream(stream):
                    self._open(stream)
                case Send(stream) | SendPart(stream):
                    _link(stream).put(action)
                case EndStream(stream):
                    _link(stream).end()
                case DropStream(stream):
                    _link(stream).finished.set()
                case CheckPart(stream):
                    _link(stream).checks.append(action)
                case AverageAnchors(buffer):
                    self._tasks.spawn(self._average(buffer))
                case TellAnchor(fragment, round_, mean_anchor):
                    mean = cast("Tensor | None", mean_anchor)
                    self._prefetched(PrefetchedAnchor(fragment, round_, mean))
                case RoundEnded(buffer, Succeeded()):
                    self._tasks.spawn(self._finish(buffer))
                case RoundEnded(buffer, Failed(reason, waiting_for)):
                    self._finished(RoundFailed(*buffer.key, reason, waiting_for))
                case Misfit(declined=True):
                    self._context.counts.refuse("declined")
                case Misfit(sender, round_, again, reason):
                    kind = wire.Again if again else wire.WireError
                    self._context.refused(kind(reason), sender, round_)
                case Suspect(peer):
                    self._suspect(peer)
        self._set_timer()

    def _open(self, stream: PairStream) -> None:
        peer, address = stream.peer, self._address_of(stream.peer)
        link = _StreamLink(
            self._transport.open(address, "Data/PairRound", peer) if address else None,
            self._context.arrivals.payload(),
        )
        stream.link = link
        self._tasks.spawn(self._run(stream, link))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._rounds.timer_at) < math.inf:
            loop, delay_s = asyncio.get_running_loop(), max(0.0, at - self._now())
            self._timer = loop.call_later(delay_s, self._elapse)

    def _elapse(self) -> None:
        self._timer = None
        self._carry(self._rounds.elapse(self._now()))

    async def _average(self, buffer: PairBuffer) -> None:
        mean_anchor: Tensor | None = None
        with suppress(Exception):  # the round itself says what is wrong
            mean_anchor = await self._values.mean_anchor(buffer)
        self._carry(self._rounds.anchors_averaged(buffer, mean_anchor))

    async def _finish(self, buffer: PairBuffer) -> None:
        """Averages what the group has given. A defect ends the round: else the train thread would
        wait for it in vain."""
        result: RoundDone | RoundFailed
        try:
            result = await self._averaged(buffer)
        except Exception as failure:
            result = RoundFailed(*buffer.key, reason_of(failure), (self._context.me,))
        self._finished(result)

    async def _averaged(self, buffer: PairBuffer) -> RoundDone:
        context, own = self._context, buffer.own
        mean = await self._values.mean(buffer, CONTRIBUTION)
        learned = mean[: len(mean) - context.limbs(buffer.fragment)]
        hashes = [part.hash for part in buffer.parts(CONTRIBUTION, context.me)]
        marks = dict(zip(buffer.group, hashes, strict=True))
        for peers in alike(marks) if learned.any() else ():
            context.contribute_alike(peers)
        mean_anchor = await self._values.mean_anchor(buffer)
        took_s = self._now() - buffer.began
        sent_bytes = sum(payload_of(part).packed_bytes for part in own.values())
        context.compression.exchanged(sent_bytes * (len(buffer.group) - 1), took_s)
        return RoundDone(
            fragment=buffer.fragment,
            round=buffer.round,
            mean=mean,
            mean_anchor=mean_anchor,
            contributors=len(buffer.group),
            next_group=(),
            missed=(),
            exchange_s=took_s,
            waited_for=buffer.last,
            error=left_out(own[CONTRIBUTION]),
        )

    def _now(self) -> float:
        return self._context.clock()


def _link(stream: PairStream) -> _StreamLink:
    assert isinstance(stream.link, _StreamLink), "a stream that this peer carries"
    return stream.link
