"""Rounds in small groups over the transport: every peer to every partner, on one stream each.

The anchor does not change between two rounds, so it is sent ahead as soon as the partner of the
next round can be known; the pseudo-gradient follows when it is due. What arrives is staged
(`worker.exchange.pairwise.round`), and averaged when all partners hold everything.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from algorithms.codecs import Codec
from algorithms.diloco import contribution_seed
from algorithms.fragment_state import FragmentState
from algorithms.schedule import Schedule
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.context import Context, Tasks
from worker.exchange.pairwise import groups
from worker.exchange.pairwise import round as machine
from worker.exchange.pairwise.buffer import ANCHOR, CONTRIBUTION, PairBuffer, codec_of
from worker.exchange.pairwise.prefetch import AnchorPrefetch
from worker.exchange.pairwise.round import ArrivalSkew, PairRound
from worker.exchange.pairwise.stream import PairStream, declined, refusal
from worker.exchange.types import Failed, GivenUp, RoundTick, Succeeded, Suspect, View, ViewUpdated
from worker.training.inbox import Begin, PrefetchedAnchor, RoundDone, RoundFailed
from worker.transport import Stream, Transport, TransportError

if TYPE_CHECKING:
    from torch import Tensor

_HEADER_S = 10.0
_PART_S = 1.0
_KEEP_ROUNDS = 2


class Pairs:
    """This peer's rounds with its partners. io thread only.

    Args:
        context: run, plan, sizes, clock.
        schedule: of the whole run.
        transport, address_of: how to reach a peer.
        finished: takes each RoundDone and RoundFailed; ahead: takes the anchors' mean before.
        doubt: takes a peer whose stream broke.
    """

    def __init__(
        self,
        context: Context,
        schedule: Schedule,
        transport: Transport,
        address_of: Callable[[str], str | None],
        finished: Callable[[RoundDone | RoundFailed], None],
        ahead: Callable[[PrefetchedAnchor], None],
        doubt: Callable[[str], None],
    ) -> None:
        self.context, self._schedule, self.tasks = context, schedule, Tasks()
        self._transport, self._address_of = transport, address_of
        self._finished, self._doubt = finished, doubt
        self.lead = ArrivalSkew(context.config)
        self.head_starts = AnchorPrefetch(context, self.tasks, self.lead, self._mean_anchor, ahead)
        self._view = View()
        self._tables: dict[tuple[int, int], PairBuffer] = {}
        self._rounds: dict[int, int] = {}
        self._over: set[tuple[int, int]] = set()
        self._changed = asyncio.Event()

    @property
    def partners(self) -> frozenset[str]:
        """With whom this peer is to hold the rounds that it has come to."""
        tables = filter(None, map(self._tables.get, self._rounds.items()))
        return frozenset(peer for t in tables for peer in t.group) - {self.context.me}

    # ------------------------------------------------------------------------ events from outside

    def tick(self) -> None:
        """Time passes."""
        for table in list(self._tables.values()):
            self.step(table, RoundTick())
            self.head_starts.look(table)

    def on_view(self, view: View) -> None:
        """Membership has changed."""
        self._view = view
        for table in list(self._tables.values()):
            if table.meeting is not None:
                self.step(table, ViewUpdated(view))
            elif table.group != groups.group(self.context, self._view, table.fragment, table.round):
                self._lay(table.fragment, table.round, table.own, table.left_out)

    async def advanced(self, fragment: int, state: FragmentState) -> None:
        """This peer has come to a version: its anchor may go ahead to the next partner."""
        if self._rounds.get(fragment) == state.version:
            return
        self._rounds[fragment] = state.version
        oldest = state.version - _KEEP_ROUNDS
        for table in [t for t in self._tables.values() if t.fragment == fragment]:
            if table.round < (state.version if table.meeting is None else oldest):
                # It may have begun, where the train side has skipped it: its end must be told.
                self.step(table, GivenUp("this peer has gone on"))
                if not table.failed:  # else it leaves once the partners have heard so
                    self._leave(table)
        self._over = {k for k in self._over if k[0] != fragment or k[1] >= oldest}
        if state.version >= self._schedule.rounds(fragment):
            return
        try:
            anchor, left_out = await self._anchor(state.anchor)
        except ValueError:  # the round itself says so
            self.head_starts.missing(fragment, state.version)
            return
        if self._rounds[fragment] == state.version:
            self._lay(fragment, state.version, {ANCHOR: anchor}, left_out)

    async def begin(self, begin: Begin) -> None:
        """Starts a round; it ends with `finished`."""
        key, context = (begin.fragment, begin.round), self.context
        codec, plan = self._codec(CONTRIBUTION), context.plan
        seed = None
        if plan.rounding == "stochastic":
            seed = contribution_seed(context.me, begin.fragment, begin.round, 0)
        try:
            payload, error = await context.encoded(
                codec, begin.values, seed, error=plan.error_feedback
            )
            table = self._tables.get(key)
            if table is None or table.group != groups.group(context, self._view, *key):
                assert begin.anchor is not None, "pairs exchange anchors"
                anchor, left_out = await self._anchor(begin.anchor)
                table = self._lay(*key, {ANCHOR: anchor}, left_out)
        except ValueError as failure:  # too large for the codec; nobody is told of it
            self._finished(RoundFailed(*key, str(failure), (context.me,)))
            return
        table.own[CONTRIBUTION], table.error = payload, error
        table.weight = context.weight(begin.weight)
        table.began = context.clock()
        table.meeting = PairRound(
            context.me,
            table.group,
            self._view,
            context.config,
            fragment=begin.fragment,
            round_=begin.round,
            began_at=table.began,
            payload_bytes=context.round_bytes(begin.fragment),
            lead_s=self.lead.lead_s(context.round_bytes(begin.fragment)),
        )
        for event in table.seen(context.me):
            self.step(table, event)
        self.step(table, RoundTick())
        self._wake()

    def give_up(self, fragment: int, reason: str) -> None:
        """Ends the fragment's round on its way, if there is one, as failed."""
        for table in list(self._tables.values()):
            if table.fragment == fragment:
                self.step(table, GivenUp(reason))

    async def close(self) -> None:
        await self.tasks.close()

    # ------------------------------------------------------------------------------- the streams

    async def serve(self, stream: Stream) -> None:
        """Serves a partner's stream."""
        async with asyncio.timeout(_HEADER_S):
            raw = await stream.receive()
        if raw is None:
            return
        header = pb.MeetHeader()
        try:
            message = wire.parse(pb.MeetMessage, raw)
            if message.WhichOneof("body") != "header":
                raise wire.WireError("a meeting must begin with its header")
            header = message.header
            table = await self._admit(header)
            if isinstance(table, pb.Refusal):
                self.context.counts.refuse("declined")
                await stream.send(pb.MeetMessage(refusal=table).SerializeToString())
                return
            await self._host(table, header, stream)
        except wire.WireError as error:
            self.context.refused(error, header.sender, header.round)
            await stream.send(pb.MeetMessage(refusal=refusal(error)).SerializeToString())

    async def _admit(self, header: pb.MeetHeader) -> PairBuffer | pb.Refusal:
        """The table that the partner may sit down at, once this peer has come to the round."""
        if header.run != self.context.run:
            return pb.Refusal(code=pb.RefusalCode.REFUSAL_RUN, reason="this is another run")
        if header.fragment >= len(self.context.elements):
            raise wire.WireError(f"fragment {header.fragment} of {len(self.context.elements)}")
        if not self._view.live(header.sender):
            raise wire.Again(f"{header.sender or 'nobody'} is not a member")
        key = (header.fragment, header.round)
        while True:
            table = self._tables.get(key)
            if table is not None:
                calls = header.sender in table.group and header.sender < self.context.me
                if calls and wire.group_hash(table.group) == header.group:
                    return table
                reason = "this peer has another partner in that round"
                return pb.Refusal(code=pb.RefusalCode.REFUSAL_GROUP, reason=reason)
            if key in self._over or header.round < self._rounds.get(header.fragment, 0):
                reason = f"round {header.round} is over here"
                return pb.Refusal(code=pb.RefusalCode.REFUSAL_PRUNED, reason=reason)
            await self.changed()  # the caller ends it when its patience does

    async def _host(self, table: PairBuffer, header: pb.MeetHeader, stream: Stream) -> None:
        """A partner has sat down; an earlier stream of its is over. Raises TransportError,
        WireError."""
        peer, task = header.sender, asyncio.current_task()
        assert task is not None
        if (earlier := table.streams.pop(peer, None)) is not None:
            earlier.cancel()
        table.streams[peer] = task
        try:
            await stream.send(table.header(self.context, peer))
            await PairStream(self, table, peer, stream).hold(header)
        except TransportError as error:
            if table.streams.get(peer) is task:
                self.step(table, machine.Broken(peer, 0, f"{peer}: {error}"))
            raise
        finally:
            if table.streams.get(peer) is task:
                del table.streams[peer]

    async def _call(self, table: PairBuffer, peer: str, attempt: int) -> None:
        """Reaches a partner: once, or until the partner knows as well that the round has succeeded
        if it has succeeded here. One that is held for gone may come back."""
        event = await self._try(table, peer, attempt)
        while isinstance(event, machine.Broken) and table.succeeded:
            await asyncio.sleep(self.context.config.retry_s)
            if self._view.live(peer):
                event = await self._try(table, peer, attempt)
        if table.streams.get(peer) is asyncio.current_task():
            del table.streams[peer]
        if event is not None:
            self.step(table, event)

    async def _try(self, table: PairBuffer, peer: str, attempt: int) -> machine.Event | None:
        """What came in the way, if not all has been said on both sides."""
        try:
            address = self._address_of(peer)
            if address is None:
                raise TransportError("no address known")
            stream = self._transport.open(address, "Data/Meet")
            try:
                await stream.send(table.header(self.context, peer))
                raw = await stream.receive()
                if raw is None:
                    raise TransportError("ended without an answer")
                answer = wire.parse(pb.MeetMessage, raw)
                match answer.WhichOneof("body"):
                    case "refusal":
                        return declined(peer, answer.refusal)
                    case "header":
                        await PairStream(self, table, peer, stream).hold(answer.header)
                        while await stream.receive() is not None:
                            pass  # the partner ends the stream once it has heard everything
                        return None
                    case other:
                        raise wire.Again(f"an unexpected {other}")
            finally:
                stream.cancel()
        except (TransportError, wire.WireError) as error:
            if isinstance(error, wire.WireError):
                self.context.refused(error, peer, table.round)
            return machine.Broken(peer, attempt, f"{peer}: {error}")

    # ------------------------------------------------------------------------------- the machine

    def step(self, table: PairBuffer, event: machine.Event) -> None:
        """Feeds the round's machine, if it has begun, and does what that says."""
        if table.meeting is None or table.ended:
            return
        for action in table.meeting.step(event, self.context.clock()):
            match action:
                case machine.Open(peer, attempt):
                    self._reach(table, peer, attempt)
                case machine.Stage():
                    table.complete = True
                    self._wake()
                case Suspect(peer):
                    self._doubt(peer)
                case Succeeded():
                    table.succeeded = table.complete = True
                    self.head_starts.ended(table)
                    self._wake()
                    self.tasks.spawn(self._finish(table))
                case Failed(reason, waiting_for):
                    table.failed, key = reason, (table.fragment, table.round)
                    self.head_starts.ended(table)
                    self._clear(table)
                    self._over.add(key)
                    self.tasks.spawn(self._part(table))
                    self._finished(RoundFailed(*key, reason, waiting_for, (), table.error))
                    self._wake()

    async def _finish(self, table: PairBuffer) -> None:
        """Averages what the group has put on the table."""
        context = self.context
        mean, mean_anchor = await self._mean(table, CONTRIBUTION), await self._mean_anchor(table)
        took_s = context.clock() - table.began
        context.compression.exchanged(
            sum(each.packed_bytes for each in table.own.values()) * (len(table.group) - 1), took_s
        )
        self._finished(
            RoundDone(
                fragment=table.fragment,
                round=table.round,
                mean=mean,
                mean_anchor=mean_anchor,
                contributors=len(table.group),
                next_group=(),
                missed=(),
                exchange_s=took_s,
                waited_for=table.last,
                error=table.error,
            )
        )

    async def _mean_anchor(self, table: PairBuffer) -> "Tensor":
        """As it has arrived everywhere, with what the own anchor's encoding left out: each keeps
        that, so nothing of all anchors' mean is lost, and small steps add up."""
        mean = await self._mean(table, ANCHOR)
        return mean if table.left_out is None else mean.add_(table.left_out)

    async def _mean(self, table: PairBuffer, part: int) -> "Tensor":
        codec, elements = self._codec(part), self.context.elements[table.fragment]
        payloads, weights = table.payloads(part, self.context.me)
        return await self.context.worked(
            len(payloads) * elements,
            lambda: wire.average(
                codec, payloads, elements, weights if part == CONTRIBUTION else None
            ),
        )

    # ------------------------------------------------------------------------------------ helpers

    def _codec(self, part: int) -> Codec:
        return codec_of(self.context.plan, part)

    async def _anchor(self, anchor: "Tensor") -> "tuple[wire.Payload, Tensor | None]":
        """(encoded, what that leaves out). Raises ValueError: not for the codec."""
        codec = self._codec(ANCHOR)
        return await self.context.encoded(codec, anchor, None, error=codec.name != "fp32")

    def _lay(
        self, fragment: int, round_: int, own: dict[int, wire.Payload], left_out: "Tensor | None"
    ) -> PairBuffer:
        """A table for the round in place of an earlier one, to which those partners are called that
        this peer calls."""
        if (earlier := self._tables.get((fragment, round_))) is not None:
            self._leave(earlier)
        drawn = groups.group(self.context, self._view, fragment, round_)
        table = PairBuffer(fragment, round_, drawn, dict(own), left_out=left_out)
        self._tables[fragment, round_] = table
        for peer in table.group:
            if peer > self.context.me:
                self._reach(table, peer, 1)
        members = groups.members(self.context, self._view, fragment)
        self.head_starts.laid(table, len(members))
        self._wake()
        return table

    def _reach(self, table: PairBuffer, peer: str, attempt: int) -> None:
        if peer not in table.streams:
            table.streams[peer] = self.tasks.spawn(self._call(table, peer, attempt))

    def _clear(self, table: PairBuffer) -> None:
        if self._tables.get((table.fragment, table.round)) is table:
            del self._tables[table.fragment, table.round]

    def _leave(self, table: PairBuffer) -> None:
        self._clear(table)
        current = asyncio.current_task()
        for task in table.streams.values():
            if task is not current:
                task.cancel()

    async def _part(self, table: PairBuffer) -> None:
        """Leaves a round that is given up, once the partners have heard so or had time to."""
        if table.streams:
            await asyncio.wait(set(table.streams.values()), timeout=_PART_S)
        self._leave(table)

    def busy(self) -> bool:
        """Whether a round is on its way: what is sent ahead waits for an idle link."""
        return any(t.meeting is not None and not t.ended for t in self._tables.values())

    async def changed(self) -> None:
        """Waits until something about the rounds is another than it was."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
