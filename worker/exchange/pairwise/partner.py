"""One stream with a partner of a round in pairs, from its header to the last word of both sides.

caller                                        callee
    | PairHeader: which round, what it holds ----> |  waits until this peer has come to the round
    | <----------------------------- PairHeader    |
    | PartHeader, frames: the anchor ------------> |  both ways, ahead of the round
    | PartHeader, frames: the contribution ------> |  both ways, when the round has begun
    | Prepared: everything is here --------------> |  both ways

Instead of what is still to come a side may say a Refusal, and then nothing more. The callee ends
the stream once both have said their last word.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import mul
from typing import TYPE_CHECKING

from murmuration.algorithms.codecs import Codec, codec_by_name
from murmuration.algorithms.robust import FAR, aggregate, limit_of
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.pairwise import round as rounds
from murmuration.worker.exchange.pairwise.round import OwnPart, PairRound, TheirPart
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.transport import Method, Stream, TransportError

if TYPE_CHECKING:
    from torch import Tensor

    from murmuration.worker.exchange.pairwise.pair_rounds import Pairs


_HEADER_S = 10.0
_LIMITS = {rounds.ANCHOR: 3, rounds.CONTRIBUTION: 1}  # replicas drift apart


class _OvertakenError(Exception):
    """There is another last word, or none: nothing more of this stream matters."""


class _EndedError(Exception):
    pass


class PairValues:
    def __init__(self, context: Context) -> None:
        self._context = context

    def codec(self, part: int) -> Codec:
        plan = self._context.plan
        return codec_by_name(plan.anchor_codec if part == rounds.ANCHOR else plan.codec)

    def total_bytes(self, fragment: int, part: int) -> int:
        elements, exact = self._context.elements[fragment], self._context.limbs(fragment)
        return wire.encoded_bytes(self.codec(part), elements, exact)

    async def own(self, fragment: int, part: int, values: "Tensor", weight: int = 1) -> OwnPart:
        """A part as it goes to partners. Raises ValueError: it is not for the codec."""
        context, codec, exact = self._context, self.codec(part), self._context.limbs(fragment)
        ahead = part == rounds.ANCHOR
        error = codec.name != "fp32" if ahead else context.plan.keeps

        def encode() -> "tuple[wire.Payload, Tensor | None, float]":
            raw = wire.encode(codec, values, exact=exact)
            left_out = wire.encoding_error(codec, raw, values, exact=exact) if error else None
            known = 0.0 if ahead else wire.check_values(codec, raw, len(values), exact=exact)
            return context.compression.payload(codec, raw), left_out, known

        encoded = await context.worked(values.numel(), encode)
        return OwnPart(*encoded, 1 if ahead else context.weight(weight))

    async def size(self, round_: PairRound, part: int, incoming: wire.Incoming) -> float:
        """The norm of a partner's contribution, or of the way to its anchor. Raises WireError."""
        codec, fragment = self.codec(part), round_.fragment
        elements, exact = self._context.elements[fragment], self._context.limbs(fragment)

        def work() -> float:
            incoming.verify()
            found = wire.check_values(codec, incoming.raw, elements, exact=exact)
            if part == rounds.CONTRIBUTION:
                return found
            own = round_.own[part].payload.raw
            return wire.distance(codec, incoming.raw, own, elements, exact=exact)

        return await self._context.worked(elements, work)

    def limit(self, round_: PairRound) -> float:
        """How many usual norms count of a partner's; of two nobody knows which one is odd."""
        most = self._context.config.norm_limit
        count = len(round_.view.in_draw(round_.fragment) | {round_.me})
        return limit_of(most, count) if count > 2 else most and FAR

    def factor(self, round_: PairRound, part: int, given: OwnPart | TheirPart) -> float:
        """How much of a part counts: the same whenever it is asked for."""
        if isinstance(given, OwnPart):
            return 1.0
        if given.factor is None:
            own, limit = round_.own.get(rounds.CONTRIBUTION), _LIMITS[part] * self.limit(round_)
            known = given.size, limit, own.size if own else None
            given.factor = self._context.usual.factor(round_.fragment, *known)
        return given.factor

    async def mean_anchor(self, round_: PairRound) -> "Tensor":
        """Adds what the own anchor's encoding left out: so small steps add up."""
        mean, rest = await self.mean(round_, rounds.ANCHOR), round_.own[rounds.ANCHOR].left_out
        return mean if rest is None else mean.add_(rest)

    async def mean(self, round_: PairRound, part: int) -> "Tensor":
        codec, elements = self.codec(part), self._context.elements[round_.fragment]
        parts, weights, me = round_.parts(part), None, round_.group.index(round_.me)
        factors = [self.factor(round_, part, each) for each in parts]
        if part == rounds.CONTRIBUTION:
            weights, sizes = [each.weight for each in parts], [each.size for each in parts]
            self._context.usual.saw(round_.fragment, map(mul, sizes, factors), sizes[me])
        else:  # of the way to each anchor so much counts
            factors[me] += len(factors) - sum(factors)
        mean_of = partial(aggregate, factors=factors, weights=weights)
        exact, given = self._context.limbs(round_.fragment), [each.payload.raw for each in parts]
        work = partial(wire.average, codec, given, elements, mean_of, exact=exact)
        return await self._context.worked(len(parts) * elements, work)


class PartnerStream:
    """One side of a stream. io thread only. Args: stream: of a partner that has called; None where
    this peer is to call; round_, peer, attempt: of a call."""

    def __init__(
        self,
        pairs: "Pairs",
        stream: Stream | None = None,
        round_: PairRound | None = None,
        peer: str = "",
        attempt: int = 0,
    ) -> None:
        self.round, self.peer, self.attempt = round_, peer, attempt
        self.calls, self.over = stream is None, False
        self.header: pb.PairHeader | None = None
        self.header_by = pairs.now + _HEADER_S
        self._pairs, self._context = pairs, pairs.context
        self._stream = stream
        self._held: dict[int, int] | None = None  # by hash, how much the partner has of a part
        self._refusal: pb.Refusal | None = None
        self._last_said = self._all_said = False
        self._drained = False  # all has been said that matters: only the end is missing
        self._heard_all = False  # the partner has ended its side, after its last word
        self._ending = False  # once all is said
        self._changed, self._finished = asyncio.Event(), asyncio.Event()

    @property
    def _in_round(self) -> PairRound:
        assert self.round is not None, "it has a place in a round"
        return self.round

    async def run(self) -> None:
        if self._stream is None:
            if self.over:
                return
            try:
                self._stream = self._pairs.peers.open(self.peer, Method.PAIR_ROUND)
            except TransportError as error:
                self._closed(str(error))
                return
        spawn, stream = self._pairs.tasks.spawn, self._stream
        work = [spawn(self._hear(stream)), spawn(self._say(stream))]
        try:
            await self._finished.wait()
        finally:
            for task in work:
                task.cancel()
            self._pairs.forget(self)
            if self.calls:
                stream.cancel()

    def drop(self) -> None:
        self._pairs.forget(self)
        self._finished.set()

    def end(self) -> None:
        self._pairs.forget(self)
        self._ending = True
        self._changed.set()
        if self._all_said:
            self._finished.set()

    def refuse(self, kind: str, reason: str) -> None:
        if not self._last_said:
            self._refusal, self._last_said = wire.refusal(kind, reason), True
            self._changed.set()

    def hold(self, header: pb.PairHeader) -> None:
        self._held = {held.hash: held.offset for held in reversed(header.held)}
        self._in_round.heard_of(self.peer, self._pairs.now)
        self._pairs.step(self._in_round)
        self._pairs.changed = True

    def look(self) -> None:
        round_ = self.round
        answered = self._held is not None and not (self._last_said or self._drained)
        if round_ is not None and round_.failed and answered:
            # Even if all is here: the partner must not count on it.
            self.refuse("pruned", f"given up there: {round_.failed}")
            self._drain(round_)
        self._changed.set()

    async def _say(self, stream: Stream) -> None:
        with suppress(TransportError):  # the side that hears reports it
            with suppress(_OvertakenError):
                await self._say_all(stream)
            if self._refusal is not None:
                await stream.send(pb.PairMessage(refusal=self._refusal).SerializeToString())
            if self._last_said:
                await stream.done()
        self._all_said = True
        if self._ending:
            self._finished.set()

    async def _say_all(self, stream: Stream) -> None:
        await self._until(lambda: self.round is not None)
        round_ = self._in_round
        header = self._pairs.header(round_, self.peer)
        await stream.send(pb.PairMessage(header=header).SerializeToString())
        for part in rounds.PARTS:
            await self._until(partial(self._may_give, round_, part))
            await self._give(stream, round_, part)
        await self._until(lambda: round_.complete and not self._drained)
        self._last_said = True
        self._drain(round_)
        await stream.send(pb.PairMessage(prepared=pb.Prepared()).SerializeToString())

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Raises _OvertakenError: that is not to be any more."""
        self._check_overtaken()
        while not holds():
            self._changed.clear()
            await self._changed.wait()
            self._check_overtaken()

    def _check_overtaken(self) -> None:
        if self._refusal is not None or self._ending:
            raise _OvertakenError

    def _may_give(self, round_: PairRound, part: int) -> bool:
        """Anchors go ahead only while no round is on its way: its contribution would wait."""
        if self._held is None or self._drained or part not in round_.own:
            return False
        return round_.begun or not self._pairs.busy

    async def _give(self, stream: Stream, round_: PairRound, part: int) -> None:
        context, codec = self._context, self._pairs.values.codec(part)
        payload = round_.own[part].payload
        offset = (self._held or {}).get(payload.hash, 0)
        header = pb.PartHeader(
            part=part,
            codec=codec.wire_id,
            total_bytes=len(payload.raw),
            hash=payload.hash,
            offset=offset,
            weight=round_.weight,
        )
        await stream.send(pb.PairMessage(part=header).SerializeToString())
        most = context.frame_bytes
        for message, size, raw in wire.payload_messages(pb.PairMessage, payload, offset, most):
            self._check_overtaken()
            context.counts.contributions_sent.add(size, raw, codec)
            await context.sent(stream, message)

    async def _hear(self, stream: Stream) -> None:
        try:
            with suppress(_EndedError):
                try:
                    with suppress(_OvertakenError):
                        await self._hear_all(stream)
                except wire.WireError as error:
                    if not (self.over or self._drained):
                        self._unfit(error)
                    self._pairs.look()
                while not self.over and await stream.receive() is not None:
                    pass  # until the partner has ended its side too
            self._closed(None)
        except TransportError as error:
            self._closed(str(error))

    async def _hear_all(self, stream: Stream) -> None:
        header = (await self._next(stream, "header")).header
        if self.calls:
            self.hold(header)
        else:  # it waits, if this peer has not come to the round
            self.header, self.peer = header, header.sender
            self._pairs.admit(self, header)
        for part in rounds.PARTS:
            await self._take(stream, part)
        await self._next(stream, "prepared")
        round_ = self._in_round
        round_.partners[self.peer].prepared = True
        round_.came(self.peer, self._pairs.now)
        self._pairs.step(round_)
        await self._next(stream, "end")

    async def _next(self, stream: Stream, kind: str) -> pb.PairMessage:
        """The partner's next message, of this kind. Raises WireError."""
        if kind != "header":  # the message before is dealt with
            if self.round is not None:
                self._drain(self.round)
            self._pairs.look()
        if (raw := await stream.receive()) is None:
            raise _EndedError
        if self.over or self._drained:
            raise _OvertakenError
        message = wire.parse(pb.PairMessage, raw)
        found = message.WhichOneof("body")
        if found == "refusal" and (round_ := self.round) is not None:
            self._refused(round_, wire.refusal_kind(message.refusal), message.refusal.reason)
            self._drain(round_)
            self._pairs.look()
            raise _OvertakenError
        round_ = None if kind == "header" else self.round
        if found != kind or (kind != "header" and round_ is None):
            early = self.calls and self._held is None  # before its header: another time may be
            error = wire.Again if early else wire.WireError
            begins = "a pair round must begin with its header, and wait for its answer"
            raise error(f"{round_}: {found} in place of {kind}" if round_ else begins)
        return message

    def _refused(self, round_: PairRound, kind: str, reason: str) -> None:
        if kind == "again":
            self.drop()
            self._lose(round_, reason)
            return
        if self._held is None:
            self.drop()
        else:
            round_.partners[self.peer].declined = reason
        round_.declines(self.peer, reason)
        self._pairs.step(round_)

    async def _take(self, stream: Stream, part: int) -> None:
        header, pairs = (await self._next(stream, "part")).part, self._pairs
        round_, codec, began = self._in_round, pairs.values.codec(part), pairs.now
        theirs = self._expect(round_, header, part)
        if part == rounds.CONTRIBUTION:
            round_.came(self.peer, began)
            pairs.step(round_)
        incoming = theirs.payload
        with self._context.arrivals.payload() as arrival:
            arrival.begins(self.peer)
            while not incoming.complete:
                size, stands_for = incoming.add((await self._next(stream, "frame")).frame)
                self._context.counts.contributions_received.add(size, stands_for, codec)
                arrival.came(size)
                round_.heard_of(self.peer, pairs.now)
                pairs.step(round_)
        pairs.prefetch.arrived(incoming.received_bytes - header.offset, pairs.now - began)
        if not theirs.checked:
            await self._check(round_, part, theirs)

    def _expect(self, round_: PairRound, header: pb.PartHeader, part: int) -> TheirPart:
        name, partner = f"{round_} from {self.peer}", round_.partners[self.peer]
        weight = self._context.weight(header.weight) if part == rounds.CONTRIBUTION else 1
        codec, size = self._pairs.values.codec(part), self._pairs.total_bytes[round_.fragment][part]
        if (header.part, header.codec, header.total_bytes) != (part, codec.wire_id, size):
            raise wire.WireError(
                f"{name}: part {header.part}, {header.total_bytes} bytes of codec {header.codec}; "
                f"expected part {part}, {size} bytes of {codec.name}"
            )
        if (come := partner.parts.get(part)) is not None and round_.begun and partner.received:
            # The round counts on what is here.
            if (header.hash, weight) != (come.payload.hash, come.weight):
                raise wire.WireError(f"{name}: other values than before")
        elif come is None or come.payload.hash != header.hash or header.offset == 0:
            come = partner.parts[part] = TheirPart(wire.Incoming(size, header.hash))
        if header.offset != come.payload.received_bytes:
            raise wire.Again(f"{name}: goes on at {header.offset}")
        come.weight = weight
        return come

    async def _check(self, round_: PairRound, index: int, part: TheirPart) -> None:
        self._pairs.look()
        partner = round_.partners[self.peer]
        try:
            part.size = await self._pairs.values.size(round_, index, part.payload)
        except wire.WireError:
            if partner.parts.get(index) is part:
                del partner.parts[index]
            raise
        if self.over or self._drained:
            raise _OvertakenError
        part.checked = True
        here = partner.parts.get(index) is part
        if index == rounds.ANCHOR and here and self._pairs.prefetch.came(round_):
            self._pairs.tasks.spawn(self._pairs.average_anchors(round_))
        if partner.received:
            round_.last = self.peer
            round_.came(self.peer, self._pairs.now)
            self._pairs.step(round_)

    def _drain(self, round_: PairRound) -> None:
        if self.over or self._drained:
            return
        partner, given_up = round_.partners[self.peer], round_.failed and self._last_said
        all_said = self._last_said and partner.prepared and partner.received
        if not (given_up or all_said or partner.declined is not None):
            return
        if self.calls and not self._heard_all:
            self._drained = True
        elif partner.declined is not None:
            self.drop()
        else:
            self.end()

    def _closed(self, reason: str | None) -> None:
        round_ = self.round
        if self.over:
            return
        partner = round_.partners[self.peer] if round_ is not None else None
        silent = partner is not None and partner.prepared and partner.received
        if reason is None and silent and not self._drained:
            self._heard_all = True  # this side has still to say so
            return
        self.drop()
        if round_ is not None and not (self._drained and reason is None):
            unanswered = self.calls and self._held is None
            broke_off = "ended without an answer" if unanswered else "the stream broke off"
            self._lose(round_, reason or broke_off)
        self._pairs.look()

    def _lose(self, round_: PairRound, reason: str) -> None:
        """The stream is gone too early. A partner is called until it knows of the end."""
        if self.calls and round_.succeeded:
            self._pairs.recall(round_, self.peer, self.attempt)
        else:
            self._pairs.lose(round_, self.peer, self.attempt, f"{self.peer}: {reason}")

    def _unfit(self, error: wire.WireError) -> None:
        again, reason, round_ = isinstance(error, wire.Again), str(error), self.round
        asked = round_.round if round_ else self.header.round if self.header else 0
        self._context.refused(error, self.peer, asked)
        if round_ is not None and self._held is not None and not again:
            # And would be the same the next time.
            round_.useless.add(self.peer)
            round_.give_up(f"{self.peer}: {reason}")
            self._pairs.step(round_)
            if round_.ended:
                self._drain(round_)
                return
        if self.calls and round_ is not None:
            self.drop()
            self._lose(round_, reason)
            return
        self.refuse("again" if again else "invalid", reason)
        self.end()
