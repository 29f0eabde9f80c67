"""The reducing side: takes contributions, averages when the round closes, answers everyone."""

import asyncio
from typing import TYPE_CHECKING

from algorithms.diloco import reduction_seed
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.allreduce import reducer as machine
from worker.exchange.allreduce.reducer import Reducing
from worker.exchange.allreduce.residuals import Residuals
from worker.exchange.context import Context, Tasks
from worker.exchange.types import RoundTick, ShardKey, View, ViewUpdated
from worker.transport import Stream

if TYPE_CHECKING:
    from torch import Tensor

_HEADER_S = 10.0


class Reducer:
    """All shards that this peer reduces, and the reductions that it knows. io thread only."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._machine = Reducing(
            context.me,
            context.orders,
            context.config,
            [context.config.transfer_s(context.codec.encoded_bytes(n)) for n in context.elements],
        )
        self._view = View()
        self._arriving: dict[ShardKey, dict[str, wire.Incoming]] = {}
        self._reductions: dict[ShardKey, wire.Reduction] = {}
        self._last: dict[ShardKey, str] = {}
        self._residuals = Residuals()
        self._changed = asyncio.Event()
        self._tasks = Tasks()

    # ------------------------------------------------------------------------ events from outside

    def tick(self) -> None:
        """Time passes."""
        self._step(RoundTick())

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._view = view
        self._step(ViewUpdated(view))

    def advanced(self, fragment: int, version: int, group: tuple[str, ...]) -> None:
        """This peer has committed a version of a fragment."""
        self._step(machine.Advanced(fragment, version, group))

    def learned(self, key: ShardKey, reduction: wire.Reduction) -> None:
        """A reduction came from its reducer: keep it for others who may ask."""
        if key not in self._reductions:
            self._reductions[key] = reduction
            self._step(machine.Closed(key))

    async def close(self) -> None:
        await self._tasks.close()

    # -------------------------------------------------------------------------------- the answer

    async def contribute(
        self, key: ShardKey, group: tuple[str, ...], payload: wire.Payload, weight: int
    ) -> machine.RedirectTo | machine.Refuse | wire.Reduction:
        """This peer's own contribution to a shard that it reduces itself."""
        decision = await self._decide(key, wire.group_hash(group))
        if isinstance(decision, machine.Accept):
            arriving = self._arriving.setdefault(key, {})
            arriving[self._context.me] = wire.Incoming.held(
                payload.raw, payload.hash, self._context.weight(weight)
            )
            self._contributed(key, self._context.me)
            decision = await self._closed(key)
        if isinstance(decision, machine.RedirectTo | machine.Refuse):
            return decision
        return self._reductions[key]

    async def serve(self, stream: Stream) -> None:
        """Serves one contributor's stream."""
        async with asyncio.timeout(_HEADER_S):
            raw = await stream.receive()
        if raw is None:
            return
        up = pb.ExchangeUp()
        try:
            up = wire.parse(pb.ExchangeUp, raw)
            if up.WhichOneof("body") != "header":
                raise wire.WireError("a contribution must begin with its header")
            await self._serve(up.header, stream)
        except wire.WireError as error:
            kind = "again" if isinstance(error, wire.Again) else "invalid"
            self._context.refused(error, up.header.sender, up.header.round)
            await stream.send(wire.refusal(wire.REFUSAL_CODES[kind], str(error)))

    async def _serve(self, header: pb.ContributionHeader, stream: Stream) -> None:
        key = wire.key_of(header)
        if header.run != self._context.run:
            await stream.send(wire.refusal(pb.RefusalCode.REFUSAL_RUN, "this is another run"))
            return
        if key.fragment >= len(self._context.elements):
            raise wire.WireError(f"fragment {key.fragment} of {len(self._context.elements)}")
        decision = await self._decide(key, header.group)
        if isinstance(decision, machine.Accept):
            await self._receive(key, header, decision.group, stream)
            decision = await self._closed(key)
        match decision:
            case machine.RedirectTo(peer):
                redirect = pb.ExchangeDown(redirect=pb.Redirect(peer=peer))
                await stream.send(redirect.SerializeToString())
            case machine.Refuse(kind, reason):
                self._context.counts.refuse(kind)
                await stream.send(wire.refusal(wire.REFUSAL_CODES[kind], reason))
            case _:
                await self._answer(self._reductions[key], header.reduction_offset, stream)

    async def _answer(self, reduction: wire.Reduction, offset: int, stream: Stream) -> None:
        await stream.send(wire.reduction_header(reduction, self._context.reduction_codec.wire_id))
        context = self._context
        frames = wire.payload_messages(pb.ExchangeDown, reduction.payload, offset)
        for message, size, raw in frames:
            context.counts.reductions_sent.add(size, raw, context.reduction_codec)
            await context.sent(stream, message)

    async def _decide(self, key: ShardKey, group: int) -> machine.Decision:
        """Asks the machine; while it says `Hold`, again whenever something has changed."""
        deadline = self._context.clock() + self._context.round_s(key.fragment)
        while True:
            mine = self._machine.group(key.fragment, key.round)
            agreed = mine if mine is not None and wire.group_hash(mine) == group else None
            decision = self._machine.offer(key, agreed)
            if not isinstance(decision, machine.Hold):
                return decision
            if self._context.clock() > deadline:
                return machine.Refuse("pruned", "this peer has not come to that round in time")
            await self._change()

    async def _closed(self, key: ShardKey) -> machine.Decision:
        """Waits until an accepted shard is closed, or goes to another reducer."""
        while key not in self._reductions:
            if key not in self._arriving:
                decision = self._machine.offer(key, self._machine.group(key.fragment, key.round))
                if isinstance(decision, machine.RedirectTo | machine.Refuse):
                    return decision
                return machine.Refuse("again", "the shard has moved to another reducer")
            await self._change()
        return machine.Answer()

    async def _change(self) -> None:
        await self._changed.wait()

    # -------------------------------------------------------------------------------- the intake

    async def _receive(
        self, key: ShardKey, header: pb.ContributionHeader, group: tuple[str, ...], stream: Stream
    ) -> None:
        """Takes one contribution; counts it once however often it is sent. Raises WireError.

        Other values than before come from a peer that gave the round up and tries it again later:
        the newer ones count.
        """
        elements, total_bytes = self._expect(key, header, group)
        weight = self._context.weight(header.weight)
        arriving = self._arriving.setdefault(key, {})
        incoming = arriving.get(header.sender)
        if incoming is not None and incoming.hash != header.hash:
            self._step(machine.Withdrawn(key, header.sender))
            incoming = None
        if incoming is not None and incoming.verified:
            return
        if incoming is None or not header.resumed:
            incoming = arriving[header.sender] = wire.Incoming(total_bytes, header.hash)
            incoming.weight = weight
        incoming.taken_by = stream
        if header.resumed:
            resume = pb.ExchangeDown(resume=pb.Resume(offset=incoming.received_bytes))
            await stream.send(resume.SerializeToString())
        while not incoming.complete:
            raw = await stream.receive()
            if raw is None:
                raise wire.Again(f"{key} from {header.sender} broke off")
            if arriving.get(header.sender) is not incoming or incoming.taken_by is not stream:
                raise wire.Again(f"{key} from {header.sender}: a later stream took over")
            size, stands_for = incoming.add(wire.parse(pb.ExchangeUp, raw).frame)
            self._context.counts.contributions_received.add(size, stands_for, self._context.codec)
        try:
            incoming.verify()
            codec, limit = self._context.codec, self._context.reduction_codec.limit
            await self._context.worked(
                elements, lambda: wire.check_values(codec, incoming.buffer, elements, limit)
            )
        except wire.WireError:
            arriving.pop(header.sender, None)
            raise
        if self._arriving.get(key) is arriving:
            self._contributed(key, header.sender)

    def _expect(
        self, key: ShardKey, header: pb.ContributionHeader, group: tuple[str, ...]
    ) -> tuple[int, int]:
        """(elements, bytes) that the manifest and the group imply. Raises WireError."""
        bounds = self._context.bounds(key.fragment, group)
        if key.shard >= len(bounds):
            raise wire.WireError(f"{key}: the group has {len(bounds)} shards")
        start, stop = bounds[key.shard]
        elements, codec = stop - start, self._context.codec
        total_bytes = codec.encoded_bytes(elements)
        announced = (header.codec, header.elements, header.total_bytes)
        if announced != (codec.wire_id, elements, total_bytes):
            raise wire.WireError(
                f"{key} from {header.sender}: {header.elements} values in {header.total_bytes} "
                f"bytes of codec {header.codec}; expected {elements} in {total_bytes} bytes of "
                f"{codec.name}"
            )
        if not self._view.live(header.sender):
            # It may be one that gossip has not told of yet.
            raise wire.Again(f"{key}: {header.sender} is not a member")
        return elements, total_bytes

    # ------------------------------------------------------------------------------- the machine

    def _contributed(self, key: ShardKey, peer: str) -> None:
        self._last[key] = peer
        self._step(machine.Contributed(key, peer))

    def _step(self, event: machine.Event) -> None:
        for action in self._machine.step(event, self._context.clock()):
            match action:
                case machine.Compute(key, contributors, next_group):
                    # The payloads as they are now: a peer may begin to send others in their place.
                    inputs = [self._arriving[key][peer] for peer in contributors]
                    last = self._last.pop(key, "")  # one that comes from here on is too late
                    named = last if last in contributors else ""
                    self._tasks.spawn(self._reduce(key, inputs, contributors, next_group, named))
                case machine.Abandon(key, _):
                    self._arriving.pop(key, None)
                case machine.Prune(fragment, round_):
                    self._forget(fragment, range(round_))
                case machine.Discard(fragment, round_):
                    self._forget(fragment, range(round_, round_ + 1))
        if not isinstance(event, RoundTick):
            self._changed.set()
            self._changed = asyncio.Event()

    def _forget(self, fragment: int, rounds: range) -> None:
        for key in {*self._arriving, *self._reductions, *self._last}:
            if key.fragment == fragment and key.round in rounds:
                self._arriving.pop(key, None)
                self._reductions.pop(key, None)
                self._last.pop(key, None)

    async def _reduce(
        self,
        key: ShardKey,
        inputs: list[wire.Incoming],
        contributors: tuple[str, ...],
        next_group: tuple[str, ...],
        last: str,
    ) -> None:
        """Averages in the order given, block by block, into the bytes that everyone applies."""
        context, group = self._context, self._machine.group(key.fragment, key.round)
        assert group is not None, "a shard closes only when its group is known"
        start, stop = context.bounds(key.fragment, group)[key.shard]
        arriving = self._arriving.get(key)
        if arriving is None:
            return  # laid out anew since

        before = self._residuals.before(key, start, stop)
        try:
            payload, residual = await context.worked(
                len(inputs) * (stop - start),
                lambda: self._average(key, start, stop, inputs, before),
            )
        except Exception as failure:  # the shard must not stay closed to those who try again
            context.log({"event": "warning", "text": f"{key} was not reduced: {failure}"})
            self._arriving.pop(key, None)
            self._step(machine.NotReduced(key))
            return
        if self._arriving.get(key) is not arriving:
            return  # laid out anew meanwhile
        if residual is not None:
            self._residuals.keep(key, start, stop, before, residual)
        self._reductions[key] = wire.Reduction(contributors, next_group, payload, last)
        self._arriving.pop(key, None)
        self._step(machine.Closed(key))

    def _average(
        self,
        key: ShardKey,
        start: int,
        stop: int,
        inputs: list[wire.Incoming],
        residual: "Tensor | None",
    ) -> tuple[wire.Payload, "Tensor | None"]:
        """The bytes that everyone applies, and what their encoding has left out. Off the loop."""
        context, codec = self._context, self._context.reduction_codec
        buffers, weights = [i.buffer for i in inputs], [i.weight for i in inputs]
        mean = wire.average(context.codec, buffers, stop - start, weights)
        if residual is not None:
            mean.add_(residual)
        seed = None
        if context.plan.rounding == "stochastic":
            seed = reduction_seed(key.fragment, key.round, start)
        raw = wire.encode(codec, mean, seed)
        left = None
        if context.plan.keeps_reduction_residual:
            left = wire.encoding_error(codec, raw, mean)
        return context.compression.payload(codec, raw), left
