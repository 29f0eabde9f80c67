"""The contributing side on the network: carries out what `Contributor` says."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from algorithms.diloco import contribution_seed
from algorithms.robust import norm
from protos import murmuration_pb2 as pb
from protos.events import new_event
from worker import wire
from worker.exchange.allreduce import events
from worker.exchange.allreduce.contributor import Contributor, OwnRound
from worker.exchange.allreduce.dialogue import ReductionHeader, ShardRange
from worker.exchange.allreduce.reducer_io import ReducerIO
from worker.exchange.arrivals import Arrival
from worker.exchange.context import Context, Peers, Results, Tasks, reason_of
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
from worker.transport import Stream, TransportError

if TYPE_CHECKING:
    from torch import Tensor


_STALL_S = 2.0  # a shorter round is none to speak of


@dataclass(eq=False)
class _Try:
    """One try of one shard at one peer; `taken` is what the reduction decoded to."""

    arrival: Arrival  # of the reduction
    over: bool = False
    stream: Stream | None = None
    header_sent: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    sending: asyncio.Task[None] | None = None
    header: ReductionHeader | None = None
    incoming: wire.Incoming | None = None
    is_whole: bool = False
    taken: "tuple[wire.Reduction, Tensor] | None" = None


@dataclass(eq=False)
class _OwnRound:
    """One of this peer's rounds on its way; `away` are the shards that others reduce; `told_s` is
    how long it had taken when that was last told."""

    machine: Contributor
    begin: Begin
    shards: tuple[ShardRange, ...]
    payloads: list[wire.Payload]
    error: "Tensor | None"
    mean: "Tensor"
    began: float
    norm: float
    away: set[int] = field(default_factory=set)
    told_s: float = 0.0
    tries: dict[tuple[int, int], _Try] = field(default_factory=dict)
    partial: dict[int, wire.Incoming] = field(default_factory=dict)


class ContributorIO:
    """This peer's own rounds, at most one per fragment. io thread only.

    Args:
        context: what both sides share.
        reducer: this peer's own, for the shard that falls to itself.
        peers: how to reach the others.
        results: takes each RoundDone and RoundFailed.
        method: that reducers serve.
    """

    def __init__(
        self,
        context: Context,
        reducer: ReducerIO,
        peers: Peers,
        results: Results,
        method: str = "Data/Exchange",
    ) -> None:
        self._context, self._reducer = context, reducer
        self._peers, self._results, self._method = peers, results, method
        self._view = View()
        self._rounds: dict[int, _OwnRound] = {}
        self._lasted_s: dict[int, float] = {}  # the last round of each fragment
        self._tasks = Tasks()

    def tick(self) -> None:
        """Time passes."""
        for round_ in list(self._rounds.values()):
            self._handle(round_, RoundTick())
        for fragment, round_ in self._rounds.items():
            self._tell_stall(round_, self._lasted_s.get(fragment))

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._view = view
        for round_ in list(self._rounds.values()):
            self._handle(round_, ViewUpdated(view))

    async def begin(self, begin: Begin) -> None:
        """Starts a round; its end is a result. A round of the fragment still on its way is given
        up: its result could not be applied any more."""
        fragment, context = begin.fragment, self._context
        shards = context.shards(fragment, begin.group)
        began = context.clock()
        try:
            payloads, error, own_norm = await context.worked(
                begin.values.numel(), lambda: self._encode(begin, shards)
            )
        except Exception as failure:  # too large for the codec, or a defect; nobody is told of it
            failed = RoundFailed(fragment, begin.round, reason_of(failure), (context.me,))
            self._results.finished(failed)
            return
        hashes = tuple(payload.hash for payload in payloads)
        machine = Contributor(
            context.me,
            OwnRound(fragment, begin.round, begin.group, hashes, begin.weight, own_norm),
            context,
            self._view,
            context.config,
            deadline=context.clock() + context.round_s(fragment),
        )
        if earlier := self._rounds.pop(fragment, None):
            for each in earlier.tries.values():
                self._end(each)
        mean = begin.values.new_empty(begin.values.shape)
        round_ = _OwnRound(machine, begin, shards, payloads, error, mean, began, own_norm)
        self._rounds[fragment] = round_
        self._handle(round_, RoundTick())

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's round on its way, if there is one, as failed."""
        if round_ := self._rounds.get(fragment):
            self._handle(round_, GivenUp(reason))

    async def close(self) -> None:
        await self._tasks.close()

    # --------------------------------------------------------------------------------- inside

    def _tell_stall(self, round_: _OwnRound, last_s: float | None) -> None:
        """Says for whom a round waits that takes more than twice as long as the last one; again
        each time that this has doubled."""
        machine, seconds = round_.machine, self._context.clock() - round_.began
        if last_s is None or seconds < 2 * max(round_.told_s, last_s, _STALL_S):
            return
        round_.told_s = seconds
        me, reducers = self._context.me, machine.waiting_for
        late = {peer for key in machine.waits_here for peer in self._reducer.awaited(key)} - {me}
        self._context.log(
            new_event(
                "stalled",
                fragment=machine.fragment,
                round=machine.round,
                waiting_for=sorted(late or {*reducers} - {me}),
                seconds=round(seconds, 1),
                last_s=round(last_s, 1),
            )
        )

    def _encode(
        self, begin: Begin, shards: tuple[ShardRange, ...]
    ) -> tuple[list[wire.Payload], "Tensor | None", float]:
        """The payload of each shard, what their encoding has left out, and the norm of all. Runs
        off the loop."""
        context, values = self._context, begin.values
        codec, plan, limbs = context.codec, context.plan, context.limbs(begin.fragment)
        if plan.rounding == "stochastic":
            raws = [
                wire.encode(
                    codec,
                    values[shard.start : shard.stop],
                    contribution_seed(context.me, begin.fragment, begin.round, shard.start),
                    exact=shard.exact,
                )
                for shard in shards
            ]
        else:  # shards lie on whole blocks, so the encoding of all is theirs, one after another
            whole = wire.encode(codec, values, exact=limbs)
            ends = [wire.encoded_bytes(codec, shard.stop, shard.exact) for shard in shards]
            raws = [whole[start:stop] for start, stop in itertools.pairwise([0, *ends])]
        error = values.new_empty(values.shape) if plan.needs_encoding_error else None
        if error is not None:
            for raw, shard in zip(raws, shards, strict=True):
                part = values[shard.start : shard.stop]
                error[shard.start : shard.stop] = wire.encoding_error(
                    codec, raw, part, exact=shard.exact
                )
        own_norm = norm(values[: len(values) - limbs]) if plan.compares_norms else 0.0
        return [context.compression.payload(codec, raw) for raw in raws], error, own_norm

    def _handle(self, round_: _OwnRound, event: events.ContributorEvent) -> None:
        fragment, machine = round_.machine.fragment, round_.machine
        if self._rounds.get(fragment) is not round_:
            return
        actions = machine.handle(event, self._context.clock())
        for action in actions:
            match action:
                case Succeeded():
                    del self._rounds[fragment]
                    self._results.finished(self._result(round_))
                case Failed(reason, waiting_for):
                    del self._rounds[fragment]
                    counted = machine.counted
                    self._results.finished(
                        RoundFailed(
                            fragment, machine.round, reason, waiting_for, counted, round_.error
                        )
                    )
                case _:
                    self._carry_out(round_, action)

    def _carry_out(self, round_: _OwnRound, action: events.ContributorAction) -> None:
        match action:
            case events.OpenTry(peer, attempt, header):
                shard, each = header.key.shard, _Try(self._context.arrivals.payload())
                round_.tries[shard, attempt] = each
                if peer == self._context.me:
                    work = partial(self._contribute_here, round_, header.key, attempt, each)
                else:
                    round_.away.add(shard)
                    work = partial(self._contribute_there, round_, action, each)
                each.task = self._tasks.spawn(self._guarded(round_, work))
            case events.SendContribution(key, attempt, offset):
                each = round_.tries[key.shard, attempt]
                sending = partial(self._send, round_, key, attempt, offset)
                each.sending = self._tasks.spawn(self._guarded(round_, sending))
            case events.ReceiveReduction(key, attempt, header, fresh):
                each = round_.tries[key.shard, attempt]
                if fresh:
                    round_.partial[key.shard] = wire.Incoming(header.total_bytes, header.hash)
                each.header, each.incoming = header, round_.partial[key.shard]
            case events.DecodeReduction(key, attempt):
                round_.tries[key.shard, attempt].is_whole = True
            case events.UseReduction(key, attempt):
                taken, shard_range = (
                    round_.tries[key.shard, attempt].taken,
                    round_.shards[key.shard],
                )
                assert taken is not None, "a reduction is used when it is decoded"
                round_.mean[shard_range.start : shard_range.stop] = taken[1]
                self._reducer.learned(key, taken[0])
            case events.EndTry(key, attempt, taken_over):
                self._context.counts.takeovers += taken_over
                self._end(round_.tries.pop((key.shard, attempt)))
            case Suspect(peer):
                self._peers.suspect(peer)

    def _end(self, each: _Try) -> None:
        each.over = True
        if each.sending is not None:
            each.sending.cancel()
        if each.task is not None and each.task is not asyncio.current_task():
            each.task.cancel()

    def _result(self, round_: _OwnRound) -> RoundDone:
        context, machine = self._context, round_.machine
        elements, limbs = round_.begin.values.numel(), context.limbs(machine.fragment)
        keeps = context.plan.keeps
        context.counts.late += bool(machine.missed)
        sent_bytes = sum(round_.payloads[shard].packed_bytes for shard in round_.away)
        exchange_s = self._lasted_s[machine.fragment] = context.clock() - round_.began
        # Reductions for the others, of about as many bytes, went out in the same time.
        context.compression.exchanged(2 * sent_bytes, exchange_s)
        return RoundDone(
            fragment=machine.fragment,
            round=machine.round,
            mean=round_.mean,
            contributors=machine.contributors,
            next_group=machine.next_group,
            missed=machine.missed,
            exchange_s=exchange_s,
            waited_for=machine.waited_for,
            error=round_.error,
            parts=machine.parts,
            sent=partial(self._sent, round_.payloads, elements, limbs) if keeps else None,
        )

    def _sent(self, payloads: Sequence[wire.Payload], elements: int, limbs: int) -> "Tensor":
        """A contribution as others have decoded it. Any thread."""
        whole = memoryview(b"".join(payload.raw for payload in payloads))
        return wire.decode(self._context.codec, whole, elements, exact=limbs)

    # ----------------------------------------------------------------------------------- one try

    async def _guarded(
        self, round_: _OwnRound, work: Callable[[], Coroutine[None, None, None]]
    ) -> None:
        """A defect ends the round: else the train thread would wait for it in vain."""
        try:
            await work()
        except Exception as error:
            self._handle(round_, GivenUp(reason_of(error)))

    async def _contribute_here(
        self, round_: _OwnRound, key: ShardKey, attempt: int, each: _Try
    ) -> None:
        """This peer is the shard's reducer itself."""
        shard, begin = key.shard, round_.begin
        answer = await self._reducer.contribute(
            key, begin.group, round_.payloads[shard], begin.weight, round_.norm
        )
        match answer:
            case events.RedirectStream(_, peer):
                self._handle(round_, events.ContributionRedirected(shard, attempt, peer))
            case events.RefuseStream(_, kind, reason):
                self._handle(round_, events.ContributionRefused(shard, attempt, kind, reason))
            case reduction:
                self._handle(
                    round_, events.ReductionBegun(shard, attempt, reduction.header, whole=True)
                )
                await self._decode(round_, key, attempt, each, reduction)

    async def _contribute_there(
        self, round_: _OwnRound, opened: events.OpenTry, each: _Try
    ) -> None:
        """Another peer reduces the shard."""
        key, attempt = opened.header.key, opened.attempt
        try:
            stream = each.stream = self._peers.open(opened.peer, self._method)
            try:
                await stream.send(wire.contribution_to_message(opened.header))
                each.header_sent.set()
                while not each.over:
                    raw = await stream.receive()
                    if raw is None:
                        self._handle(round_, events.TryBroken(key.shard, attempt))
                        return
                    answer = wire.parse(pb.ExchangeDown, raw)
                    if answer.HasField("header"):
                        each.arrival.begins(opened.peer)
                    self._take(round_, key, attempt, answer)
                    if each.is_whole and each.incoming is not None and each.header is not None:
                        each.incoming.verify()
                        payload = wire.Payload(each.incoming.buffer, each.header.hash)
                        reduction = wire.Reduction(each.header, payload)
                        await self._decode(round_, key, attempt, each, reduction)
            finally:
                each.arrival.ends()
                stream.cancel()
        except TransportError as error:
            self._handle(round_, events.TryBroken(key.shard, attempt, str(error)))
        except wire.WireError as error:
            self._handle(round_, events.AnswerDamaged(key.shard, attempt, str(error)))

    def _take(
        self, round_: _OwnRound, key: ShardKey, attempt: int, answer: pb.ExchangeDown
    ) -> None:
        """One message of the reducer's. Raises WireError."""
        shard, context = key.shard, self._context
        event: events.ContributorEvent
        if round_.machine.receives(shard, attempt):
            size, stands_for = round_.partial[shard].add(answer.frame)
            context.counts.reductions_received.add(size, stands_for, context.reduction_codec)
            round_.tries[shard, attempt].arrival.came(size)
            event = events.ReductionBytes(shard, attempt, stands_for)
        else:
            match answer.WhichOneof("body"):
                case "resume":
                    event = events.ContributionResumed(shard, attempt, answer.resume.offset)
                case "redirect":
                    event = events.ContributionRedirected(shard, attempt, answer.redirect.peer)
                case "refusal":
                    kind, reason = wire.refusal_kind(answer.refusal), answer.refusal.reason
                    event = events.ContributionRefused(shard, attempt, kind, reason)
                case "header":
                    header = wire.reduction_from_message(answer.header)
                    event = events.ReductionBegun(shard, attempt, header)
                case other:
                    raise wire.WireError(f"{key}: an unexpected {other}")
        self._handle(round_, event)

    async def _send(self, round_: _OwnRound, key: ShardKey, attempt: int, offset: int) -> None:
        context, each = self._context, round_.tries[key.shard, attempt]
        payload = round_.payloads[key.shard]
        await each.header_sent.wait()
        assert each.stream is not None, "the header went out on it"
        with suppress(TransportError):  # the receiving side of the stream reports it
            for message, size, raw in wire.payload_messages(pb.ExchangeUp, payload, offset):
                context.contributions_sent.add(size, raw, context.codec)
                await context.sent(each.stream, message)
            self._handle(round_, events.ContributionSent(key.shard, attempt))
            await each.stream.done()

    async def _decode(
        self,
        round_: _OwnRound,
        key: ShardKey,
        attempt: int,
        each: _Try,
        reduction: wire.Reduction,
    ) -> None:
        shard, codec = round_.shards[key.shard], self._context.reduction_codec
        elements = shard.stop - shard.start
        # Into a tensor of its own: an attempt that is cancelled meanwhile must not write here.
        mean = await self._context.worked(
            elements,
            lambda: wire.decode(codec, reduction.payload.raw, elements, exact=shard.exact),
        )
        each.taken = (reduction, mean)
        self._handle(round_, events.ReductionDecoded(key.shard, attempt))
