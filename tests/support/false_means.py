"""A reducer that answers something else than the mean, and is honest in all else."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce import reducer
from murmuration.worker.exchange.allreduce.checks import Checks
from murmuration.worker.exchange.allreduce.closing import DueMean, ReducedShards
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.mean import LEFT_CODEC, reduce
from murmuration.worker.exchange.pairwise.partner import PairValues
from murmuration.worker.exchange.pairwise.round import ANCHOR, CONTRIBUTION
from murmuration.worker.exchange.round_context import Context
from murmuration.worker.transport import Stream

Lie = Callable[[Tensor, Tensor], Tensor]
"""The answer in place of a mean; the second argument is that of the shard's first round."""
Leaving = Callable[[list[Tensor], Tensor], list[Tensor]]
"""The claim of what was left over before and is now; given the truth, and what the lie leaves."""

LIES: dict[str, Lie] = {
    "1e4": lambda mean, _: torch.full_like(mean, 1e4),
    "-20 times": lambda mean, _: -20 * mean,
    "turned": lambda mean, _: -mean,
    "stale": lambda _, first: first,
    "zero": lambda mean, _: torch.zeros_like(mean),
    "1 % more": lambda mean, _: 1.01 * mean,
}


@contextmanager
def reducing_falsely(
    liar: str, lie: Lie, ghost: str = "", leaving: Leaving | None = None, by: str = ""
) -> Iterator[None]:
    """As long as this lasts, the peer of this name lies about every shard that it reduces.

    Args: ghost: is named among the contributors; by: whom it says the mean is from."""
    first: dict[tuple[int, int], Tensor] = {}

    async def answer(
        context: Context, due: DueMean, before: Tensor | None, *known: Any
    ) -> tuple[wire.Reduction, Tensor | None, list[wire.Commitment]]:
        reduction, left_out, lefts = await reduce(context, due, before, *known)
        if context.me != liar:
            return reduction, left_out, lefts
        codec, shard = context.reduction_codec, due.shard
        elements = shard.stop - shard.start
        mean = wire.decode(codec, reduction.payload.raw, elements, exact=shard.exact)
        values = lie(mean, first.setdefault((due.key.fragment, due.key.shard), mean))
        payload = wire.Payload.of(wire.encode(codec, values, exact=shard.exact))
        said_by = by or reduction.header.reducer
        header = replace(reduction.header, hash=payload.hash, reducer=said_by)
        if ghost:
            named, roots = (*header.contributors, ghost), (*header.roots, header.roots[0])
            header = replace(header, contributors=named, roots=roots, factors=(), weights=())
        if leaving is not None and left_out is not None:
            said = leaving([] if before is None else [before], mean + left_out - values)
            left_out, encoded = said[-1], (wire.encode(LEFT_CODEC, each) for each in said)
            leaves = context.leaves(shard)
            lefts = [wire.Commitment(LEFT_CODEC, leaves, each, 0) for each in encoded]
            header = replace(header, lefts=tuple(each.root for each in lefts))
        return wire.Reduction(header, payload), left_out, lefts

    with patch.object(reducer, "reduce", answer):
        yield


def only_itself(due: DueMean, me: str) -> DueMean:
    """Its own contribution is all that counts, and nobody joins."""
    own = slice(due.contributors.index(me), due.contributors.index(me) + 1)
    return replace(
        due,
        contributors=(me,),
        inputs=due.inputs[own],
        weights=due.weights[own],
        roots=due.roots[own],
        factors=(1.0,),
        last=me,
        joiners=(),
    )


def next_to_nothing(due: DueMean, _: str) -> DueMean:
    """All that is contributed is scaled to nothing, as if it were far too large."""
    return replace(due, factors=(1e-30,) * len(due.factors))


@contextmanager
def closing_falsely(liar: str, change: Callable[[DueMean, str], DueMean]) -> Iterator[None]:
    """As long as this lasts, the peer of this name closes its shards as `change` says, which is
    told its name."""
    honest = ReducedShards._compute

    def compute(self: ReducedShards, *args: Any) -> DueMean:
        due = honest(self, *args)
        return change(due, liar) if self._me == liar else due

    with patch.object(ReducedShards, "_compute", compute):
        yield


@contextmanager
def showing(liar: str, leaf: pb.CheckedLeaf, after_s: float = 0.0) -> Iterator[None]:
    """As long as this lasts, the peer of this name answers checks like this, so long after."""
    serve = Checks.serve

    async def answer(self: Checks, request: pb.CheckRequest, stream: Stream) -> None:
        if self._context.me != liar or request.hint:
            await serve(self, request, stream)
            return
        await asyncio.sleep(after_s)
        for _ in request.leaves:
            await stream.send(pb.ExchangeDown(leaf=leaf).SerializeToString())

    with patch.object(Checks, "serve", answer):
        yield


@contextmanager
def contributing(
    liar: str, factor: float, more: float = 1.0, *, own: bool = False, apart: bool = False
) -> Iterator[None]:
    """As long as this lasts, the peer of this name contributes so many times what it has learned,
    and announces `more` times its norm: less than once, of the whole alone. Args: own: to the
    shards that it reduces itself; apart: as much to each, as if all were in that, and it says so of
    every other first."""
    encode, ask, hear = Contributor._encode, Contributor._ask, Checks.heard

    def encoded(self: Contributor, begin: Any, shards: Any) -> Any:
        honest = raws, _, error, whole, norms = encode(self, begin, shards)
        if self._context.me != liar:
            return honest
        codec, orders = self._context.codec, self._context.orders(begin.fragment, begin.group)
        for place, (shard, order) in enumerate(zip(shards, orders, strict=True)):
            if not own or order[0] == liar:
                values = wire.decode(codec, raws[place], shard.stop - shard.start)
                times = factor * whole / max(1e-9, float(values.norm())) if apart else factor
                raws[place] = wire.encode(codec, times * values)
        return raws, [[]] * len(raws), error, more * whole, [max(1.0, more) * n for n in norms]

    def announcing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Contributor, round_: Any, part: Any, *args: Any) -> Any:
            if apart and self._context.me == liar:
                at, count = part.key.shard, len(round_.norms)
                round_ = replace(round_, norms=[round_.norm * (at == n) for n in range(count)])
            return method(self, round_, part, *args)

        return call

    async def asking(self: Contributor, round_: Any, part: Any, payload: Any, header: Any) -> Any:
        places = len(header.norms) if apart and self._context.me == liar else 0
        for place in range(places):
            up, stream = pb.ExchangeUp(header=header), self._peers.open(part.target, self._method)
            up.header.hash, up.header.norms[:] = place, [0.0] * places
            up.header.norms[place] = header.norm
            await stream.send(up.SerializeToString())
            await stream.done()
        return await ask(self, round_, part, payload, header)

    def heard(self: Checks, key: Any, peer: str, norms: Any) -> None:
        if self._context.me != liar:  # it does not name itself
            hear(self, key, peer, norms)

    said = {name: announcing(getattr(Contributor, name)) for name in ("_prepare", "_header")}
    lies = patch.multiple(Contributor, _encode=encoded, _ask=asking, **said)
    with lies, patch.object(Checks, "heard", heard):
        yield


@contextmanager
def giving(liar: str, **lies: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """As long as this lasts, the peer of this name gives its partners in pairs these changes of its
    own: of its `anchor`, its `contribution`, or both."""
    own, of_part = PairValues.own, {ANCHOR: "anchor", CONTRIBUTION: "contribution"}

    async def given(self: PairValues, fragment: int, part: int, values: Tensor, *args: Any) -> Any:
        lie = lies.get(of_part[part]) if self._context.me == liar else None
        return await own(self, fragment, part, lie(values) if lie else values, *args)

    with patch.object(PairValues, "own", given):
        yield


def attacks(liar: str) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """All that the peer of this name may do to means, each for as long as it lasts."""
    return {
        **{name: partial(reducing_falsely, liar, lie) for name, lie in LIES.items()},
        "counts only itself": partial(closing_falsely, liar, only_itself),
        "counts next to nothing": partial(closing_falsely, liar, next_to_nothing),
        "names a ghost": partial(reducing_falsely, liar, LIES["turned"], ghost="ghost"),
        "-4 times, to itself": partial(contributing, liar, -4.0, own=True),
        "contributes -2.9 times": partial(contributing, liar, -2.9, 2.9),
    }
