"""A call of the next stage; of another replica when one is lost; past a stage that has none."""

import asyncio
import math
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from statistics import quantiles

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import check_name
from murmuration.protos.figures import MAX_REASON, shown
from murmuration.worker import wire
from murmuration.worker.background import Tasks
from murmuration.worker.membership import Member
from murmuration.worker.pipeline import stage_call
from murmuration.worker.pipeline.context import StageContext
from murmuration.worker.pipeline.stage_call import MicrobatchDropped, StageCall, TryElsewhere
from murmuration.worker.transport import Method, Stream, TransportError, Unreachable

_PATIENCE_S = 10.0  # with a replica that is silent and not known to be gone
# A replica has so long for each stage to come, or so many times the longest of the last calls.
_LEAST_HOP_S, _USUAL_HOPS, _LATELY = 3.0, 4, 64
_FIRST_HOP_S = 30.0  # as the longest, before there was one
_FADES = 0.9995  # with each call: a period of rounds may have thousands
_BEFORE_S = 30.0  # for each stage of the model, until it has the activations, where it is alone
_PASSED_S, _MOST_DOUBLED = 60.0, 3  # a replica that took longer is passed over so long at first
# So is one whose calls are late again and again: so long for each stage to come, or so many times
# the lower quartile of the last calls.
_SOON_HOP_S, _STRIKES = 0.1, 3
_LATE, _SILENT, _HOLDS = 1, 2, 3  # the later the worse


class Forwarder:
    """Sends microbatches on. io thread only. `under_way`: shapes of those that began here."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self.under_way: dict[stage_call.StageCallKey, tuple[int, ...]] = {}
        self.acknowledgements = Tasks()
        # Of calls under way, with the peer that is called; None once that is gone.
        self._limits: dict[asyncio.Timeout, stage_call.PeerProcess | None] = {}
        self._passed_by: dict[int, float] = {}  # since when, stages that have replicas
        self._warned: set[int] = set()
        self._hops_s: deque[float] = deque(maxlen=_LATELY)  # for each stage to come, of late calls
        self._before_s = 0.0  # at most, until a peer had the activations; it fades
        self._held: Counter[str] = Counter()  # how often a replica has held a microbatch too long
        self._strikes: Counter[str] = Counter()  # late calls of a replica, less those in time
        self._passed_until: dict[str, tuple[float, int]] = {}  # and why
        self._refused_since: dict[str, float] = {}  # replicas that refuse what others take

    def on_view(self) -> None:
        """The swarm has changed: calls to peers that are gone end."""
        live = {stage_call.PeerProcess.of(m) for m in self._context.members() if m.live}
        for limit, process in self._limits.items():
            if process not in live and not limit.expired():
                self._limits[limit] = None
                limit.reschedule(0.0)
        for stage in [stage for stage in self._passed_by if not self._context.replicas(stage)]:
            del self._passed_by[stage]
            self._warned.discard(stage)

    async def send(self, call: StageCall, values: memoryview) -> stage_call.StageReply:
        """The gradient of this stage's output, which `values` are. Raises MicrobatchDropped: it is
        lost; TryElsewhere: this peer does not get through to the origin, and another may."""
        if call.stage > 0:
            return await self._send_on(call, values)
        if not call.rest:  # it would ask itself for the loss, and learn to be a model of its own
            raise MicrobatchDropped("no other stage is on its route")
        self.under_way[call.key] = call.shape
        try:
            return await self._send_on(call, values)
        finally:
            self.under_way.pop(call.key, None)

    async def _send_on(self, call: StageCall, values: memoryview) -> stage_call.StageReply:
        context, origin, rest, tried = self._context, call.key.origin, list(call.rest), set[str]()
        refused = set[str]()  # by these, at this stage
        while True:
            hop = rest[0] if rest else stage_call.Hop(0, origin.peer)
            after = replace(call, stage=hop.stage, rest=tuple(rest[1:]), sender=context.me)
            try:
                left = self._left(hop.stage, tried) if rest else []
                if left and self._passed(hop.peer) > self._passed(left[0]):
                    raise TryElsewhere(f"{hop.peer} is passed over")
                tried.add(hop.peer)
                reply = await self._call(hop.peer, after, values)
                if origin.peer == context.me:  # another origin's may be refused for its own sake
                    self._taken(hop.peer, refused)
                return reply
            except (TransportError, wire.WireError, TryElsewhere, MicrobatchDropped) as error:
                left = self._left(hop.stage, tried) if rest else []
                if isinstance(error, MicrobatchDropped) and not left:
                    raise
                if isinstance(error, TransportError):
                    context.suspect(hop.peer)
                elif hop.peer in tried:
                    refused.add(hop.peer)
                if not rest:  # asked in vain for the loss: another may reach an origin that lives
                    member = context.member(origin.peer)
                    lives = member and member.live and member.start_ms <= origin.start_ms
                    other = origin.peer != context.me and not isinstance(error, TryElsewhere)
                    reason = f"its origin {origin.peer} does not answer {context.me}: {error}"
                    kind = TryElsewhere if lives and other else MicrobatchDropped
                    raise kind(reason) from error
                if left:
                    rest[0] = stage_call.Hop(hop.stage, left[call.key.number % len(left)])
                    context.counts.rerouted += 1
                else:
                    rest.pop(0)
                    refused.clear()  # none of its stage has taken it
                    context.counts.skipped += 1
                    self._warn_of_skip(hop.stage, error)
                instead = rest[0].peer if left else None
                about = {"stage": hop.stage, "lost": hop.peer, "instead": instead}
                context.event("rerouted", **call.key.plain(), **about, reason=str(error))
                if not rest and origin.peer == context.me:
                    # Stage 0 by itself would learn to be a model of its own.
                    raise MicrobatchDropped(f"no stage takes it; the last: {error}") from error

    def _warn_of_skip(self, stage: int, error: Exception) -> None:
        """Once of a stage whose replicas take nothing; silent ones have time: they may be gone."""
        context, now = self._context, self._context.clock()
        replicas = context.replicas(stage)
        if not replicas or stage in self._warned:
            return
        since = self._passed_by.setdefault(stage, now)
        if isinstance(error, TransportError) and now - since < _PATIENCE_S:
            return
        self._warned.add(stage)
        serve = f"{', '.join(replicas)} {'serves' if len(replicas) == 1 else 'serve'} it"
        text = f"a microbatch goes past stage {stage}, though {serve}: {error}"
        context.event("warning", text=text, stage=stage)

    async def _call(self, peer: str, call: StageCall, values: memoryview) -> stage_call.StageReply:
        """The reply of a peer, unless it is known to be gone before. Raises TransportError,
        WireError, TryElsewhere: another peer may do it; MicrobatchDropped: it is lost."""
        member = self._context.member(peer)
        if member is None or not member.live:
            raise Unreachable(f"{peer} is gone")
        alone = all(self._passed(other) >= _SILENT for other in self._left(call.stage, {peer}))
        return await self._answer_in_time(member, call, values, alone)

    async def _answer_in_time(
        self, member: Member, call: StageCall, values: memoryview, alone: bool
    ) -> stage_call.StageReply:
        """The client of `server.py`: activations up, their gradient down on the same stream. The
        last message goes out in the background. A replica has its time from when it has the
        activations. Until then it may wait for a late origin: as long as usual, if not `alone`."""
        context, hops = self._context, len(call.rest) + 1 + (call.stage > 0)
        payload, measurements = wire.Payload.of(values), context.measurements
        most_s = hops * max(_LEAST_HOP_S, _USUAL_HOPS * max(self._hops_s, default=_FIRST_HOP_S))
        received_s = began_s = context.clock()
        stream = context.transport.open(member.address, Method.STAGE_CALL, member.peer)
        before_s = _BEFORE_S * context.config.count + most_s
        if call.stage and not alone:
            usual_s = _USUAL_HOPS * (self._before_s or _FIRST_HOP_S)
            before_s = min(before_s, max(hops * _LEAST_HOP_S, usual_s))
        limit = asyncio.timeout(before_s)
        self._limits[limit] = stage_call.PeerProcess.of(member)
        try:
            async with limit:
                with measurements.sending() as sample:
                    with suppress(TransportError):  # a peer that takes no more of it says why
                        run, codec = context.run, context.codec
                        await stream.send(stage_call.call_header(call, run, codec, payload))
                        for message, _, _ in wire.payload_messages(pb.StageCallUp, payload):
                            await stream.send(message)
                    first = await _message(stream)
                    seconds = context.clock() - began_s
                if first.HasField("received"):
                    received_s = context.clock()
                    self._before_s = max(seconds, _FADES * self._before_s)
                    if self._limits[limit] is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + most_s)
                    if not first.received.waited:
                        measurements.sent(member.peer, len(values), seconds, alone=sample.alone)
                    first = await _message(stream)
                if first.HasField("failed"):
                    failure = TryElsewhere if first.failed.elsewhere else MicrobatchDropped
                    raise failure(shown(first.failed.reason, MAX_REASON))
                header = first.gradient
                if header.total_bytes != len(values):
                    raise wire.WireError(f"gradient bytes: {header.total_bytes}, not {len(values)}")
                if len(header.path) >= context.config.count:
                    raise wire.WireError(f"a gradient by way of {len(header.path)} peers")
                for name in header.path:
                    check_name(name, wire.WireError)
                incoming = wire.Incoming(header.total_bytes, header.hash)
                while not incoming.complete:
                    incoming.add((await _message(stream)).frame)
                incoming.verify()
        except TimeoutError:
            stream.cancel()
            if self._limits[limit] is None:
                raise Unreachable(f"{member.peer} is gone") from None
            held_s = context.clock() - began_s
            if call.stage and member.peer in context.replicas(call.stage):  # not silent just now
                why, did = (_HOLDS, "held") if received_s > began_s else (_SILENT, "not taken")
                self._pass_over(member.peer, why, f"has {did} a microbatch for {held_s:.0f} s")
            raise Unreachable(f"{member.peer} has held it for {held_s:.0f} s") from None
        except BaseException:
            stream.cancel()
            raise
        finally:
            del self._limits[limit]
        self.acknowledgements.spawn(_acknowledge(stream))
        self._took(member.peer, call.stage, hops, context.clock() - received_s)
        return stage_call.StageReply(incoming.raw, tuple(header.path))

    def _took(self, peer: str, stage: int, hops: int, seconds: float) -> None:
        """A replica that is late again and again is passed over too, where another serves its stage
        that is not. Whoever comes after it is so sooner: it has fewer stages to come."""
        lately, strikes = [*self._hops_s], self._strikes
        self._hops_s.append(seconds / hops)
        others = [p for p in self._context.replicas(stage) if p != peer and not self._passed(p)]
        if not (stage and others) or len(lately) < _LATELY // 4:
            return
        late = seconds > hops * max(_SOON_HOP_S, _USUAL_HOPS * quantiles(lately, n=4)[0])
        strikes[peer] = max(0, strikes[peer] + 2 * late - 1)
        if strikes[peer] >= _STRIKES * hops:
            del strikes[peer]
            self._pass_over(peer, _LATE, f"takes {seconds:.1f} s for what others do sooner")

    def _taken(self, peer: str, refused: set[str]) -> None:
        """A replica has taken what others of its stage have refused, maybe for long."""
        since, now = self._refused_since, self._context.clock()
        since.pop(peer, None)
        for other in refused:
            if now - since.setdefault(other, now) >= _PATIENCE_S:
                self._pass_over(other, _LATE, "refuses microbatches that others take")

    def _left(self, stage: int, tried: set[str]) -> list[str]:
        """The replicas that were not tried and are passed over least."""
        left = [peer for peer in self._context.replicas(stage) if peer not in tried]
        least = min(map(self._passed, left), default=0)
        return [peer for peer in left if self._passed(peer) == least]

    def _passed(self, peer: str) -> int:
        """Why it is asked for nothing that another can do, more for what is worse; 0: it is."""
        until, why = self._passed_until.get(peer, (-math.inf, 0))
        return why if self._context.clock() < until else 0

    def _pass_over(self, peer: str, why: int, text: str) -> None:
        """It takes microbatches, and does not give them back, or late."""
        if why > self._passed(peer):
            passed_s = _PASSED_S * 2 ** min(self._held[peer], _MOST_DOUBLED)
            self._held[peer] += 1
            self._passed_until[peer] = self._context.clock() + passed_s, why
            text = f"{peer} {text}: it is passed over for {passed_s:g} s"
            if why != _SILENT or self._held[peer] > 1:
                self._context.event("warning", text=text)


async def _acknowledge(stream: Stream) -> None:
    """Says that the gradient is here. A link that breaks now takes nothing away any more."""
    try:
        with suppress(TransportError):
            await stream.send(pb.StageCallUp(received=pb.Received()).SerializeToString())
            await stream.done()
            await stream.receive()
    finally:
        stream.cancel()


async def _message(stream: Stream) -> pb.StageCallDown:
    raw = await stream.receive()
    if raw is None:
        raise TransportError("the call broke off")
    return wire.parse(pb.StageCallDown, raw)
