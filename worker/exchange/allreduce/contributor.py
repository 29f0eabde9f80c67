"""The contributing side of a mean round: every shard to its reducer, and every reduction back.

docs/architecture.md says whom a shard goes to, and docs/adr/0044 how many go at once.
"""

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from murmuration.algorithms.robust import FAR, Doubts, limit_of, norm, norm_of_parts, taken_out
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import new_event
from murmuration.worker import wire
from murmuration.worker.background import Tasks
from murmuration.worker.exchange.allreduce.checks import Given
from murmuration.worker.exchange.allreduce.closing import (
    OVERDUE,
    SILENT_S,
    joiners_shard,
    most_joiners,
    next_group,
)
from murmuration.worker.exchange.allreduce.reducer import Answer, Redirect, Reducer, Refusal
from murmuration.worker.exchange.round_context import Context, Peers, Results, reason_of
from murmuration.worker.exchange.view import ShardKey, ShardRange, View
from murmuration.worker.training.mailbox import Begin, RoundDone, RoundFailed
from murmuration.worker.transport import WINDOW_BYTES, Method, Stream, TransportError, Unreachable

if TYPE_CHECKING:
    from torch import Tensor

_STALL_S = 2.0  # a shorter round is none to speak of
_FILLING = 8  # streams whose windows together fill 1 Gbit/s with a round trip of 100 ms
_MOST_SPOILT = 3  # useless answers, one every `retry_s`: less may be a peer that comes back


@dataclass(eq=False)
class _Part:
    key: ShardKey
    shard: ShardRange
    order: Sequence[str]  # the peers that may reduce it, best first
    raw: memoryview  # what this peer contributes, encoded
    of_leaves: Sequence[float]  # their norms, if means are checked
    target: str = ""  # the peer that it is tried at, or was last
    task: asyncio.Task[None] | None = None  # the try that is under way
    incoming: wire.Incoming | None = None  # of the reduction, in all tries at this peer
    reduction: wire.ReductionHeader | None = None  # that the shard ended with, at `ended_at`
    doubtful: wire.Reduction | None = None  # that one, of half of the group: not for others yet
    left_out: "Tensor | None" = None  # what that one leaves out of what the norm limit has scaled
    ended_at: float = 0.0
    retry_at: float = 0.0
    last_reason: str = ""
    away: bool = False  # it went to another peer
    asked_at: float = 0.0  # when the target was first asked, in s
    spoilt: int = 0  # answers of the target that were of no use
    passed_over: tuple[str, ...] = ()  # peers that another is to reduce it in place of
    refused_by: str = ""  # the last peer that said that the round cannot succeed
    handed_in: bool = False  # its reducer has all that this peer, which leaves, contributes
    payload: wire.Payload | None = None  # `raw` as it is sent
    commitment: wire.Commitment | None = None  # to it, if means are checked


@dataclass(eq=False)
class _Round:
    begin: Begin
    parts: list[_Part]
    error: "Tensor | None"
    mean: "Tensor"
    norm: float
    norms: Sequence[float]  # of its shards
    began: float
    deadline: float
    lanes: defaultdict[str, asyncio.Semaphore]  # by peer, held by the shards on their way to it
    told_s: float = 0.0  # how long it had taken when that was last told
    slowest: str = ""  # the reducer that answered last
    half_at: float = math.inf  # when half of the shards were here
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held as one is made ready

    @property
    def open(self) -> list[_Part]:
        return [part for part in self.parts if part.reduction is None]

    @property
    def reductions(self) -> "list[tuple[tuple[int, int], wire.ReductionHeader]]":
        """Those that are here, by their ranges."""
        return [(part.shard.bounds, part.reduction) for part in self.parts if part.reduction]

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """The reducers whose answer is missing."""
        late = (part.passed_over[0] if part.passed_over else part.target for part in self.open)
        return tuple(sorted({*filter(None, late)}))


class FalseMean(wire.WireError):
    """No mean of the contributions that it names is so large; its reducer has sent it itself."""


class Contributor:
    """This peer's own rounds, at most one per fragment. io thread only. Args: reducer: this peer's
    own; method: that the others' serve."""

    def __init__(
        self,
        context: Context,
        reducer: Reducer,
        peers: Peers,
        results: Results,
        method: str = Method.EXCHANGE,
    ) -> None:
        self._context, self._reducer = context, reducer
        self._peers, self._results, self._method = peers, results, method
        self._view = View()
        self._rounds: dict[int, _Round] = {}
        self._lasted_s: dict[int, float] = {}  # the last round of each fragment
        self._told_scaled, self._passed_on = False, Doubts()
        self._tasks = Tasks()
        self.close = self._tasks.close
        reducer.checks.open_to = lambda peer: peers.open(peer, method)

    def tick(self) -> None:
        for round_ in list(self._rounds.values()):
            self._advance(round_)
        for fragment, round_ in self._rounds.items():
            self._tell_stall(round_, self._lasted_s.get(fragment))

    def on_view(self, view: View) -> None:
        self._view = self._reducer.shards.view
        for round_ in list(self._rounds.values()):
            self._advance(round_)

    async def begin(self, begin: Begin) -> None:
        """Starts a round, in place of one of the fragment that is still on its way."""
        fragment, group, context = begin.fragment, begin.group, self._context
        shards, orders = context.shards(fragment, group), context.orders(fragment, group)
        began = context.clock()
        try:
            raws, of_leaves, error, own_norm, norms = await context.worked(
                begin.values.numel(), lambda: self._encode(begin, shards)
            )
        except Exception as failure:  # too large for the codec, or a defect; nobody is told of it
            reason = reason_of(failure)
            self._results.finished(RoundFailed(fragment, begin.round, reason, (context.me,)))
            return
        each_part = enumerate(zip(shards, orders, raws, of_leaves, strict=True))
        parts = [_Part(ShardKey(fragment, begin.round, index), *each) for index, each in each_part]
        keys = [part.key for part in parts if context.plan.compares_norms]
        self._reducer.checks.contributes(fragment, keys)
        if earlier := self._rounds.get(fragment):
            self._drop(earlier)
        mean = begin.values.new_empty(begin.values.shape)
        deadline = context.clock() + context.round_s(fragment)
        large = any(part.shard.contribution_bytes > WINDOW_BYTES for part in parts)
        at_once = -(-_FILLING // max(1, len(group) - 1)) if large else 1
        lanes = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, at_once))
        round_ = _Round(begin, parts, error, mean, own_norm, norms, began, deadline, lanes)
        self._rounds[fragment] = round_
        self._advance(round_)

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's round on its way, if there is one, as failed."""
        if round_ := self._rounds.get(fragment):
            self._fail(round_, reason)

    def _advance(self, round_: _Round) -> None:
        if self._rounds.get(round_.begin.fragment) is not round_:
            return
        now = self._context.clock()
        for part in round_.open:
            if self._overdue(round_, part, now):
                self._reducer.pass_over(part.key, part.target)
                part.order = tuple(peer for peer in part.order if peer != part.target)
                part.passed_over += (part.target,)
                self._context.counts.takeovers += 1
                self._end(part)
                part.target, part.retry_at = "", now
            # That somebody else does not reach the target is no reason to give it up, nor that it
            # is late: what has been sent there counts.
            worth = self._view.usable(part.target) or part.target in self._view.late
            reached = self._view.reach(self._context.me, part.target)
            if part.task is not None and worth and reached:
                continue
            best = self._reducer.shards.peer_to_ask(part.key, part.order)
            if part.task is not None and best != part.target:
                self._context.counts.takeovers += 1
                self._end(part)
                part.retry_at = now
            if part.task is None and best is not None and now >= part.retry_at:
                if not (resumed := part.target == best):
                    part.incoming, part.asked_at, part.spoilt = None, now, 0
                    part.handed_in = False
                part.target, part.away = best, part.away or best != self._context.me
                part.task = self._spawn(round_, partial(self._try, round_, part, resumed))
        if not round_.open:
            for part, why in [*self._left_out(round_)]:
                self._doubt(part.target, round_, why)
                if part.doubtful is not None:
                    part.reduction = part.doubtful = part.left_out = None
                    part.spoilt = _MOST_SPOILT  # the next of its order is to reduce it
            go_on = self._advance if round_.open else self._succeed
            go_on(round_)
        elif now >= round_.deadline:
            reasons = {part.last_reason for part in round_.open if part.last_reason}
            self._fail(round_, "; ".join(["the round's deadline has passed", *sorted(reasons)]))

    def _overdue(self, round_: _Round, part: _Part, now: float) -> bool:
        if part.target in ("", self._context.me):
            return False
        if part.spoilt >= _MOST_SPOILT or now < (since := max(round_.half_at, part.asked_at)):
            return part.spoilt >= _MOST_SPOILT
        most_s = self._reducer.shards.overdue_s(part.key, part.order, part.target)
        if part.incoming is not None:  # it is on its way
            most_s += self._context.transfer_s(part.key.fragment)
        return now >= since + most_s

    def _spawn(
        self, round_: _Round, work: Callable[[], Coroutine[None, None, None]]
    ) -> asyncio.Task[None]:
        async def guarded() -> None:
            """A defect ends the round: else the train thread would wait for it in vain."""
            try:
                await work()
            except Exception as error:
                if self._rounds.get(round_.begin.fragment) is round_:
                    self._fail(round_, reason_of(error))

        return self._tasks.spawn(guarded())

    async def _try(self, round_: _Round, part: _Part, resumed: bool) -> None:
        """One try of a shard at one reducer: to its reduction, or to the reason why not yet."""
        me, peer = self._context.me, part.target
        payload = await self._prepare(round_, part)
        opening = self._header(round_, part, payload, resumed)
        where = "" if peer == me else f"{peer}: "
        retry_s, broken = self._context.config.retry_s, False
        answer: Answer
        try:
            if peer == me:
                answer = await self._reducer.contribute(opening, round_.norm, payload)
            else:
                answer = await self._ask(round_, part, payload, opening)
            if isinstance(answer, wire.Reduction):
                mean, part.left_out = await self._decoded(round_, part, answer)
        except TransportError as error:
            answer, broken = Refusal("again", str(error)), True
        except wire.WireError as error:
            answer, part.incoming = Refusal("again", str(error)), None  # nothing is to be used
            part.spoilt += 1
            if isinstance(error, FalseMean):
                self._doubt(peer, round_, str(error))
            elif isinstance(error, wire.FalseHeader):
                part.spoilt = _MOST_SPOILT  # it says so again
                self._context.caught(peer, str(error))
        match answer:
            case wire.Reduction(header=header):
                round_.mean[slice(*part.shard.bounds)] = mean
                part.reduction, round_.slowest = header, peer
                part.ended_at = self._context.clock()
                if 2 * len(round_.open) <= len(round_.parts):
                    round_.half_at = min(round_.half_at, part.ended_at)
                few = 2 * len(header.contributors) <= len(group := round_.begin.group)
                if few and all(map(self._view.usable, group)):
                    part.doubtful = answer
                else:
                    self._reducer.learned(part.key, answer)
            case Redirect(best):  # our own view decides; where it agrees, go there at once
                part.last_reason = f"{peer} leaves it to {best}"
                agreed = self._reducer.shards.peer_to_ask(part.key, part.order) == best
                if best in part.passed_over:  # it does not see yet what this peer sees
                    part.asked_at = self._context.clock()
                elif not agreed and self._view.has_applied(peer, part.key.fragment, part.key.round):
                    part.spoilt += 1  # it has taken the state over, and has got no mean
                part.retry_at = self._context.clock() + (0 if agreed else retry_s)
            case Refusal("again", reason):
                part.last_reason = where + reason
                part.retry_at = self._context.clock() + retry_s
            case Refusal() if peer != me == self._view.reducer(part.order):
                self._reducer.shards.pass_over(part.key, peer)  # it has got no mean for this peer
            case Refusal(reason=reason):
                part.last_reason, part.refused_by = where + reason, peer
                part.retry_at = self._context.clock() + retry_s
                part.spoilt += 1
                asked = {part.target for part in round_.parts} - {me, ""}
                refusing = {part.refused_by for part in round_.open} - {""}
                if peer == me or 2 * len(refusing) > len(asked):  # one may lie
                    self._fail(round_, part.last_reason)
        part.task = None
        if broken:
            self._peers.suspect(peer)
        self._advance(round_)

    async def _prepare(self, round_: _Round, part: _Part) -> wire.Payload:
        """Makes one shard after another ready: the first leaves while others are compressed."""
        context, shard, raw, checks = self._context, part.shard, part.raw, self._reducer.checks
        weight, stays = context.weight(round_.begin.weight), part.target == context.me

        def work() -> wire.Payload:
            if context.plan.compares_norms:
                said = weight, round_.norms, part.of_leaves
                leaves = context.leaves(shard)
                part.commitment = wire.Commitment(context.codec, leaves, raw, *said)
            pack = context.compression.payload
            return wire.Payload.of(raw) if stays else pack(context.codec, raw)

        async with round_.preparing:
            if part.payload is None:
                part.payload = await context.worked(shard.stop - shard.start, work)
                if part.commitment is not None:
                    checks.commits(part.key, part.commitment)
            return part.payload

    async def _ask(
        self, round_: _Round, part: _Part, payload: wire.Payload, opening: pb.ContributionHeader
    ) -> Answer:
        context, me, peer = self._context, self._context.me, part.target
        header: wire.ReductionHeader | None = None
        sending: asyncio.Task[None] | None = None
        stream = self._peers.open(peer, self._method)
        try:
            with context.arrivals.payload() as arrival:
                await stream.send(pb.ExchangeUp(header=opening).SerializeToString())
                if not opening.resumed:
                    send = partial(self._send, round_, peer, payload, stream)
                    sending = self._spawn(round_, send)
                while (raw := await stream.receive()) is not None:
                    answer = wire.parse(pb.ExchangeDown, raw)
                    match answer.WhichOneof("body"):
                        case "frame" if header is not None and part.incoming is not None:
                            size, stands_for = part.incoming.add(answer.frame)
                            codec = context.reduction_codec
                            context.counts.reductions_received.add(size, stands_for, codec)
                            arrival.came(size)
                        case "header" if header is None:
                            header = wire.reduction_from_message(answer.header)
                            if header.reducer == me:  # another's word: others take it as such
                                header = replace(header, reducer="")
                            arrival.begins(peer)
                            self._expect(round_, part, header)
                        case "resume" if header is None and (
                            opening.receipt and answer.resume.offset == opening.total_bytes
                        ):
                            part.handed_in = True
                            if all(each.handed_in or each.target == me for each in round_.open):
                                self._drop(round_)
                                at = part.key.fragment, part.key.round, "left to the others"
                                self._results.finished(RoundFailed(*at, (), handed_in=True))
                        case "resume" if header is None and sending is None:
                            offset = min(answer.resume.offset, part.shard.contribution_bytes)
                            send = partial(self._send, round_, peer, payload, stream, offset)
                            sending = self._spawn(round_, send)
                        case "redirect" if header is None:
                            return Redirect(answer.redirect.peer)
                        case "refusal" if header is None:
                            refusal = answer.refusal
                            return Refusal(wire.refusal_kind(refusal), refusal.reason)
                        case other:
                            raise wire.WireError(f"{part.key}: an unexpected {other}")
                    come = part.incoming
                    if header is not None and come is not None and come.complete:
                        come.verify()
                        return wire.Reduction(header, wire.Payload(come.raw, header.hash))
        finally:
            if sending is not None:
                sending.cancel()
            stream.cancel()
        raise Unreachable(
            "ended without an answer" if header is None else f"{part.key}: the reduction broke off"
        )

    def _header(
        self, round_: _Round, part: _Part, payload: wire.Payload, resumed: bool
    ) -> pb.ContributionHeader:
        context, begin, shard = self._context, round_.begin, part.shard
        return pb.ContributionHeader(
            run=context.run,
            fragment=begin.fragment,
            round=begin.round,
            shard=part.key.shard,
            sender=context.me,
            group=wire.group_hash(begin.group),
            codec=context.codec.wire_id,
            elements=shard.stop - shard.start,
            total_bytes=shard.contribution_bytes,
            hash=payload.hash,
            weight=begin.weight,
            norm=round_.norm,
            norms=round_.norms,
            reduction_offset=part.incoming.received_bytes if part.incoming else 0,
            resumed=resumed,
            root=part.commitment.root if part.commitment else b"",
            receipt=begin.leaves,
        )

    async def _send(
        self, round_: _Round, peer: str, payload: wire.Payload, stream: Stream, offset: int = 0
    ) -> None:
        """The frames go out when a lane to the peer is free."""
        context = self._context
        with suppress(TransportError):  # the receiving side of the stream reports it
            async with round_.lanes[peer]:
                for message, size, raw in wire.payload_messages(pb.ExchangeUp, payload, offset):
                    context.contributions_sent.add(size, raw, context.codec)
                    await context.sent(stream, message)
            await stream.done()

    def _expect(self, round_: _Round, part: _Part, header: wire.ReductionHeader) -> None:
        """Makes room for a reduction, or goes on with what has come of it. Raises WireError."""
        key, codec = part.key, self._context.reduction_codec
        expected, count = part.shard.reduction_bytes, len(header.contributors)
        named_here = key.shard == joiners_shard(key.round, len(round_.parts))
        most = most_joiners(round_.begin.group) if named_here else 0
        admitted = (self._reducer.shards.admits(p, round_.begin.group) for p in header.contributors)
        own = header.reducer == part.target
        if len({*header.contributors}) < count or not all(admitted):
            false = FalseMean if own else wire.WireError
            raise false(f"{key} has contributors that are not of its group")
        leaves_some = part.commitment and self._context.plan.keeps_reduction_residual
        roots, factors = (*header.roots, *header.lefts), header.factors
        given, due = (header.total_bytes, header.codec), (expected, codec.wire_id)
        for what, wrong in (
            (f"{given} bytes and codec, expected {due}", given != due),
            (f"{len(header.joiners)} joiners; at most {most}", len(header.joiners) > most),
            (f"{header.last!r} came last", header.last not in ("", *header.contributors)),
            (f"{len(factors)} factors of other contributors", len(factors) not in (0, count)),
            (f"factors {factors}", not all(0 < each <= 1 for each in factors)),
            ("roots of contributions", len(header.roots) != (count if part.commitment else 0)),
            ("roots of the rest", len(header.lefts) not in ((1, 2) if leaves_some else (0,))),
            ("a root of other bytes", any(len(root) != wire.HASH_BYTES for root in roots)),
            ("weights of contributions", len(header.weights) not in (0, count)),
        ):
            if wrong:
                raise (wire.FalseHeader if own else wire.WireError)(f"{key}: {what}")
        for weight in header.weights:
            self._context.weight(weight)
        if part.incoming is None:
            part.incoming = wire.Incoming(expected, header.hash)
        elif part.incoming.hash != header.hash:
            raise wire.WireError(f"{key}: the reduction is another one than before")

    async def _decoded(
        self, round_: _Round, part: _Part, reduction: wire.Reduction
    ) -> "tuple[Tensor, Tensor | None]":
        """(the mean, what is left out of a contribution that the norm limit has scaled). A try that
        is cancelled must not write elsewhere. Raises WireError: no contributions have this mean."""
        context, shard, header = self._context, part.shard, reduction.header
        codec, elements, me = context.reduction_codec, shard.stop - shard.start, context.me
        factor, most, least = header.factor(me), math.inf, 0.0
        share = taken_out(factor)
        if context.plan.compares_norms and part.target != me:
            most = self._reducer.shards.most_norm(part.key, header.contributors)
            least = self._reducer.shards.least_factor(part.key, header.contributors, round_.norm)

        of_gradients = context.plan.payload == "gradient" and part.target != me
        ends = context.ends_run and part.target != me
        here, at = slice(*shard.bounds), (part.key.fragment, shard.start)

        def decode() -> "tuple[Tensor, Tensor | None]":
            why, bound, own, mine = "", most, 0.0, round_.begin.values[here]
            mean = way = wire.decode(codec, reduction.payload.raw, elements, exact=shard.exact)
            if of_gradients:
                own = norm(mine)
                bound = FAR * context.usual.norm(at, own) or math.inf
            elif ends and (usual := context.usual.norm(part.key.fragment)):
                bound, way = FAR * usual, mean - mine  # models end near each other
            found = norm(way[: elements - shard.exact]) if of_gradients or bound < math.inf else 0.0
            if found > bound:
                why = f"{part.key} has norm {found:.3g}, and its contributions at most {bound:.3g}"
            elif factor < least:
                why = f"{part.key} counts {factor:.2g} of a contribution, and at least {least:.2g}"
            if why:
                raise FalseMean(why) if header.reducer == part.target else wire.WireError(why)
            if of_gradients:
                context.usual.saw(at, [own, found], own)
            if round_.error is None or share == 1:
                return mean, None
            error, values = round_.error[here].clone(), elements - shard.exact
            error[:values] += (1 - share) * (mine - error)[:values]
            return mean, error

        return await context.worked(elements, decode)

    def _end(self, part: _Part) -> None:
        task, part.task = part.task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _drop(self, round_: _Round) -> None:
        del self._rounds[round_.begin.fragment]
        for part in round_.parts:
            if round_.error is not None and part.left_out is not None:
                round_.error[slice(*part.shard.bounds)] = part.left_out
            if part.doubtful is not None:
                self._reducer.learned(part.key, part.doubtful)
            self._end(part)

    def _doubt(self, reducer: str, round_: _Round, why: str) -> None:
        begin = round_.begin
        if self._reducer.checks.doubts.again(reducer, begin.fragment, begin.round):
            self._context.caught(reducer, why)

    def _fail(self, round_: _Round, reason: str) -> None:
        at, waiting_for = (round_.begin.fragment, round_.begin.round), round_.waiting_for
        self._drop(round_)
        counted = self._where(round_, counted=True)
        self._results.finished(RoundFailed(*at, reason, waiting_for, counted, round_.error))

    def _succeed(self, round_: _Round) -> None:
        context, begin, reductions = self._context, round_.begin, round_.reductions
        self._drop(round_)
        self._tell_scaled(round_)
        missed = self._where(round_, counted=False)
        context.counts.late += bool(missed)
        sent_bytes = sum(p.payload.packed_bytes for p in round_.parts if p.away and p.payload)
        late, now = {reduction.last for _, reduction in reductions}, context.clock()
        exchange_s = self._lasted_s[begin.fragment] = now - round_.began
        self._waited_for_reducers(round_, now)
        for part in round_.parts:  # now and then a shard was moved; always is a way around checks
            other = part.reduction is not None and part.reduction.reducer != part.target
            if other and self._passed_on.again(part.target, begin.fragment, begin.round):
                self._reducer.pass_over(part.key, part.target)
        # Reductions for the others, of about as many bytes, went out in the same time.
        context.compression.exchanged(2 * sent_bytes, exchange_s)
        joiners = reductions[joiners_shard(begin.round, len(reductions))][1].joiners
        by_shard = [each.contributors for _, each in reductions]
        result = RoundDone(
            fragment=begin.fragment,
            round=begin.round,
            mean=round_.mean,
            contributors=min(map(len, by_shard)),
            next_group=next_group(begin.group, by_shard, joiners),
            missed=missed,
            exchange_s=exchange_s,
            # The last to contribute to every shard, or else the last to answer.
            waited_for=late.pop() if len(late) == 1 else round_.slowest,
            error=round_.error,
            parts=tuple((*bounds, each.contributors) for bounds, each in reductions),
            sent=partial(self._sent, round_) if context.plan.keeps else None,
            received=tuple(self._received(round_)),
        )
        self._results.finished(result)
        if places := context.norms_of(len(round_.parts)):
            others = [
                Given(part.key, part.shard, part.reduction, part.ended_at - part.asked_at, place)
                for part, place in zip(round_.parts, places, strict=True)
                if part.reduction and part.reduction.reducer == part.target != context.me
            ]
            self._reducer.checks.completed(begin.fragment, others)

    def _waited_for_reducers(self, round_: _Round, now: float) -> None:
        """The last mean is here; its reducer may have been late, though it was spared."""
        begin, shards = round_.begin, self._reducer.shards
        last = max(round_.parts, key=lambda part: part.ended_at)
        in_time_at = round_.half_at + shards.transfer_s(begin.fragment, [last.target])
        shards.patience.waited_for_reducers(begin.fragment, begin.round, now, now - in_time_at)
        late_s = last.ended_at - max(in_time_at, last.asked_at)
        spared = late_s > OVERDUE * shards.patience.habit_s(begin.fragment)
        if spared and last.away and not last.passed_over and len(begin.group) > 2:
            self._reducer.pass_over(last.key, last.target)

    def _left_out(self, round_: _Round) -> Iterator[tuple[_Part, str]]:
        """The shards that ended in time without half or more of the peers that most shards of other
        reducers count, and which these are: their reducer reaches them, as far as is known. One
        that comes when most have closed, or is with few, does not know what was in time."""
        view, me = self._view, self._context.me
        largest = max(len(header.contributors) for _, header in round_.reductions)
        for part in round_.parts:
            header = part.reduction
            own = header is not None and header.reducer == part.target != me
            if header is None or not own or 2 * len(header.contributors) > largest:
                continue
            others = [h for _, h in round_.reductions if h.reducer not in (me, part.target)]
            counted = Counter(peer for other in others for peer in other.contributors)
            most = {peer for peer, count in counted.items() if 2 * count > len(others)}
            reduce = {me, *(h.reducer for h in others)}
            out = {
                peer
                for peer in most.difference(header.contributors)
                if peer == me or (view.usable(peer) and view.reach(part.target, peer))
            }
            in_time = me in most and part.ended_at <= round_.half_at + SILENT_S
            seen = in_time and 2 * len(reduce) > len(round_.begin.group)
            if seen and out and 2 * len(out) >= len(most):
                yield part, f"{part.key} leaves out {', '.join(sorted(out))}"

    def _received(self, round_: _Round) -> Iterator[tuple[str, int, int]]:
        """As `RoundDone` has it. A peer that begins again may truly reduce a shard again."""
        group = wire.group_hash(round_.begin.group)
        for part in round_.parts:
            if part.reduction is not None:
                member = self._view.members.get(part.target)
                life = f"{part.target}/{member.start_ms if member else 0}/{group}"
                yield part.target, wire.hash64(life.encode()), part.reduction.hash

    def _where(self, round_: _Round, *, counted: bool) -> tuple[tuple[int, int], ...]:
        """The ranges whose reduction is here, and has this peer in it or has not."""
        me = self._context.me
        return tuple(b for b, each in round_.reductions if (me in each.contributors) is counted)

    def _sent(self, round_: _Round) -> "Tensor":
        """A contribution as others have decoded it, as far as it is taken out of parameters."""
        whole = memoryview(bytearray().join(part.raw for part in round_.parts))
        elements, limbs = round_.mean.numel(), self._context.limbs(round_.begin.fragment)
        me = self._context.me
        sent = wire.decode(self._context.codec, whole, elements, exact=limbs)
        for (start, stop), reduction in round_.reductions:
            sent[start : min(stop, elements - limbs)] *= taken_out(reduction.factor(me))
        return sent

    def _tell_scaled(self, round_: _Round) -> None:
        me, most = self._context.me, self._context.config.norm_limit
        found = [(each.factor(me), len(each.contributors)) for _, each in round_.reductions]
        factor, count = min(((f, n) for f, n in found if f), default=(1.0, 0))
        if factor == 1 or self._told_scaled:
            return
        self._told_scaled = True
        keeps = self._context.plan.keeps
        rest = "is kept for later rounds, up to as much" if keeps else "is lost"
        text = (
            f"round {round_.begin.round} counts {factor:.0%} of what this peer contributed, and "
            f"the rest {rest}: it is {limit_of(most, count) / factor:.1f} times as large "
            "as is usual for its steps; has it another learning rate?"
        )
        self._context.log(new_event("warning", text=text))

    def _tell_stall(self, round_: _Round, last_s: float | None) -> None:
        """Says for whom a round waits that takes twice as long as the last, and again at double."""
        begin, me = round_.begin, self._context.me
        seconds = self._context.clock() - round_.began
        if last_s is None or seconds < 2 * max(round_.told_s, last_s, _STALL_S):
            return
        round_.told_s = seconds
        here = (part.key for part in round_.open if part.target == me)
        late = {peer for key in here for peer in self._reducer.shards.awaited(key)} - {me}
        waiting_for = sorted(late or {*round_.waiting_for} - {me})
        times = {"seconds": round(seconds, 1), "last_s": round(last_s, 1)}
        at = {"fragment": begin.fragment, "round": begin.round}
        self._context.log(new_event("stalled", **at, waiting_for=waiting_for, **times))

    def _encode(
        self, begin: Begin, shards: tuple[ShardRange, ...]
    ) -> "tuple[list[memoryview], list[list[float]], Tensor | None, float, list[float]]":
        """Returns the encoding of each shard and the norms of its leaves, what all have left out,
        the norm of all and those of shards."""
        context, values = self._context, begin.values
        codec, plan, limbs = context.codec, context.plan, context.limbs(begin.fragment)
        # Shards lie on whole blocks, so the encoding of all is theirs, one after another.
        whole = wire.encode(codec, values, exact=limbs)
        ends = [wire.encoded_bytes(codec, shard.stop, shard.exact) for shard in shards]
        raws = [whole[start:stop] for start, stop in itertools.pairwise([0, *ends])]
        error = wire.encoding_error(codec, whole, values, exact=limbs) if plan.keeps else None
        if not (places := context.norms_of(len(shards))):
            return raws, [[] for _ in raws], error, 0.0, []
        of_leaves = [
            wire.norms_of(codec, raw, each.elements, each.size)
            for raw, each in zip(raws, map(context.leaves, shards), strict=True)
        ]
        parts: list[list[float]] = [[] for _ in {*places}]
        for place, each in zip(places, of_leaves, strict=True):
            parts[place] += each
        norms = [*map(norm_of_parts, parts)]
        return raws, of_leaves, error, norm_of_parts(norms), norms
