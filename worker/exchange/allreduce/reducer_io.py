"""The reducing side on the network: carries out what `Reducer` says, and keeps the values."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from algorithms.diloco import reduction_seed
from algorithms.robust import NORM_SLACK, aggregate
from protos import murmuration_pb2 as pb
from protos.events import new_event
from worker import wire
from worker.exchange.allreduce import events
from worker.exchange.allreduce.dialogue import (
    ContributionHeader,
    Group,
    ReductionHeader,
    RefusalKind,
    ShardRange,
)
from worker.exchange.allreduce.reducer import Reducer
from worker.exchange.allreduce.residuals import Residuals
from worker.exchange.arrivals import Arrival
from worker.exchange.context import Context, Tasks
from worker.exchange.types import RoundTick, ShardKey, View, ViewUpdated
from worker.transport import Stream

if TYPE_CHECKING:
    from torch import Tensor

_Said = (
    events.AskToResume
    | events.TakeContribution
    | events.VerifyContribution
    | events.RedirectStream
    | events.RefuseStream
)
_AT_ONCE_S = 0.005  # what is held for longer may have come meanwhile
_Orders = asyncio.Queue[_Said | wire.Reduction]


@dataclass(eq=False)
class _Served:
    """A contributor on its stream, or this peer itself with its `own` payload."""

    own: wire.Payload | None = None
    header: ContributionHeader | None = None
    incoming: wire.Incoming | None = None
    offset: int = 0  # of the reduction, to give it from
    held_s: float = 0.0  # since when
    orders: _Orders = field(default_factory=asyncio.Queue)


@dataclass(frozen=True)
class _Computed:
    """A reduction that is done; `residual` is what its encoding has left out."""

    reduction: wire.Reduction
    shard: ShardRange | None = None
    before: "Tensor | None" = None
    residual: "Tensor | None" = None


class ReducerIO:
    """All shards that this peer reduces, and the reductions that it knows. io thread only.

    Args:
        residuals: what earlier reductions have left out; None for nothing.
    """

    def __init__(self, context: Context, residuals: Residuals | None = None) -> None:
        self._context = context
        self._machine = Reducer(context.me, context, context.config)
        self._numbers = count(1)
        self._served: dict[int, _Served] = {}
        self._contributions: defaultdict[ShardKey, dict[str, wire.Incoming]] = defaultdict(dict)
        self._candidates: dict[ShardKey, _Computed] = {}
        self._reductions: dict[ShardKey, wire.Reduction] = {}
        self._residuals = Residuals() if residuals is None else residuals
        self._tasks = Tasks()
        self._missing: set[str] = set()

    # ------------------------------------------------------------------------ events from outside

    def tick(self) -> None:
        """Time passes."""
        self._handle(RoundTick())

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._handle(ViewUpdated(view))

    def advanced(self, fragment: int, version: int, group: Group) -> None:
        """This peer has committed a version of a fragment."""
        self._residuals.advanced(fragment, version)
        for key, kept in self._reductions.items():
            if key.fragment == fragment and key.round < version:
                self._reductions[key] = replace(kept, payload=kept.payload.unpacked())
        self._handle(events.Advanced(fragment, version, group))

    def learned(self, key: ShardKey, reduction: wire.Reduction) -> None:
        """A reduction came from its reducer: keep it for others that may ask."""
        self._candidates[key] = _Computed(reduction)
        self._handle(events.ReductionLearned(key))
        self._candidates.pop(key, None)

    def awaited(self, key: ShardKey) -> tuple[str, ...]:
        """The peers that have not contributed yet to an open shard."""
        return self._machine.awaited(key)

    def take_missing(self) -> set[str]:
        """The peers that shards were closed without since this was asked last, after a wait."""
        missing, self._missing = self._missing, set()
        return missing

    async def close(self) -> None:
        await self._tasks.close()

    # --------------------------------------------------------------------------------- the streams

    async def contribute(
        self, key: ShardKey, group: Group, payload: wire.Payload, weight: int, norm: float
    ) -> events.RedirectStream | events.RefuseStream | wire.Reduction:
        """This peer's own contribution to a shard that it reduces itself."""
        number = next(self._numbers)
        served = self._served[number] = _Served(own=payload)
        try:
            self._handle(events.OwnOffered(number, key, group, payload.hash, weight, norm))
            while True:
                order = await served.orders.get()
                if isinstance(order, events.RedirectStream | events.RefuseStream | wire.Reduction):
                    return order
        finally:
            self._ended(number)

    async def serve(self, stream: Stream) -> None:
        """Serves one contributor's stream."""
        raw = await stream.receive()
        if raw is None:
            return
        try:
            up = wire.parse(pb.ExchangeUp, raw)
            if up.WhichOneof("body") != "header":
                raise wire.WireError("a contribution must begin with its header")
        except wire.WireError as error:
            self._context.refused(error, "", 0)
            kind: RefusalKind = "again" if isinstance(error, wire.Again) else "invalid"
            await stream.send(wire.refusal_to_message(kind, str(error)))
            return
        header = wire.contribution_from_message(up.header)
        number = next(self._numbers)
        served = self._served[number] = _Served(
            header=header, offset=header.reduction_offset, held_s=self._context.clock()
        )
        try:
            self._handle(events.ContributionOffered(number, header))
            await self._converse(number, served, stream)
        finally:
            self._ended(number)

    async def _converse(self, number: int, served: _Served, stream: Stream) -> None:
        """Does what the machine says for this stream, to its end."""
        while True:
            match await served.orders.get():
                case events.AskToResume(_, offset):
                    resume = pb.ExchangeDown(resume=pb.Resume(offset=offset))
                    await stream.send(resume.SerializeToString())
                case events.TakeContribution():
                    await self._receive(number, served, stream)
                case events.VerifyContribution(_, shard):
                    await self._verify(number, served, shard)
                case events.RedirectStream(_, peer):
                    redirect = pb.ExchangeDown(redirect=pb.Redirect(peer=peer))
                    return await stream.send(redirect.SerializeToString())
                case events.RefuseStream() as refused:
                    return await self._refuse(served, refused, stream)
                case reduction:
                    return await self._answer(reduction, served.offset, stream)

    async def _receive(self, number: int, served: _Served, stream: Stream) -> None:
        """Takes frames until the machine has something to say. An honest contributor gives its
        round up before it lets this peer wait for longer than a round."""
        incoming, context, header = served.incoming, self._context, served.header
        assert incoming is not None, "frames are taken for a contribution"
        assert header is not None, "they come on a stream"
        patience_s = context.round_s(header.key.fragment)
        with context.arrivals.payload() as arrival:
            if context.clock() - served.held_s < _AT_ONCE_S:
                arrival.begins(header.sender)  # else a part of it may have lain here
            while served.orders.empty():
                try:
                    async with asyncio.timeout(patience_s):
                        raw = await stream.receive()
                except TimeoutError:
                    late = f"{header.key} from {header.sender}: no frame in {patience_s:.0f} s"
                    self._damaged(number, wire.Again(late))
                    return
                if raw is None:
                    self._handle(events.ContributorDone(number))
                    return
                self._frame(number, incoming, raw, arrival)

    def _frame(self, number: int, incoming: wire.Incoming, raw: bytes, arrival: Arrival) -> None:
        context = self._context
        try:
            frame, stands_for = wire.parse(pb.ExchangeUp, raw).frame, 0
            if self._machine.takes(number):
                size, stands_for = incoming.add(frame)
                context.counts.contributions_received.add(size, stands_for, context.codec)
                arrival.came(size)
            self._handle(events.ContributionBytes(number, stands_for))
        except wire.WireError as error:
            self._damaged(number, error)

    async def _verify(self, number: int, served: _Served, shard: ShardRange) -> None:
        incoming, context, elements = served.incoming, self._context, shard.stop - shard.start
        assert incoming is not None, "a contribution that is here is verified"
        codec, limit = context.codec, context.reduction_codec.limit
        try:
            incoming.verify()
            norm = await context.worked(
                elements,
                lambda: wire.check_values(
                    codec, incoming.buffer, elements, limit, exact=shard.exact
                ),
            )
            announced = served.header.norm if served.header is not None else norm
            if context.plan.compares_norms and norm > NORM_SLACK * announced:
                raise wire.WireError(f"values of norm {norm:.3g}, announced were {announced:.3g}")
        except wire.WireError as error:
            self._damaged(number, error)
            return
        self._handle(events.ContributionVerified(number))

    def _damaged(self, number: int, error: wire.WireError) -> None:
        again = isinstance(error, wire.Again)
        self._handle(events.ContributionDamaged(number, str(error), again))

    async def _refuse(self, served: _Served, refused: events.RefuseStream, stream: Stream) -> None:
        kind, reason, header = refused.kind, refused.reason, served.header
        if refused.faulty and header is not None:
            error = wire.Again(reason) if kind == "again" else wire.WireError(reason)
            self._context.refused(error, header.sender, header.key.round)
        elif kind != "run":
            self._context.counts.refuse(kind)
        await stream.send(wire.refusal_to_message(kind, reason))

    async def _answer(self, reduction: wire.Reduction, offset: int, stream: Stream) -> None:
        context = self._context
        await stream.send(wire.reduction_to_message(reduction.header))
        frames = wire.payload_messages(pb.ExchangeDown, reduction.payload, offset)
        for message, size, raw in frames:
            context.reductions_sent.add(size, raw, context.reduction_codec)
            await context.sent(stream, message)

    def _ended(self, number: int) -> None:
        del self._served[number]
        self._handle(events.ContributorGone(number))

    # ------------------------------------------------------------------------------- the machine

    def _handle(self, event: events.ReducerEvent) -> None:
        for action in self._machine.handle(event, self._context.clock()):
            self._carry_out(action)

    def _carry_out(self, action: events.ReducerAction) -> None:
        match action:
            case events.TakeContribution(number, key, peer, fresh):
                served, kept = self._served[number], self._contributions[key]
                if served.own is not None:
                    kept[peer] = wire.Incoming.held(served.own.raw, served.own.hash)
                elif fresh and served.header is not None:
                    kept[peer] = wire.Incoming(served.header.total_bytes, served.header.hash)
                served.incoming = kept[peer]
                served.orders.put_nowait(action)
            case events.AnswerStream(number, key):
                self._served[number].orders.put_nowait(self._reductions[key])
            case events.ComputeShard(key, contributors=contributors):
                # The payloads as they are now: a peer may begin to send others in their place.
                inputs = [self._contributions[key][peer].buffer for peer in contributors]
                self._tasks.spawn(self._compute(action, inputs))
            case events.KeepReduction(key):
                self._keep(key, self._candidates[key])
            case events.ForgetContributions(key):
                self._contributions.pop(key, None)
            case events.ForgetShard(key):
                self._contributions.pop(key, None)
                self._reductions.pop(key, None)
            case _:
                self._served[action.stream].orders.put_nowait(action)

    def _keep(self, key: ShardKey, computed: _Computed) -> None:
        shard = computed.shard
        if shard is not None and computed.residual is not None:
            before, after = computed.before, computed.residual
            self._residuals.keep(key, shard.start, shard.stop, before, after)
        self._reductions[key] = computed.reduction

    # ------------------------------------------------------------------------------------ the mean

    async def _compute(self, action: events.ComputeShard, inputs: list[memoryview]) -> None:
        """Averages in the order given, block by block, into the bytes that everyone applies."""
        context, key, shard = self._context, action.key, action.shard
        for peer in action.left_out:
            context.left_out(peer)
        self._missing.update(action.missing)
        for peers in () if context.ends_run else action.alike:
            given = inputs[action.contributors.index(peers[0])]
            if not context.known_alike(peers) and await self._holds_something(shard, given):
                context.contribute_alike(peers)
        before = self._residuals.before(key, shard.start, shard.stop)
        try:
            payload, residual = await context.worked(
                len(inputs) * (shard.stop - shard.start),
                lambda: self._average(action, inputs, before),
            )
        except Exception as failure:  # the shard must not stay closed to peers that try again
            context.log(new_event("warning", text=f"{key} was not reduced: {failure}"))
            self._handle(events.ShardComputed(key, action.attempt, failed=True))
            return
        header = ReductionHeader(
            contributors=action.contributors,
            next_group=action.next_group,
            codec=context.reduction_codec.wire_id,
            total_bytes=len(payload.raw),
            hash=payload.hash,
            last=action.last,
        )
        reduction = wire.Reduction(header, payload)
        self._candidates[key] = _Computed(reduction, shard, before, residual)
        self._handle(events.ShardComputed(key, action.attempt))
        self._candidates.pop(key, None)

    async def _holds_something(self, shard: ShardRange, given: memoryview) -> bool:
        """Whether a contribution is of other values than zeros: something was learned for it."""
        codec, elements = self._context.codec, shard.stop - shard.start
        norm = await self._context.worked(
            elements, lambda: wire.check_values(codec, given, elements, inf, exact=shard.exact)
        )
        return norm > 0

    def _average(
        self, action: events.ComputeShard, inputs: list[memoryview], residual: "Tensor | None"
    ) -> tuple[wire.Payload, "Tensor | None"]:
        """The bytes that everyone applies, and what their encoding has left out. Off the loop."""
        context, codec, key = self._context, self._context.reduction_codec, action.key
        start, stop = action.shard.bounds
        mean = wire.average(
            context.codec,
            inputs,
            stop - start,
            lambda each: aggregate(
                each,
                action.factors,
                action.weights,
                over=context.plan.mean_over,
                aggregation=context.config.aggregation,
            ),
            exact=action.shard.exact,
        )
        if residual is not None:
            mean.add_(residual)
        seed = None
        if context.plan.rounding == "stochastic":
            seed = reduction_seed(key.fragment, key.round, start)
        raw = wire.encode(codec, mean, seed, exact=action.shard.exact)
        left = None
        if context.plan.keeps_reduction_residual:
            left = wire.encoding_error(codec, raw, mean, exact=action.shard.exact)
        return context.compression.payload(codec, raw), left
