"""The reducing side of a mean round: one coroutine for each contributor's stream.

contributor                                  reducer
    | ContributionHeader ----------------------> |  redirects, refuses, or takes it
    | <---------------- resume, from which offset |  (only where an earlier try was broken)
    | frames of the contribution --------------> |  ... until everyone has contributed
    | <------------------- resume, from the end   |  (only to one that leaves, which is to know)
    | <---------------------------- ReductionHeader |
    | <-------------------- frames of the reduction |

A stream that begins with a CheckRequest is of `checks`. A contribution is held until this peer has
come to its round, and then taken, redirected to the peer that is to reduce the shard, or refused.
A peer outside the group adds nothing. Once the shard has closed, it is answered, as late ones are.
"""

import asyncio
import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

from murmuration.algorithms.robust import FAR
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import new_event
from murmuration.worker import wire
from murmuration.worker.background import Tasks
from murmuration.worker.exchange.allreduce import closing
from murmuration.worker.exchange.allreduce.checks import Checks
from murmuration.worker.exchange.allreduce.mean import Left, Residuals, reduce
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.exchange.view import Group, ShardKey, View
from murmuration.worker.transport import Stream

_AT_ONCE_S = 0.005  # what is held for longer may have come meanwhile


@dataclass(frozen=True)
class Redirect:
    peer: str


@dataclass(frozen=True)
class Refusal:
    """Why a contribution is not taken, of the kinds that `wire.refusal` has."""

    kind: str
    reason: str
    faulty: bool = False  # what was sent does not fit


Answer = Redirect | Refusal | wire.Reduction


@dataclass(eq=False)
class _Offer:
    """A contributor on its stream, or this peer itself with its `own` payload, of this `norm`."""

    header: pb.ContributionHeader
    came_s: float
    norm: float
    own: wire.Payload | None = None
    held_until: float = math.inf  # or it is part of `shard`
    shard: closing.OpenShard | None = None
    contribution: closing.PeerContribution | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)  # it is held no longer
    answer: "asyncio.Future[Answer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def key(self) -> ShardKey:
        return ShardKey(self.header.fragment, self.header.round, self.header.shard)

    def __str__(self) -> str:
        return f"{self.key} from {self.header.sender}"

    @property
    def is_whole(self) -> bool:
        """Tells whether it waits for the shard to close: all bytes are here, and verified."""
        return self.contribution is not None and self.contribution.whole

    @property
    def is_current(self) -> bool:
        """Tells whether its frames are to be kept: not where a later stream took over."""
        shard, mine = self.shard, self.contribution
        held = None if shard is None else shard.contributions.get(self.header.sender)
        return mine is not None and held is mine and mine.stream is self


class Reducer:
    """All shards that this peer reduces, and the reductions that it knows. io thread only. Args:
    residuals: what earlier reductions have left out."""

    def __init__(self, context: Context, residuals: Residuals | None = None) -> None:
        self._context, self.shards = context, closing.ReducedShards(context)
        self._offers: dict[_Offer, None] = {}  # without an answer yet, in their order
        self._reductions: dict[ShardKey, wire.Reduction] = {}
        self._residuals = Residuals() if residuals is None else residuals
        self.checks, self._tasks = Checks(context, self.shards, self._reductions), Tasks()
        self._late: set[tuple[int, str, bool]] = set()  # fragment, peer, counted apart

    def tick(self) -> None:
        now = self._context.clock()
        for offer in list(self._offers):
            if offer.shard is None and now >= offer.held_until:
                reason = "this peer has not closed that round in time"
                self._answer(offer, Refusal("pruned", reason))
        self._close_due()

    def on_view(self, view: View) -> None:
        self.shards.on_view(view)
        self._look_again()

    def advanced(self, fragment: int, version: int, group: Group) -> None:
        self._residuals.advanced(fragment, version)
        for key, kept in self._reductions.items():
            if key.fragment == fragment and key.round < version:
                self._reductions[key] = replace(kept, payload=kept.payload.unpacked())
        if version < self.shards.versions.get(fragment, version):
            self.checks.gone_back(fragment, version)
        for key in self.shards.advanced(fragment, version, group):
            self._reductions.pop(key, None)
        self._look_again()

    def learned(self, key: ShardKey, reduction: wire.Reduction) -> None:
        """A reduction came from its reducer: keep it for others that may ask."""
        if self.shards.learned(key):
            self._reductions[key] = reduction
        self._look_again()

    def pass_over(self, key: ShardKey, peer: str) -> None:
        """The peer has not reduced the shard in time, or has answered with nothing of use."""
        self.shards.pass_over(key, peer)
        self._late.add((key.fragment, peer, not self._context.plan.waits_for_nobody))
        self._look_again()

    def take_late(self, fragment: int) -> list[str]:
        """The peers that shards were closed without since this was last asked, after a wait, and
        those that were passed over; one that is both comes twice, but where waits are brief."""
        late = {each for each in self._late if each[0] == fragment}
        self._late -= late
        return sorted(peer for _, peer, _ in late)

    async def close(self) -> None:
        await self._tasks.close()
        await self.checks.close()

    async def contribute(
        self, header: pb.ContributionHeader, norm: float, payload: wire.Payload
    ) -> Answer:
        """This peer's own contribution to its own shard. Args: norm: which the header rounds."""
        offer = _Offer(header, self._context.clock(), norm, payload)
        try:
            self._begin(offer)
            return await offer.answer
        finally:
            self._offers.pop(offer, None)

    async def serve(self, stream: Stream) -> None:
        """Serves one contributor's stream, or its check."""
        raw = await stream.receive()
        if raw is None:
            return
        try:
            up = wire.parse(pb.ExchangeUp, raw)
            if up.HasField("check") and up.check.run == self._context.run:
                await self.checks.serve(up.check, stream)
                return
            if up.WhichOneof("body") != "header":
                raise wire.WireError("a contribution must begin with its header")
        except wire.WireError as error:
            self._context.refused(error, "", 0)
            await _send_refusal(stream, _kind(error), str(error))
            return
        offer = _Offer(up.header, self._context.clock(), up.header.norm)
        try:
            self._begin(offer)
            await offer.decided.wait()
            refused = None if offer.answer.done() else await self._take(offer, stream)
            if refused is not None and not offer.answer.done():
                self._answer(offer, refused)
            if offer.header.receipt and offer.is_whole:
                held = pb.Resume(offset=offer.header.total_bytes)
                await stream.send(pb.ExchangeDown(resume=held).SerializeToString())
            answer = await offer.answer
        finally:
            self._offers.pop(offer, None)
            if offer.contribution is not None and offer.contribution.stream is offer:
                offer.contribution.stream = None
        match answer:
            case Redirect(peer):
                redirect = pb.ExchangeDown(redirect=pb.Redirect(peer=peer))
                await stream.send(redirect.SerializeToString())
            case Refusal(kind, reason):
                header, context = offer.header, self._context
                if answer.faulty:
                    misfit = wire.Again(reason) if kind == "again" else wire.WireError(reason)
                    context.refused(misfit, header.sender, header.round)
                elif kind != "run":
                    context.counts.refuse(kind)
                await _send_refusal(stream, kind, reason)
            case wire.Reduction():
                self.shards.given.add(offer.key)
                await self._give(answer, offer.header.reduction_offset, stream)

    async def _take(self, offer: _Offer, stream: Stream) -> Answer | None:
        """Receives and verifies what is offered; None: it counts, or has counted."""
        contribution, header = offer.contribution, offer.header
        assert contribution is not None, "it was accepted"
        if contribution.whole:
            return None
        if header.resumed:
            resume = pb.Resume(offset=contribution.incoming.received_bytes)
            await stream.send(pb.ExchangeDown(resume=resume).SerializeToString())
        try:
            if refused := await self._receive(offer, contribution.incoming, stream):
                return refused
            return await self._verify(offer, contribution)
        except wire.WireError as error:
            if contribution.incoming.complete and offer.shard is not None and offer.is_current:
                del offer.shard.contributions[header.sender]  # it cannot be averaged
            return Refusal(_kind(error), str(error), faulty=True)

    async def _receive(
        self, offer: _Offer, incoming: wire.Incoming, stream: Stream
    ) -> Refusal | None:
        """Takes frames until all are here. An honest contributor gives its round up before it lets
        this peer wait for longer than a round. Raises WireError."""
        context = self._context
        patience_s, began = context.round_s(offer.header.fragment), context.clock()
        with context.arrivals.payload() as arrival:
            if context.clock() - offer.came_s < _AT_ONCE_S:
                arrival.begins(offer.header.sender)  # else a part of it may have lain here
            while not incoming.complete:
                try:
                    async with asyncio.timeout(patience_s):
                        raw = await stream.receive()
                except TimeoutError:
                    raise wire.Again(f"{offer}: no frame in {patience_s:.0f} s") from None
                if raw is None:
                    return Refusal("again", f"{offer} broke off", faulty=True)
                frame = wire.parse(pb.ExchangeUp, raw).frame
                if not offer.is_current:
                    return _taken_over(offer)
                size, stands_for = incoming.add(frame)
                context.counts.contributions_received.add(size, stands_for, context.codec)
                arrival.came(size)
        self.shards.came(offer.key, offer.header.sender, context.clock() - began)
        return None

    async def _verify(self, offer: _Offer, contribution: closing.PeerContribution) -> Answer | None:
        """Sees to it that what has come can be averaged. Raises WireError."""
        context, header, incoming = self._context, offer.header, contribution.incoming
        key, codec = offer.key, context.codec
        group = self.shards.group(key)
        shards = context.shards(key.fragment, group) if group is not None else ()
        if key.shard >= len(shards):  # the group has changed meanwhile, and with it the cut
            return self._moved(offer)
        shard = shards[key.shard]
        elements = shard.stop - shard.start
        incoming.verify()

        def check() -> float:
            raw, of = incoming.raw, (contribution.weight, tuple(header.norms))
            if contribution.root:
                commitment = wire.Commitment(codec, context.leaves(shard), raw, *of)
                if contribution.root != commitment.root:
                    raise wire.WireError("the contribution is not the one that its root stands for")
                if not shard.exact:
                    return commitment.norm
            return wire.check_values(codec, raw, elements, exact=shard.exact)

        norm = await context.worked(elements, check)
        if not context.plan.compares_norms:  # gradients come without theirs
            contribution.most = norm
        if norm > wire.ROUNDED * (most := contribution.most):
            raise wire.WireError(f"values of norm {norm:.3g}, announced were {most:.3g}")
        if not offer.is_current:
            return _taken_over(offer)
        contribution.whole = True
        if offer.shard is not None and self.shards.open.get(key) is offer.shard:
            offer.shard.contributed(header.sender, context.clock())
        answer = self._closed_or_moved(offer)
        self._close_due()
        return answer

    async def _give(self, reduction: wire.Reduction, offset: int, stream: Stream) -> None:
        context = self._context
        await stream.send(wire.reduction_to_message(reduction.header))
        frames = wire.payload_messages(pb.ExchangeDown, reduction.payload, offset)
        for message, size, raw in frames:
            context.reductions_sent.add(size, raw, context.reduction_codec)
            await context.sent(stream, message)

    def _begin(self, offer: _Offer) -> None:
        header, context = offer.header, self._context
        self._offers[offer] = None
        if header.run != context.run:
            self._answer(offer, Refusal("run", "this is another run"))
        elif header.fragment >= (fragments := len(context.elements)):
            reason = f"fragment {header.fragment} of {fragments}"
            self._answer(offer, Refusal("invalid", reason, faulty=True))
        else:
            offer.held_until = offer.came_s + context.round_s(header.fragment)
            self._decide(offer)
        self._close_due()

    def _look_again(self) -> None:
        self._close_due()
        for offer in list(self._offers):
            if offer.shard is None:
                self._decide(offer)
            elif offer.is_whole and (answer := self._closed_or_moved(offer)) is not None:
                self._answer(offer, answer)

    def _answer(self, offer: _Offer, answer: Answer) -> None:
        self._offers.pop(offer, None)
        if not offer.answer.done():
            offer.answer.set_result(answer)
        offer.decided.set()

    def _decide(self, offer: _Offer) -> None:
        mine = self.shards.group(offer.key)
        agreed = mine is not None and wire.group_hash(mine) == offer.header.group
        decision = self._decision(offer.key, mine if agreed else None)
        answer = self._accept(offer, decision) if isinstance(decision, tuple) else decision
        if answer is not None:
            self._answer(offer, answer)

    def _decision(self, key: ShardKey, group: Group | None) -> Answer | Group | None:
        """The group to take it with, an answer, or None: hold it. Args: group: if both have it."""
        shards = self.shards
        if key in shards.closed and group is not None:
            return self._reductions[key]
        version = shards.versions.get(key.fragment)
        if key not in shards.closed:
            if version is None or key.round > version:
                return None
            if key.round < version - closing.KEPT_ROUNDS:
                reason = f"round {key.round} closed long ago, this peer is at {version}"
                return Refusal("pruned", reason)
        if group is None:
            return Refusal("group", "the groups of this round differ")
        count = len(self._context.orders(key.fragment, group))
        if key.shard >= count:
            return Refusal("invalid", f"shard {key.shard} of {count}")
        if (above := shards.above(key, group)) is not None:
            return Redirect(above)
        begun = (entry := shards.open.get(key)) is not None and entry.begun
        if version is not None and key.round < version and not begun:
            # Applied here through others, and no peer that knows the answer is left.
            return Refusal("pruned", f"round {key.round} is over, this peer is at {version}")
        return group

    def _accept(self, offer: _Offer, group: Group) -> Refusal | None:
        """Takes a contribution, or holds it where the round is not its sender's. Other values than
        before are of a peer that gave the round up and tries again: the newer ones count."""
        header, key, own = offer.header, offer.key, offer.own
        try:
            if own is None and (early := self._misfit(offer, group)):
                return Refusal("again", early, faulty=True)
            weight = self._context.weight(header.weight)
            if not 0 <= offer.norm < math.inf:
                raise ValueError(f"{offer}: a norm of {offer.norm}")
            if len(header.root) != (wire.HASH_BYTES if self._context.plan.compares_norms else 0):
                raise ValueError(f"{offer}: no root of its values")
            places = self._context.norms_of(len(self._context.orders(key.fragment, group)))
            norms = tuple(header.norms)
            sums_up = math.hypot(*norms) <= wire.ROUNDED * offer.norm
            if len(norms) != len({*places}) or min(norms, default=0.0) < 0 or not sums_up:
                raise ValueError(f"{offer}: norms of shards that are not those of the whole")
        except ValueError as error:
            return Refusal("invalid", str(error), faulty=True)
        if not self.shards.admits(header.sender, group):
            return None
        work = self._context.work(header.weight)
        self.shards.announced(key, header.sender, offer.norm, work)
        self.checks.heard(key, header.sender, norms)
        entry = offer.shard = self.shards.open.setdefault(key, closing.OpenShard())
        given = None if own is not None else entry.contributions.get(header.sender)
        if given is not None and given.incoming.hash != header.hash:
            if entry.computing is None:
                entry.contributors.pop(header.sender, None)
            given = None
        if given is None or not (given.whole or header.resumed):
            incoming = wire.Incoming(header.total_bytes, header.hash, own.raw if own else None)
            if whole := own is not None:
                entry.contributed(header.sender, self._context.clock())
            known = weight, offer.norm, norms[places[key.shard]] if norms else 0.0, header.root
            given = closing.PeerContribution(incoming, *known, whole=whole)
            entry.contributions[header.sender] = given
        offer.contribution, given.stream = given, offer
        offer.decided.set()
        return None

    def _misfit(self, offer: _Offer, group: Group) -> str:
        """Returns why the header comes too early, if it does. Raises ValueError: it never fits."""
        header, key, codec = offer.header, offer.key, self._context.codec
        shard = self._context.shards(key.fragment, group)[key.shard]
        elements, size = shard.stop - shard.start, shard.contribution_bytes
        announced = (header.codec, header.elements, header.total_bytes)
        if announced != (codec.wire_id, elements, size):
            raise ValueError(
                f"{offer}: {header.elements} values in {header.total_bytes} bytes of codec "
                f"{header.codec}; expected {elements} in {size} bytes of {codec.name}"
            )
        known = self.shards.view.live(header.sender)  # gossip may not have told of it yet
        return "" if known else f"{key}: {header.sender} is not a member"

    def _closed_or_moved(self, offer: _Offer) -> Answer | None:
        if offer.key in self.shards.closed:
            return self._reductions[offer.key]
        return None if self.shards.open.get(offer.key) is offer.shard else self._moved(offer)

    def _moved(self, offer: _Offer) -> Answer:
        decision = self._decision(offer.key, self.shards.group(offer.key))
        if isinstance(decision, Redirect | Refusal | wire.Reduction):
            return decision
        return Refusal("again", "the shard has moved to another reducer")

    def _close_due(self) -> None:
        for due in self.shards.close(self._context.clock()):
            self._tasks.spawn(self._compute(due))

    async def _compute(self, due: closing.DueMean) -> None:
        context, key = self._context, due.key
        at = key, due.shard.start, due.shard.stop
        for peer in due.left_out:
            context.left_out(peer)
        self._late.update((key.fragment, peer, False) for peer in due.late)
        before, known = self._residuals.before(*at), self._residuals.commitment(*at)
        try:
            if context.ends_run:
                due = await self._without_far(due)
            else:
                await self._tell_alike(due)
            reduction, left_out, lefts = await reduce(context, due, before, known)
        except Exception as failure:  # the shard must not stay closed to peers that try again
            context.log(new_event("warning", text=f"{key} was not reduced: {failure}"))
            self.shards.computed(key, due.attempt, failed=True)
        else:
            if self.shards.computed(key, due.attempt):
                self._reductions[key] = reduction
                self.checks.shows(key, *lefts)
                if left_out is not None:
                    self._residuals.keep(*at, Left(key.round, before, left_out, lefts))
        self._look_again()

    async def _without_far(self, due: closing.DueMean) -> closing.DueMean:
        """The mean that ends a run in pairs, without models that are far away from this peer's."""
        context, shard, me = self._context, due.shard, self._context.me
        elements, most = shard.stop - shard.start, FAR * context.usual.norm(due.key.fragment)
        if most == 0 or me not in due.contributors:
            return due
        own = due.inputs[due.contributors.index(me)].raw
        away = partial(wire.distance, context.codec, own, elements=elements, exact=shard.exact)
        count = len(due.inputs) * elements
        near = await context.worked(count, lambda: [away(each.raw) <= most for each in due.inputs])
        for peer in compress(due.contributors, map(not_, near)):
            context.left_out(peer, "ends with a model far from others': the last mean is without")
        names = "contributors", "inputs", "weights", "roots", "factors"
        kept: Any = {name: tuple(compress(getattr(due, name), near)) for name in names}
        return replace(due, last=due.last if due.last in kept["contributors"] else me, **kept)

    async def _tell_alike(self, due: closing.DueMean) -> None:
        """Says who contributes the same, where it is something: other values than zeros."""
        context, shard = self._context, due.shard
        codec, elements = context.codec, shard.stop - shard.start
        for peers in (each for each in due.alike if not context.known_alike(each)):
            given = due.inputs[due.contributors.index(peers[0])].raw
            check = partial(wire.check_values, codec, given, elements, exact=shard.exact)
            if await context.worked(elements, check) > 0:
                context.contribute_alike(peers)


def _taken_over(offer: _Offer) -> Refusal:
    return Refusal("again", f"{offer}: a later stream took over", faulty=True)


async def _send_refusal(stream: Stream, kind: str, reason: str) -> None:
    await stream.send(pb.ExchangeDown(refusal=wire.refusal(kind, reason)).SerializeToString())


def _kind(error: wire.WireError) -> str:
    return "again" if isinstance(error, wire.Again) else "invalid"
