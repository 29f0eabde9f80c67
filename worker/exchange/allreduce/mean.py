"""What a reducer makes of the contributions to a shard."""

from typing import TYPE_CHECKING

from murmuration.algorithms.robust import aggregate
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce.closing import DueMean
from murmuration.worker.exchange.allreduce.dialogue import ReductionHeader
from murmuration.worker.exchange.round_context import Context

if TYPE_CHECKING:
    from torch import Tensor


async def reduce(
    context: Context, due: DueMean, before: "Tensor | None"
) -> tuple[wire.Reduction, "Tensor | None"]:
    """The mean as the bytes that everyone applies, and what their encoding leaves out if that is
    kept. Averages in the order given, block by block.

    Args: before: what earlier means have left out, to be added.
    """
    work = len(due.inputs) * (due.shard.stop - due.shard.start)
    payload, left_out = await context.worked(work, lambda: _average(context, due, before))
    header = ReductionHeader(
        contributors=due.contributors,
        joiners=due.joiners,
        codec=context.reduction_codec.wire_id,
        total_bytes=len(payload.raw),
        hash=payload.hash,
        last=due.last,
        factors=due.factors if min(due.factors) < 1 else (),
        reducer=context.me,
        roots=due.roots,
        weights=due.weights if due.roots and max(due.weights) > 1 else (),
    )
    return wire.Reduction(header, payload), left_out


def _average(
    context: Context, due: DueMean, before: "Tensor | None"
) -> tuple[wire.Payload, "Tensor | None"]:
    """Off the loop."""
    codec, shard = context.reduction_codec, due.shard
    mean = wire.average(
        context.codec,
        [each.buffer for each in due.inputs],
        shard.stop - shard.start,
        lambda each: aggregate(
            each,
            due.factors,
            due.weights,
            over=context.plan.mean_over,
            aggregation=context.config.aggregation,
        ),
        exact=shard.exact,
    )
    if before is not None:
        mean.add_(before)
    raw = wire.encode(codec, mean, exact=shard.exact)
    left_out = None
    if context.plan.keeps_reduction_residual:
        left_out = wire.encoding_error(codec, raw, mean, exact=shard.exact)
    return context.compression.payload(codec, raw), left_out
