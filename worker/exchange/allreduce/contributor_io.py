"""The contributing side: this peer's rounds, each shard to its reducer and each reduction back."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from algorithms.diloco import contribution_seed
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.allreduce import contributor as machine
from worker.exchange.allreduce import reducer as reducing
from worker.exchange.allreduce.contributor import Contributing
from worker.exchange.allreduce.reducer_io import Reducer
from worker.exchange.context import Context, Tasks
from worker.exchange.types import (
    Failed,
    GivenUp,
    RoundTick,
    ShardKey,
    Succeeded,
    Suspect,
    View,
    ViewUpdated,
)
from worker.training.inbox import Begin, RoundDone, RoundFailed
from worker.transport import Stream, Transport, TransportError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Round:
    """One of this peer's rounds on its way."""

    machine: Contributing
    group: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    payloads: list[wire.Payload]
    error: "Tensor | None"
    weight: int
    mean: "Tensor"
    began: float
    away: set[int] = field(default_factory=set)  # the shards that others reduce
    lanes: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    slowest: str = ""  # the reducer whose answer came last
    streams: dict[tuple[int, int], asyncio.Task[None]] = field(default_factory=dict)
    partial: dict[int, wire.Incoming] = field(default_factory=dict)
    reductions: dict[int, wire.Reduction] = field(default_factory=dict)


class Contributor:
    """This peer's own rounds, at most one per fragment. io thread only.

    Args:
        context: what both sides share.
        reducer: this peer's own, for the shard that falls to itself.
        transport, address_of: how to reach a peer.
        finished: takes each RoundDone and RoundFailed.
        doubt: takes a peer whose stream broke.
    """

    def __init__(
        self,
        context: Context,
        reducer: Reducer,
        transport: Transport,
        address_of: Callable[[str], str | None],
        finished: Callable[[RoundDone | RoundFailed], None],
        doubt: Callable[[str], None],
    ) -> None:
        self._context, self._reducer = context, reducer
        self._transport, self._address_of = transport, address_of
        self._finished, self._doubt = finished, doubt
        self._view = View()
        self._rounds: dict[int, _Round] = {}
        self._tasks = Tasks()

    def tick(self) -> None:
        """Time passes."""
        for round_ in list(self._rounds.values()):
            self._step(round_, RoundTick())

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._view = view
        for round_ in list(self._rounds.values()):
            self._step(round_, ViewUpdated(view))

    async def begin(self, begin: Begin) -> None:
        """Starts a round; it ends with `finished`. A round of the fragment still on its way is
        given up: its result could not be applied any more."""
        fragment, context = begin.fragment, self._context
        bounds = context.bounds(fragment, begin.group)
        began = context.clock()
        try:
            payloads, error = await context.worked(
                begin.values.numel(), lambda: self._encode(begin, bounds)
            )
        except ValueError as failure:  # too large for the codec; nobody is told of it
            self._finished(RoundFailed(fragment, begin.round, str(failure), (context.me,)))
            return
        own = Contributing(
            context.me,
            fragment,
            begin.round,
            context.orders(fragment, begin.group),
            self._view,
            context.config,
            deadline=context.clock() + context.round_s(fragment),
        )
        if earlier := self._rounds.pop(fragment, None):
            for task in earlier.streams.values():
                task.cancel()
        mean = begin.values.new_empty(begin.values.shape)
        round_ = _Round(own, begin.group, bounds, payloads, error, begin.weight, mean, began)
        self._rounds[fragment] = round_
        self._step(round_, RoundTick())

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's round on its way, if there is one, as failed."""
        if round_ := self._rounds.get(fragment):
            self._step(round_, GivenUp(reason))

    async def close(self) -> None:
        await self._tasks.close()

    # --------------------------------------------------------------------------------- inside

    def _encode(
        self, begin: Begin, bounds: tuple[tuple[int, int], ...]
    ) -> tuple[list[wire.Payload], "Tensor | None"]:
        """The payload of each shard, and what their encoding has left out. Runs off the loop."""
        context, values = self._context, begin.values
        codec, plan = context.codec, context.plan
        if plan.rounding == "stochastic":
            shards = [
                wire.encode(
                    codec,
                    values[start:stop],
                    contribution_seed(context.me, begin.fragment, begin.round, start),
                )
                for start, stop in bounds
            ]
        else:  # shards lie on whole blocks, so the encoding of all is theirs, one after another
            whole = wire.encode(codec, values)
            shards = [
                whole[codec.encoded_bytes(start) : codec.encoded_bytes(stop)]
                for start, stop in bounds
            ]
        error = values.new_empty(values.shape) if plan.error_feedback else None
        if error is not None:
            for raw, (start, stop) in zip(shards, bounds, strict=True):
                error[start:stop] = wire.encoding_error(codec, raw, values[start:stop])
        return [context.compression.payload(codec, raw) for raw in shards], error

    def _step(self, round_: _Round, event: machine.Event) -> None:
        if self._rounds.get(round_.machine.fragment) is not round_:
            return
        actions = round_.machine.step(event, self._context.clock())
        ended = any(isinstance(action, Failed) for action in actions)
        for action in actions:
            match action:
                case machine.OpenExchange(key, peer, attempt, resumed):
                    work = (
                        self._contribute_here(round_, key, attempt)
                        if peer == self._context.me
                        else self._contribute_there(round_, key, peer, attempt, resumed)
                    )
                    round_.streams[key.shard, attempt] = self._tasks.spawn(work)
                case machine.CancelExchange(key, attempt):
                    if task := round_.streams.pop((key.shard, attempt), None):
                        task.cancel()
                        self._context.counts.takeovers += not ended
                case Suspect(peer):
                    self._doubt(peer)
                case Succeeded():
                    del self._rounds[round_.machine.fragment]
                    self._finished(self._result(round_))
                case Failed(reason, waiting_for):
                    del self._rounds[round_.machine.fragment]
                    self._finished(
                        RoundFailed(
                            round_.machine.fragment,
                            round_.machine.round,
                            reason,
                            waiting_for,
                            self._counted(round_),
                            round_.error,
                        )
                    )

    def _counted(self, round_: _Round) -> tuple[tuple[int, int], ...]:
        """The ranges whose reduction is here and has this peer in it."""
        return tuple(
            round_.bounds[shard]
            for shard, reduction in sorted(round_.reductions.items())
            if self._context.me in reduction.contributors
        )

    def _result(self, round_: _Round) -> RoundDone:
        shards = [round_.reductions[index] for index in range(len(round_.bounds))]
        missed = tuple(
            bounds
            for bounds, shard in zip(round_.bounds, shards, strict=True)
            if self._context.me not in shard.contributors
        )
        self._context.counts.late += bool(missed)
        sent_bytes = sum(round_.payloads[shard].packed_bytes for shard in round_.away)
        exchange_s = self._context.clock() - round_.began
        # Reductions for the others, of about as many bytes, went out in the same time.
        self._context.compression.exchanged(2 * sent_bytes, exchange_s)
        return RoundDone(
            fragment=round_.machine.fragment,
            round=round_.machine.round,
            mean=round_.mean,
            contributors=min(len(shard.contributors) for shard in shards),
            next_group=shards[0].next_group,
            missed=missed,
            exchange_s=exchange_s,
            waited_for=_waited_for(round_),
            error=round_.error,
        )

    async def _contribute_here(self, round_: _Round, key: ShardKey, attempt: int) -> None:
        """This peer is the shard's reducer itself."""
        answer = await self._reducer.contribute(
            key, round_.group, round_.payloads[key.shard], round_.weight
        )
        event: machine.Event
        match answer:
            case reducing.RedirectTo(peer):
                event = machine.Redirected(key.shard, attempt, peer)
            case reducing.Refuse("again", reason):
                event = machine.Broken(key.shard, attempt, reason, link=False)
            case reducing.Refuse(_, reason):
                event = machine.Refused(key.shard, attempt, reason)
            case reduction:
                await self._take(round_, key, reduction, self._context.me)
                event = machine.Reduced(key.shard, attempt)
        round_.streams.pop((key.shard, attempt), None)
        self._step(round_, event)

    async def _contribute_there(
        self, round_: _Round, key: ShardKey, peer: str, attempt: int, resumed: bool
    ) -> None:
        """Another peer reduces the shard."""
        round_.away.add(key.shard)
        event: machine.Event
        try:
            address = self._address_of(peer)
            if address is None:
                raise TransportError(f"{peer}: no address known")
            stream = self._transport.open(address, "Data/Exchange")
            try:
                event = await self._converse(round_, key, peer, attempt, resumed, stream)
            finally:
                stream.cancel()
        except TransportError as error:
            event = machine.Broken(key.shard, attempt, f"{peer}: {error}", link=True)
        except wire.WireError as error:
            round_.partial.pop(key.shard, None)
            event = machine.Broken(key.shard, attempt, f"{peer}: {error}", link=False)
        round_.streams.pop((key.shard, attempt), None)
        self._step(round_, event)

    async def _converse(
        self,
        round_: _Round,
        key: ShardKey,
        peer: str,
        attempt: int,
        resumed: bool,
        stream: Stream,
    ) -> machine.Event:
        """One try: header and contribution up, reduction down."""
        payload, shard = round_.payloads[key.shard], key.shard
        partial = round_.partial.get(shard) if resumed else None
        start, stop = round_.bounds[shard]
        header = pb.ContributionHeader(
            run=self._context.run,
            fragment=key.fragment,
            round=key.round,
            shard=shard,
            sender=self._context.me,
            group=wire.group_hash(round_.group),
            codec=self._context.codec.wire_id,
            elements=stop - start,
            total_bytes=len(payload.raw),
            hash=payload.hash,
            reduction_offset=partial.received_bytes if partial else 0,
            weight=round_.weight,
            resumed=resumed,
        )
        await stream.send(pb.ExchangeUp(header=header).SerializeToString())
        sending: asyncio.Task[None] | None = None
        if not resumed:
            sending = self._tasks.spawn(self._send(round_, peer, stream, payload, 0))
        try:
            while (raw := await stream.receive()) is not None:
                answer = wire.parse(pb.ExchangeDown, raw)
                match answer.WhichOneof("body"):
                    case "resume" if sending is None:
                        offset = min(answer.resume.offset, len(payload.raw))
                        sending = self._tasks.spawn(
                            self._send(round_, peer, stream, payload, offset)
                        )
                    case "redirect":
                        return machine.Redirected(shard, attempt, answer.redirect.peer)
                    case "refusal":
                        reason = f"{peer}: {answer.refusal.reason}"
                        if answer.refusal.code == pb.RefusalCode.REFUSAL_AGAIN:
                            return machine.Broken(shard, attempt, reason, link=False)
                        return machine.Refused(shard, attempt, reason)
                    case "header":
                        reduction = await self._receive(round_, key, answer.header, partial, stream)
                        await self._take(round_, key, reduction, peer)
                        return machine.Reduced(shard, attempt)
                    case other:
                        raise wire.WireError(f"{key}: an unexpected {other}")
        finally:
            if sending is not None:
                sending.cancel()
        return machine.Broken(shard, attempt, f"{peer}: ended without an answer", link=True)

    async def _send(
        self, round_: _Round, peer: str, stream: Stream, payload: wire.Payload, offset: int
    ) -> None:
        """The shards for one peer go one after another: the first come back while others go."""
        context = self._context
        with suppress(TransportError):  # the receiving side of the stream reports it
            async with round_.lanes[peer]:
                for message, size, raw in wire.payload_messages(pb.ExchangeUp, payload, offset):
                    context.counts.contributions_sent.add(size, raw, context.codec)
                    await context.sent(stream, message)
            await stream.done()

    async def _receive(
        self,
        round_: _Round,
        key: ShardKey,
        header: pb.ReductionHeader,
        partial: wire.Incoming | None,
        stream: Stream,
    ) -> wire.Reduction:
        """The frames of a reduction, verified. Raises WireError, TransportError."""
        start, stop = round_.bounds[key.shard]
        codec = self._context.reduction_codec
        expected = codec.encoded_bytes(stop - start)
        if header.codec != codec.wire_id or header.total_bytes != expected:
            raise wire.WireError(
                f"{key}: a reduction of {header.total_bytes} bytes in codec {header.codec}, "
                f"expected {expected} in {codec.name}"
            )
        incoming = partial
        if incoming is None:
            incoming = round_.partial[key.shard] = wire.Incoming(expected, header.hash)
        elif incoming.hash != header.hash:
            raise wire.WireError(f"{key}: the reduction is another one than before")
        while not incoming.complete:
            raw = await stream.receive()
            if raw is None:
                raise TransportError(f"{key}: the reduction broke off")
            size, stands_for = incoming.add(wire.parse(pb.ExchangeDown, raw).frame)
            self._context.counts.reductions_received.add(size, stands_for, codec)
        incoming.verify()
        if header.last and header.last not in header.contributors:
            raise wire.WireError(f"{key}: {header.last!r} came last, but is no contributor")
        return wire.Reduction(
            tuple(header.contributors),
            tuple(header.next_group),
            wire.Payload(incoming.buffer, header.hash),
            header.last,
        )

    async def _take(
        self, round_: _Round, key: ShardKey, reduction: wire.Reduction, reducer: str
    ) -> None:
        """Decodes a reduction into the round's mean, and keeps it for others who may ask."""
        start, stop = round_.bounds[key.shard]
        codec = self._context.reduction_codec
        # Into a tensor of its own: an attempt that is cancelled meanwhile must not write here.
        mean = await self._context.worked(
            stop - start, lambda: wire.decode(codec, reduction.payload.raw, stop - start)
        )
        round_.mean[start:stop] = mean
        round_.reductions[key.shard] = reduction
        round_.slowest = reducer
        self._reducer.learned(key, reduction)


def _waited_for(round_: _Round) -> str:
    """The peer that was late: who contributed last to every shard, or else who answered last."""
    late = {reduction.last for reduction in round_.reductions.values()}
    return late.pop() if len(late) == 1 else round_.slowest
