"""The mean that a reducer makes of contributions to a shard, and what it keeps for the next."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import mul
from typing import TYPE_CHECKING

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.robust import COMPARED, aggregate, sampled
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce.closing import DueMean
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.exchange.view import ShardKey

if TYPE_CHECKING:
    from torch import Tensor

LEFT_CODEC = codec_by_name("fp32")  # in which a reducer shows what its encodings have left out


async def reduce(
    context: Context, due: DueMean, before: "Tensor | None", known: wire.Commitment | None = None
) -> "tuple[wire.Reduction, Tensor | None, list[wire.Commitment]]":
    """The mean as the bytes that everyone applies; what their encoding leaves out, if that is kept;
    and commitments to what it takes up of that and what it leaves. Averages in the order given.
    Args: before: what earlier means have left out, to be added; known: the commitment to it."""
    codec, key, shard = context.reduction_codec, due.key, due.shard
    elements, leaves = shard.stop - shard.start, context.leaves(shard)
    stride, samples = max(1, elements // COMPARED), list[list["Tensor"]]()
    told: list[tuple[str, float, bool]] = []
    by = slice(context.rng.randrange(stride) if stride > 1 else 0, None, stride)
    compares = context.plan.compares_norms and not context.ends_run and elements >= COMPARED // 16

    def work() -> "tuple[wire.Payload, Tensor | None, list[wire.Commitment]]":
        over, aggregation = context.plan.mean_over, context.config.aggregation
        given = [each.raw for each in due.inputs]

        def mean_of(values: "Iterable[Tensor]") -> "Tensor":
            if compares:
                samples.append([])
                values = sampled(values, by, samples[-1])
            return aggregate(values, due.factors, due.weights, over=over, aggregation=aggregation)

        mean = wire.average(context.codec, given, elements, mean_of, exact=shard.exact)
        if before is not None:
            mean.add_(before)
        raw, left_out = wire.encode(codec, mean, exact=shard.exact), None
        if context.plan.keeps_reduction_residual:
            left_out = wire.encoding_error(codec, raw, mean, exact=shard.exact)
        lefts = [
            made or wire.Commitment(LEFT_CODEC, leaves, wire.encode(LEFT_CODEC, left), 0)
            for left, made in ((before, known), (left_out, None))
            if left is not None and context.plan.compares_norms
        ]
        at = key.fragment, key.shard
        weights = due.weights if aggregation == "mean" else repeat(1)
        counts = map(mul, due.factors, weights)
        told.extend(context.directions.saw(at, due.contributors, samples, *counts))
        return context.compression.payload(codec, raw), left_out, lefts

    payload, left_out, lefts = await context.worked(len(due.inputs) * elements, work)
    for found in told:
        context.points_against(*found, key)
    header = wire.ReductionHeader(
        contributors=due.contributors,
        joiners=due.joiners,
        codec=codec.wire_id,
        total_bytes=len(payload.raw),
        hash=payload.hash,
        last=due.last,
        factors=due.factors if min(due.factors) < 1 else (),
        reducer=context.me,
        roots=due.roots,
        weights=due.weights if due.roots and max(due.weights) > 1 else (),
        lefts=tuple(each.root for each in lefts),
    )
    return wire.Reduction(header, payload), left_out, lefts


@dataclass(frozen=True)
class Left:
    """The values that the encoding of `round` has left out."""

    round: int
    before: "Tensor | None"  # what went into it, for the case that it is done over
    after: "Tensor"
    lefts: Sequence[wire.Commitment] = ()  # the last one to `after`
    rest: bool = False  # of another layout's shard: for shards of the round after


class Residuals:
    """The residuals of all fragments. A shard is the same range as long as the group is the same.
    Of another layout's shards the next round takes what this peer still reduces, and no more."""

    def __init__(self) -> None:
        self._left: dict[tuple[int, int, int], Left] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def before(self, key: ShardKey, start: int, stop: int) -> "Tensor | None":
        found = None
        for at, end, left in self._overlapping(key.fragment, start, stop):
            values = left.before if left.round >= key.round else left.after
            if values is None:
                continue
            if (at, end) == (start, stop):
                return values
            if found is None:
                found = values.new_zeros(stop - start)
            low, high = max(at, start), min(end, stop)
            found[low - start : high - start] = values[low - at : high - at]
        return found

    def commitment(self, key: ShardKey, start: int, stop: int) -> wire.Commitment | None:
        """To what was before, if it has been made."""
        left = self._left.get((key.fragment, start, stop))
        return left.lefts[-1] if left and left.lefts and left.round < key.round else None

    def keep(self, key: ShardKey, start: int, stop: int, new: Left) -> None:
        """The round has closed, with `before` in its mean and `after` left out."""
        for at, end, left in self._overlapping(key.fragment, start, stop):
            del self._left[key.fragment, at, end]
            for low, high in ((at, min(end, start)), (max(at, stop), end)):
                if low < high:
                    cut = slice(low - at, high - at)
                    earlier = None if left.before is None else left.before[cut]
                    rest = Left(left.round, earlier, left.after[cut], rest=True)
                    self._left[key.fragment, low, high] = rest
        self._left[key.fragment, start, stop] = new

    def advanced(self, fragment: int, version: int) -> None:
        """The rounds before this one are applied here: they are not done over."""
        for place, left in list(self._left.items()):
            if place[0] == fragment and left.round < version:
                if left.rest and left.round + 1 < version:
                    del self._left[place]
                else:
                    self._left[place] = replace(left, before=None)

    def plain(self, fragment: int, version: int) -> list[tuple[int, int, "Tensor"]]:
        """(start, stop, values) of what the reductions of this round take up."""
        of = [(start, stop) for at, start, stop in self._left if at == fragment]
        found = ((*each, self.before(ShardKey(fragment, version, 0), *each)) for each in of)
        return [(start, stop, values) for start, stop, values in found if values is not None]

    def load(self, fragment: int, version: int, plain: Iterable[tuple[int, int, "Tensor"]]) -> None:
        for start, stop, values in plain:
            self._left[fragment, start, stop] = Left(version - 1, None, values)

    def _overlapping(self, fragment: int, start: int, stop: int) -> list[tuple[int, int, Left]]:
        return [
            (at, end, left)
            for (of, at, end), left in self._left.items()
            if of == fragment and at < stop and start < end
        ]
