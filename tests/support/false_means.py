"""A reducer that answers something else than the mean of what it was given.

It is a live peer whose contributions and answers of any other kind are honest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from murmuration.worker import wire
from murmuration.worker.exchange.allreduce import reducer
from murmuration.worker.exchange.allreduce.closing import DueMean
from murmuration.worker.exchange.allreduce.mean import reduce
from murmuration.worker.exchange.round_context import Context

Lie = Callable[[Tensor, Tensor], Tensor]
"""What to answer in place of a mean; the second argument is that of the shard's first round."""

LIES: dict[str, Lie] = {
    "1e4": lambda mean, _: torch.full_like(mean, 1e4),
    "-20 times": lambda mean, _: -20 * mean,
    "turned": lambda mean, _: -mean,
    "stale": lambda _, first: first,
    "zero": lambda mean, _: torch.zeros_like(mean),
    "noise": lambda mean, _: (
        torch.randn(mean.shape, generator=torch.Generator().manual_seed(mean.numel()))
        * mean.square().mean().sqrt()
    ),
    "a tenth turned": lambda mean, _: torch.cat(
        (-mean[: mean.numel() // 10], mean[mean.numel() // 10 :])
    ),
    "1 % more": lambda mean, _: 1.01 * mean,
}


@contextmanager
def reducing_falsely(liar: str, lie: Lie) -> Iterator[None]:
    """As long as this lasts, the peer of this name lies about every shard that it reduces."""
    first: dict[tuple[int, int], Tensor] = {}

    async def answer(
        context: Context, due: DueMean, before: Tensor | None
    ) -> tuple[wire.Reduction, Tensor | None]:
        reduction, left_out = await reduce(context, due, before)
        if context.me != liar:
            return reduction, left_out
        codec, shard = context.reduction_codec, due.shard
        elements = shard.stop - shard.start
        mean = wire.decode(codec, reduction.payload.raw, elements, exact=shard.exact)
        values = lie(mean, first.setdefault((due.key.fragment, due.key.shard), mean))
        payload = wire.Payload.of(wire.encode(codec, values, exact=shard.exact))
        return wire.Reduction(replace(reduction.header, hash=payload.hash), payload), left_out

    with patch.object(reducer, "reduce", answer):
        yield
