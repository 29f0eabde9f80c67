"""Spot checks: after a round, a part of each mean that others gave is computed here once more.

contributor                             each other contributor of a mean, and its reducer
    | CheckRequest: some leaves -----------> |
    | <---------- each leaf, and its path to the root that was announced before |
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from murmuration.algorithms.codecs import Codec, has_few_bits
from murmuration.algorithms.robust import AGGREGATIONS, Doubts, aggregate, norm
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.background import Tasks
from murmuration.worker.exchange.allreduce.closing import KEPT_ROUNDS, ReducedShards
from murmuration.worker.exchange.allreduce.mean import LEFT_CODEC
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.exchange.view import ShardKey, ShardRange
from murmuration.worker.transport import Stream, TransportError

if TYPE_CHECKING:
    from torch import Tensor

_SHARE = 0.012  # of the bytes of a round, for checking it
_LEAST_BYTES = 2048  # the same, for small fragments that are not in few bits
_OVERHEAD_BYTES = 400  # of a leaf: its path and what is around it
_EXACT = 1e-5  # the arithmetic of another machine may differ by as much
_WORSE = 1e-3  # than the best encoding of a leaf, of its error: values may tie
_TRIES = 3  # to ask on a stream that does not break
_MOST_NORMS = 2  # the last that a peer has announced of a round: it may have tried again
_HINTS = 3  # that count of a shard
_SETTLED = 3  # rounds after which no contribution of an earlier life of this peer is about

Shown = tuple[bytes, Sequence[bytes], tuple[float, ...]]
_Answers = Mapping[tuple[ShardKey, bytes], Shown] | None
Caught = tuple[str, str]
"""A peer that has lied, and how that is known."""


@dataclass(frozen=True)
class Given:
    """The mean of a shard, as its own reducer gave it to this peer, so long after it was asked."""

    key: ShardKey
    shard: ShardRange
    header: wire.ReductionHeader
    took_s: float
    place: int = 0  # of its norm among those that come with a contribution


@dataclass(frozen=True)
class _Drawn:
    """A leaf of `elements` values to be checked, one of the `leaves` of its shard."""

    given: Given
    leaf: int
    leaves: wire.Leaves
    elements: int
    mean: memoryview  # encoded
    own: Shown | None  # what this peer has contributed

    @property
    def parts(self) -> list[tuple[str, bytes, int]]:
        """The parts of the mean, and those left over: the peer that has it, the root that it leads
        to, and what it counts."""
        header = self.given.header
        weights = header.weights or (1,) * len(header.contributors)
        lefts = ((header.reducer, root, 0) for root in header.lefts)
        return [*zip(header.contributors, header.roots, weights, strict=True), *lefts]


class Checks:
    """Shows what this peer has contributed or left over, and checks others. io thread only. Args:
    shards: that this peer reduces; reductions: that it has been given."""

    open_to: Callable[[str], Stream]  # how to reach another peer, as the contributor does

    def __init__(
        self, context: Context, shards: ReducedShards, reductions: Mapping[ShardKey, wire.Reduction]
    ) -> None:
        self._context, self._shards, self._reductions = context, shards, reductions
        self.doubts, self._tasks = Doubts(), Tasks()
        self.close = self._tasks.close
        # Of each fragment, as they came: a round that is tried again has more than one.
        self._own: dict[int, list[dict[ShardKey, dict[bytes, wire.Commitment]]]] = {}
        self._given: dict[int, dict[ShardKey, Given]] = {}  # likewise
        self._announced: dict[ShardKey, set[bytes]] = {}
        self._hints: dict[ShardKey, dict[str, int]] = {}  # leaves that others have told of
        self._norms: dict[ShardKey, dict[str, Sequence[tuple[float, ...]]]] = {}  # by round
        self._completed: Counter[int] = Counter()

    def contributes(self, fragment: int, keys: Sequence[ShardKey]) -> None:
        """This peer begins a round with contributions to these shards, which it can show until its
        next has ended: all that are in that one have asked by then."""
        self._own[fragment] = [*self._own.get(fragment, [])[-2:], {key: {} for key in keys}]
        oldest = keys[0].round - KEPT_ROUNDS if keys else 0
        for of_shards in (self._announced, self._hints, self._norms):
            for key in [k for k in of_shards if k.fragment == fragment and k.round < oldest]:
                del of_shards[key]

    def commits(self, key: ShardKey, commitment: wire.Commitment) -> None:
        """Commits this peer to what it contributes in the round that it has begun last."""
        self.shows(key, commitment)
        self._announced.setdefault(key, set()).add(commitment.root)

    def shows(self, key: ShardKey, *commitments: wire.Commitment) -> None:
        """Keeps what this peer can show for as long as its contributions to its last round."""
        last = self._own.setdefault(key.fragment, [{}])[-1]
        last.setdefault(key, {}).update((each.root, each) for each in commitments)

    def heard(self, key: ShardKey, peer: str, norms: tuple[float, ...]) -> None:
        """A peer has announced these norms of all shards to this one."""
        of_round = self._norms.setdefault(key._replace(shard=0), {})
        earlier = (each for each in of_round.get(peer, ()) if each != norms)
        of_round[peer] = (*earlier, norms)[-_MOST_NORMS:]

    def gone_back(self, fragment: int, version: int) -> None:
        """This peer is at an earlier version: of later rounds it has heard in another history."""
        norms = self._norms.items()
        self._norms = {k: n for k, n in norms if k.fragment != fragment or k.round < version}

    def completed(self, fragment: int, given: Sequence[Given]) -> None:
        """A round of this peer has ended, with these means of others."""
        last = self._own.get(fragment, [{}])[-1]
        self._own[fragment] = [own for own in self._own.get(fragment, ()) if own.keys() & last]
        self._given[fragment] = {each.key: each for each in given}
        self._completed[fragment] += 1
        for each in given:
            key, header, me = each.key, each.header, self._context.me
            said = self._completed[fragment] > _SETTLED and self._announced.get(key)
            if said and me in header.contributors and header.root(me) not in said:
                why = f"{key} says that {me} contributed what it did not"
                self._context.caught(header.reducer, why)
            if not self._follows(each) and self.doubts.again(header.reducer, fragment, key.round):
                why = f"{key} takes up other values than it had left over"
                self._context.caught(header.reducer, why)
        if drawn := self._draw(fragment, given):
            self._tasks.spawn(self._check(drawn))

    async def serve(self, request: pb.CheckRequest, stream: Stream) -> None:
        """Answers another peer's check, with nothing for what is gone; or looks where told."""
        own = self._own.get(request.fragment, [])
        most = max((sum(map(len, of.values())) for of in own), default=0)
        for asked in request.leaves[:most]:
            key = ShardKey(request.fragment, request.round, asked.shard)
            if request.hint:
                self._look_at(key, asked.leaf, request.sender)
                return
            payload, path, norms = self._shown(key, asked.root, asked.leaf) or (b"", [], ())
            leaf = pb.CheckedLeaf(payload=payload, path=path, norms=norms)
            answer = pb.ExchangeDown(leaf=leaf)
            self._context.counts.checked_bytes += answer.ByteSize()
            await stream.send(answer.SerializeToString())

    def _shown(self, key: ShardKey, root: bytes, leaf: int) -> Shown | None:
        for own in self._own.get(key.fragment, ()):
            if commitment := own.get(key, {}).get(root):
                return (*commitment.shown(leaf), tuple(commitment.norms))
        return None

    def _look_at(self, key: ShardKey, leaf: int, sender: str) -> None:
        """Once for each shard of this peer's last two rounds and each of a few peers, now or when
        they are over: a liar that tells of another leaf first hides nothing."""
        given = self._given.get(key.fragment, {}).get(key)
        begun = any(key in own for own in self._own.get(key.fragment, ()))
        hints = self._hints.get(key, {})
        if sender in hints or len(hints) >= _HINTS or not (given or begun):
            return
        self._hints[key] = {**hints, sender: leaf}
        if given and (drawn := self._drawn(given, leaf)):
            self._tasks.spawn(self._check([drawn]))

    async def _tell_of(self, drawn: _Drawn) -> None:
        request = self._request([(drawn, b"")])
        request.hint = True

        async def tell(peer: str) -> None:
            with suppress(TransportError, TimeoutError):
                await self._answers(peer, request, 1)

        header = drawn.given.header
        others = {*header.contributors} - {self._context.me, header.reducer}
        await asyncio.gather(*map(tell, sorted(others)))

    def _draw(self, fragment: int, given: Iterable[Given]) -> list[_Drawn]:
        """Draws a leaf of a mean of each reducer, as far as the bytes allow, and adds hints."""
        context, rng, drawn = self._context, self._context.rng, list[_Drawn]()
        by_reducer = defaultdict[str, list[Given]](list)
        for each in given:
            by_reducer[each.header.reducer].append(each)
            hinted = {*self._hints.get(each.key, {}).values()}
            drawn += filter(None, [self._drawn(each, leaf) for leaf in hinted])
        least = 0 if has_few_bits(context.reduction_codec.name) else _LEAST_BYTES
        left = max(least, _SHARE * 2 * context.contribution_bytes(fragment))
        for reducer in rng.sample(sorted(by_reducer), len(by_reducer)):
            each = rng.choice(by_reducer[reducer])
            leaf = rng.randrange(max(1, context.leaves(each.shard).count))
            if (found := self._drawn(each, leaf)) is not None:
                leaf_bytes = context.codec.encoded_bytes(found.elements) + _OVERHEAD_BYTES
                one = leaf_bytes * len(each.header.contributors)
                one += len(each.header.lefts) * LEFT_CODEC.encoded_bytes(found.elements)
                if left < one * rng.random():  # of small fragments one in some rounds
                    break
                left -= one
                drawn.append(found)
        return drawn

    def _drawn(self, given: Given, leaf: int) -> _Drawn | None:
        """The leaf of what this peer has applied; None where there is none."""
        reduction, leaves = self._reductions.get(given.key), self._context.leaves(given.shard)
        if reduction is None or reduction.header != given.header or leaf >= leaves.count:
            return None
        start, stop = leaves.bounds(leaf)
        at, end = map(self._context.reduction_codec.encoded_bytes, (start, stop))
        mean = memoryview(bytearray(reduction.payload.raw[at:end]))
        own = self._shown(given.key, given.header.root(self._context.me), leaf)
        return _Drawn(given, leaf, leaves, stop - start, mean, own)

    def _follows(self, given: Given) -> bool:
        """Tells whether a mean takes up nothing, or what its reducer is known to have left."""
        at, taken = given.key._replace(round=given.key.round - 1), given.header.lefts[:-1]
        before = self._reductions.get(at)
        if not taken or before is None or before.header.reducer != given.header.reducer:
            return True
        cut_alike = self._shards.group(at) == self._shards.group(given.key)
        return taken == before.header.lefts[-1:] or not cut_alike

    async def _check(self, drawn: Sequence[_Drawn]) -> None:
        others = sorted({peer for each in drawn for peer, _, _ in each.parts} - {self._context.me})
        asking = (self._ask(peer, drawn) for peer in others)
        answers = dict(zip(others, await asyncio.gather(*asking), strict=True))
        for peer in others:
            hidden = {hides for each in drawn if (hides := _hides(peer, each, answers)) is not None}
            if hidden and self.doubts.hides(peer, hidden=any(hidden)):
                self._context.caught(peer, "it does not show what it contributes or has left over")
        for each in drawn:
            for liar, why in await self._judged(each, answers):
                if self._context.caught(liar, why) and liar == each.given.header.reducer:
                    await self._tell_of(each)

    def _request(self, wanted: Sequence[tuple[_Drawn, bytes]]) -> pb.CheckRequest:
        key, me, run = wanted[0][0].given.key, self._context.me, self._context.run
        request = pb.CheckRequest(run=run, sender=me, fragment=key.fragment, round=key.round)
        for each, root in wanted:
            request.leaves.add(shard=each.given.key.shard, leaf=each.leaf, root=root)
        return request

    async def _ask(self, peer: str, drawn: Sequence[_Drawn]) -> _Answers:
        """Asks what a peer shows, by shard and root; None: nothing, and it is not to blame."""
        wanted = [(each, root) for each in drawn for of, root, _ in each.parts if of == peer]
        shown: dict[tuple[ShardKey, bytes], Shown] = {}
        request, answers = self._request(wanted), list[pb.CheckedLeaf]()
        with suppress(TransportError, TimeoutError, wire.WireError):
            for tried in range(_TRIES):  # an honest peer's stream may break
                await asyncio.sleep(tried * self._context.config.retry_s)
                with suppress(TransportError):
                    answers = await self._answers(peer, request, len(wanted))
                    break
            shown = {
                (each.given.key, root): (answer.payload, answer.path, tuple(answer.norms))
                for (each, root), answer in zip(wanted, answers, strict=False)
                if answer.payload
            }
        view, me = self._shards.view, self._context.me
        excused = not (view.usable(peer) and view.reach(me, peer))
        excused |= all(me not in each.given.header.contributors for each, _ in wanted)  # late
        return None if not shown and excused else shown

    async def _answers(
        self, peer: str, request: pb.CheckRequest, count: int
    ) -> list[pb.CheckedLeaf]:
        stream, found = self.open_to(peer), list[pb.CheckedLeaf]()
        fragment, shards = request.fragment, self._shards
        means = [each for each in self._given[fragment].values() if each.header.reducer == peer]
        way_s = max((each.took_s for each in means), default=self._context.round_s(fragment))
        late_s = shards.patience.habit_s(fragment) + shards.transfer_s(fragment, [peer])
        try:
            async with asyncio.timeout(late_s + way_s):  # as late as a contribution, and the way
                await stream.send(pb.ExchangeUp(check=request).SerializeToString())
                await stream.done()
                while len(found) < count and (raw := await stream.receive()) is not None:
                    found.append(wire.parse(pb.ExchangeDown, raw).leaf)
        finally:
            stream.cancel()
        return found

    async def _judged(self, drawn: _Drawn, answers: Mapping[str, _Answers]) -> list[Caught]:
        context, given, caught, raws = self._context, drawn.given, list[Caught](), list[bytes]()
        header, key, reducer, parts = given.header, given.key, given.header.reducer, drawn.parts
        group = self._shards.group(key) or header.contributors
        me, said = context.me, self._norms.get(key._replace(shard=0), {})
        for place, (peer, root, weight) in enumerate(parts):
            shown = drawn.own if peer == me else (answers[peer] or {}).get((key, root))
            if shown is None:
                continue
            payload, path, norms = shown
            gave = place < len(header.contributors)
            codec = context.codec if gave else LEFT_CODEC
            where = codec, drawn.leaves, drawn.leaf, payload, path, weight, norms, given.place
            found = await context.worked(drawn.elements * len(parts), partial(wire.root_of, *where))
            fits = found == root and gave == bool(norms)
            if fits:
                raws.append(payload)
                other = gave and peer != me and norms not in said.get(peer, [norms])
                if other and self.doubts.again(peer, key.fragment, key.round):
                    caught.append((peer, f"{key} is announced with other norms to others"))
            elif peer == reducer:
                caught.append((peer, f"{key} has other values of its own than it shows"))
            if peer not in (me, reducer):
                for liar in self.doubts.compared(peer, reducer, len(group), agree=fits):
                    caught.append((liar, f"what it says of {key} is not what others say"))
        if len(raws) == len(parts) and await context.worked(
            drawn.elements * len(raws), lambda: self._is_false(drawn, raws)
        ):
            caught.append((reducer, f"{key} is not the mean of its contributions, and was applied"))
        return caught

    def _is_false(self, drawn: _Drawn, raws: Sequence[bytes]) -> bool:
        """Tells whether a mean is another than that of its encoded parts."""
        context, count = self._context, len(drawn.given.header.contributors)
        factors = drawn.given.header.factors or (1.0,) * count
        weights = [weight for _, _, weight in drawn.parts[:count]]
        codec, elements = context.reduction_codec, drawn.elements
        given = wire.decode(codec, drawn.mean, elements)

        def decoded(of: Codec, raws: Sequence[bytes]) -> "list[Tensor]":
            return [wire.decode(of, memoryview(bytearray(raw)), elements) for raw in raws]

        def fits(mean: "Tensor") -> bool:
            encoded = sum(before, mean)
            least = norm(wire.encoding_error(codec, wire.encode(codec, encoded), encoded))
            error, most = encoded - given, (1 + _WORSE) * least + near * math.sqrt(elements)
            return norm(error) <= most < math.inf and float((error - after).abs().max()) <= near

        try:
            values, left = decoded(context.codec, raws[:count]), decoded(LEFT_CODEC, raws[count:])
            near = _EXACT * max(float(each.abs().max()) for each in (*values, *left))
            *before, after = left or [given.new_zeros(elements)]
            means = (
                aggregate(values, factors, weights, over=context.plan.mean_over, aggregation=made)
                for made in AGGREGATIONS  # its reducer may have chosen either
            )
            return not any(map(fits, means))
        except ValueError:
            return True  # its reducer must have refused that, or nothing leaves such values over


def _hides(peer: str, drawn: _Drawn, answers: Mapping[str, _Answers]) -> bool | None:
    """Tells whether a peer hides a leaf that most others show; None: nothing follows. One that has
    begun a later round has nothing to show any more; most others have begun it too then."""
    shows: dict[str, bool] = {}
    for of, root, _ in drawn.parts:
        if (shown := answers.get(of)) is not None:
            shows[of] = shows.get(of, True) and (drawn.given.key, root) in shown
    own = shows.pop(peer, None)
    if own is False and 2 * sum(shows.values()) > len(shows):
        return True
    return False if own else None
