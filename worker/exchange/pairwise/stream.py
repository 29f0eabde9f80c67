"""One stream of a round in a small group: what either partner gives, both ways at once."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from algorithms.codecs import Codec
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.context import Context, Tasks
from worker.exchange.pairwise import round as machine
from worker.exchange.pairwise.buffer import ANCHOR, CONTRIBUTION, PARTS, PairBuffer, codec_of
from worker.exchange.pairwise.prefetch import AnchorPrefetch
from worker.exchange.pairwise.round import ArrivalSkew
from worker.exchange.types import GivenUp
from worker.transport import Stream, TransportError


class Rounds(Protocol):
    """What a conversation needs of the peer's rounds."""

    context: Context
    tasks: Tasks
    lead: ArrivalSkew
    head_starts: AnchorPrefetch

    def step(self, table: PairBuffer, event: machine.Event) -> None:
        """Something has happened in the round."""

    def busy(self) -> bool:
        """Whether what is sent ahead must wait."""

    async def changed(self) -> None:
        """Waits until something is another than it was."""


class _Over(Exception):
    """This peer has given the round up."""


class PairStream:
    """With one partner of a table, from the headers on."""

    def __init__(self, rounds: Rounds, table: PairBuffer, peer: str, stream: Stream) -> None:
        self._rounds, self._context = rounds, rounds.context
        self._table, self._peer, self._stream = table, peer, stream
        self._coming_since, self._here_before = 0.0, 0

    async def hold(self, theirs: pb.MeetHeader) -> None:
        """Until both sides hold everything, or one of them has given the round up and said so.

        Raises:
            TransportError: the stream has ended before.
            WireError: what came does not fit.
        """
        table, peer = self._table, self._peer
        table.heard = self._context.clock()
        self._rounds.step(table, machine.Heard(peer))
        saying = self._rounds.tasks.spawn(self._say(theirs))
        try:
            while not self._said_all():
                raw = await self._stream.receive()
                if raw is None:
                    raise TransportError(f"{peer}: the stream broke off")
                try:
                    await self._hear(wire.parse(pb.MeetMessage, raw))
                except wire.Again:
                    raise
                except wire.WireError as error:  # and would be the same the next time
                    self._rounds.step(table, GivenUp(f"{peer}: {error}"))
                    if not table.ended:
                        raise
                    self._context.refused(error, peer, table.round)
            if peer not in table.declined:
                await saying
        finally:
            saying.cancel()

    def _said_all(self) -> bool:
        """Whether the partner has nothing more to say that matters."""
        table, peer = self._table, self._peer
        over = table.failed or peer in table.declined
        return bool(over) or (peer in table.staged and table.received(peer))

    # ------------------------------------------------------------------------------------- saying

    async def _say(self, theirs: pb.MeetHeader) -> None:
        """Each part as soon as there is one, then that everything is here."""
        with suppress(TransportError):  # the receiving side of the stream reports it
            try:
                for part in PARTS:
                    await self._give(part, theirs)
                await self._until(lambda: self._table.complete)
                await self._stream.send(pb.MeetMessage(staged=pb.Staged()).SerializeToString())
            except _Over:
                reason = f"given up there: {self._table.failed}"
                refusal = pb.Refusal(code=pb.RefusalCode.REFUSAL_PRUNED, reason=reason)
                await self._stream.send(pb.MeetMessage(refusal=refusal).SerializeToString())
            await self._stream.done()

    async def _give(self, part: int, theirs: pb.MeetHeader) -> None:
        """A part, from where an earlier stream has left it."""
        table, context, codec = self._table, self._context, self._codec(part)
        await self._until(
            lambda: part in table.own and (table.meeting is not None or not self._rounds.busy())
        )
        payload = table.own[part]
        held = theirs.held[part] if part < len(theirs.held) else pb.Held()
        offset = held.offset if held.hash == payload.hash else 0
        await self._stream.send(table.part_header(part, codec, offset))
        for message, size, raw in wire.payload_messages(pb.MeetMessage, payload, offset):
            if table.failed:
                raise _Over
            context.counts.contributions_sent.add(size, raw, codec)
            await context.sent(self._stream, message)

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not self._table.failed:
            if ready():
                return
            await self._rounds.changed()
        raise _Over  # even if all that was to be said is there: the partner must not count on it

    # ------------------------------------------------------------------------------------ hearing

    async def _hear(self, message: pb.MeetMessage) -> None:
        context, table, peer = self._context, self._table, self._peer
        match message.WhichOneof("body"):
            case "part":
                part = message.part.part
                if part not in PARTS:
                    raise wire.WireError(f"{table.name} from {peer}: part {part}")
                weight = context.weight(message.part.weight) if part == CONTRIBUTION else 1
                elements = context.elements[table.fragment]
                table.expect(peer, message.part, self._codec(part), elements, weight)
                self._coming_since = context.clock()
                self._here_before = table.theirs[peer][part].received_bytes
                if part == CONTRIBUTION:
                    self._rounds.step(table, machine.Met(peer))
            case "frame":
                part, incoming = table.arriving(peer)
                size, stands_for = incoming.add(message.frame)
                table.heard = context.clock()
                if incoming.complete:
                    came_bytes = incoming.received_bytes - self._here_before
                    self._rounds.lead.came(came_bytes, table.heard - self._coming_since)
                context.counts.contributions_received.add(size, stands_for, self._codec(part))
                self._rounds.step(table, machine.Heard(peer))
            case "staged":
                table.staged.add(peer)
                self._rounds.step(table, machine.PartnerStaged(peer))
            case "refusal":
                event = declined(peer, message.refusal)
                table.declined[peer] = event.reason
                self._rounds.step(table, event)
            case other:
                raise wire.WireError(f"{table.name} from {peer}: an unexpected {other}")
        await self._verify()

    async def _verify(self) -> None:
        """Checks a part that has just become complete."""
        table, peer = self._table, self._peer
        for part, incoming in table.unchecked(peer):
            try:
                incoming.verify()
                await self._check(incoming, self._codec(part))
            except wire.WireError:
                table.drop(peer, part)
                raise
            table.checked.add((peer, part))
            if part == ANCHOR:
                self._rounds.head_starts.came(table)
            if table.received(peer):
                table.last = peer
                self._rounds.step(table, machine.Received(peer))

    async def _check(self, incoming: wire.Incoming, codec: Codec) -> None:
        elements, buffer = self._context.elements[self._table.fragment], incoming.buffer
        await self._context.worked(
            elements, lambda: wire.check_values(codec, buffer, elements, codec.limit)
        )

    def _codec(self, part: int) -> Codec:
        return codec_of(self._context.plan, part)


def declined(peer: str, refusal: pb.Refusal) -> machine.Declined:
    """Raises TransportError: the partner only wants it again."""
    if refusal.code == pb.RefusalCode.REFUSAL_AGAIN:
        raise TransportError(refusal.reason)
    return machine.Declined(peer, refusal.reason)


def refusal(error: wire.WireError) -> pb.Refusal:
    """What a partner hears of that which came and does not fit."""
    again = isinstance(error, wire.Again)
    code = pb.RefusalCode.REFUSAL_AGAIN if again else pb.RefusalCode.REFUSAL_INVALID
    return pb.Refusal(code=code, reason=str(error))
