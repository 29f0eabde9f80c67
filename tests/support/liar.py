"""Members that mean harm: live peers with a method or two replaced, and all else as it was.

    python -m tests.support.liar "sign flip x100" murmur's arguments...
    python -m tests.support.liar "reduces 15 s late" murmur's arguments...

The rest of it is `murmur` itself, so that the others can tell it by what it does alone. It tells
LIES from the start. Of INSIDERS it is one when it gets SIGUSR1, and honest until then.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.cli import main
from murmuration.worker.exchange.allreduce.closing import DueMean
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.membership import Digest, Phase
from murmuration.worker.membership.evidence import Reachability
from murmuration.worker.node.node import Node
from murmuration.worker.training.mailbox import Begin
from murmuration.worker.transport import Stream
from tests.support import false_means

Change = Callable[[Node], None]
_for_good = ExitStack()
_NEARLY_LATE_S, _STANDSTILL_S = 3.0, 10.0

# ------------------------------------------------------------------------ what it contributes

Lie = Callable[[Tensor], Tensor]


def noise(values: Tensor) -> Tensor:
    """As large as may count: three times the others' norm, as far as this peer knows it."""
    drawn = torch.randn(values.shape)
    return drawn * (2.9 * values.norm() / drawn.norm())


def first_again() -> Lie:
    """Whatever it learned in its first round, for ever."""
    kept: dict[int, Tensor] = {}
    return lambda values: kept.setdefault(values.numel(), values.clone())


LIES: dict[str, Lie] = {
    "sign flip x100": lambda values: -100 * values,
    "1e15 everywhere": lambda values: torch.full_like(values, 1e15),
    "NaN": lambda values: torch.full_like(values, torch.nan),
    "sign flip within the limit": lambda values: -2.9 * values,
    "noise within the limit": noise,
    "its first round again and again": first_again(),
}


def contribute_instead(lie: Lie) -> None:
    """From now on this process contributes lies."""
    honest = Contributor.begin

    async def begin(self: Contributor, begin: Begin) -> None:
        await honest(self, replace(begin, values=lie(begin.values)))

    Contributor.begin = begin  # type: ignore[method-assign]


# -------------------------------------------------------------------------------- false states


def lie(
    node: Node,
    ahead: int,
    value: float | None = 3.0,
    *,
    momentum: float = 0.0,
    phase: Phase = Phase.DONE,
    odd: bool = False,
    gives: int = 0,
    group: tuple[str, ...] | None = None,
) -> None:
    """From now on the peer announces, confirms and gives this in place of its own state.

    Args:
        value: of its anchor; None for its own, and 2 % more; momentum: each value of it.
        odd: the hash that it announces is of another state.
        gives: how many versions the state that it gives differs from the announced one.
        group: that lays out the next round; None for the peer's own.
    """
    assert node.published is not None
    own = node.published.states[0]
    anchor = 1.02 * own.anchor if value is None else torch.full_like(own.anchor, value)
    moving = torch.full_like(own.momentum, momentum)
    group = own.group if group is None else group
    state = replace(
        own,
        group=group,
        version=own.version + ahead,
        contributors=4,
        anchor=anchor,
        momentum=moving,
        hash=wire.state_hash(anchor, moving, group),
    )
    step = node.published.step + 5 * ahead
    node._publish(replace(node.published, phase=phase, step=step, states=(state,)))
    if odd:
        node.gossip.update(digests=(Digest(state.version, 4, state.hash + 1),))
    node.published = replace(
        node.published, states=(replace(state, version=state.version + gives),)
    )
    node._publish = lambda published: None  # type: ignore[method-assign]


def hangs_then_lies(node: Node) -> None:
    """It hangs its shards, and when rounds have stood still it is three rounds ahead of all."""
    reduces_never(node)

    def announce() -> None:
        assert node.published is not None
        furthest = max(digest.version for m in node.gossip.members for digest in m.digests)
        lie(node, furthest + 3 - node.published.states[0].version)

    asyncio.get_running_loop().call_later(_STANDSTILL_S, announce)


def late_to_one_then_near(node: Node, other: str) -> None:
    """It answers one peer as late as it may, and is then ahead of all, with a state like theirs."""
    (reducer,), loop = node._reducers, asyncio.get_running_loop()
    honest = reducer._answer

    def answer(offer: Any, given: Any) -> None:
        loop.call_later(_NEARLY_LATE_S * (offer.header.sender == other), honest, offer, given)

    reducer._answer = answer  # type: ignore[method-assign]
    loop.call_later(_STANDSTILL_S, partial(lie, node, 8, None))


def ends_and_names(node: Node, other: str) -> None:
    """It has ended, and says that it does not reach this one."""

    class Names(Reachability):
        unreachable = (other,)  # type: ignore[assignment]

    publish = node._publish
    node._publish = lambda p: publish(replace(p, phase=Phase.DONE))  # type: ignore[method-assign]
    node.gossip.rules._reach = Names(1.0)


# ------------------------------------------------------------------------------------ its time


def contributes_late(node: Node, late_s: float) -> None:
    rounds: Any = node._own_rounds
    honest = rounds.begin

    async def begin(*args: Any) -> None:
        await asyncio.sleep(late_s)
        await honest(*args)

    rounds.begin = begin


def contributes_nothing(node: Node) -> None:
    async def begin(*args: Any) -> None:
        """It says that it trains."""

    rounds: Any = node._own_rounds
    rounds.begin = begin


def _serving(change: Callable[[Callable[..., Awaitable[None]], Stream], Awaitable[None]]) -> Change:
    """It serves the streams of contributors as `change` does."""

    def made(node: Node) -> None:
        reducer: Any = node._reducers[0]
        honest = reducer.serve

        async def serve(stream: Stream) -> None:
            await change(honest, stream)

        reducer.serve = serve
        node.server.streams["Data/Exchange"] = serve

    return made


def reduces_late(node: Node, late_s: float) -> None:
    async def late(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
        await asyncio.sleep(late_s)
        await honest(stream)

    _serving(late)(node)


async def _never(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
    await asyncio.Event().wait()


async def _garbage(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
    await stream.receive()
    header = pb.ReductionHeader(contributors="abcd", codec=77, total_bytes=9)
    await stream.send(pb.ExchangeDown(header=header).SerializeToString())


async def _refusal(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
    await stream.receive()
    refusal = wire.refusal("pruned", "that is over")
    await stream.send(pb.ExchangeDown(refusal=refusal).SerializeToString())


reduces_never, gives_garbage, refuses = map(_serving, (_never, _garbage, _refusal))


def does_nothing(node: Node) -> None:
    contributes_nothing(node)
    reduces_never(node)


def answers_no_lease(node: Node) -> None:
    async def never(*_: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    node.server.calls["Control/Lease"] = never


# ------------------------------------------------------------------------- what it reduces


def reduces_falsely(node: Node, kind: str) -> None:
    _for_good.enter_context(false_means.reducing_falsely(node.context.me, false_means.LIES[kind]))


def closes(node: Node, change: Callable[[DueMean, str], DueMean]) -> None:
    _for_good.enter_context(false_means.closing_falsely(node.context.me, change))


def counts_itself_turned(node: Node) -> None:
    """Its shards are what it contributes, which is turned and as large as may count."""
    closes(node, false_means.only_itself)
    contribute_instead(LIES["sign flip within the limit"])


def names_a_ghost(node: Node) -> None:
    """Nobody can show what the ghost contributed, so no mean with it can be computed again."""
    lie = false_means.LIES["turned"]
    _for_good.enter_context(false_means.reducing_falsely(node.context.me, lie, ghost="ghost"))


def with_ghosts(due: DueMean, _: str) -> DueMean:
    """As many joiners as are taken."""
    ghosts = tuple(f"ghost {n}" for n in range(4))
    return replace(due, joiners=ghosts if due.key.round % 4 == due.key.shard else ())


def gives_other_bytes(node: Node) -> None:
    """Each answer of this reducer is another mean."""
    (reducer,) = node._reducers
    context, give, times = node.context, reducer._give, count()

    async def other(reduction: wire.Reduction, offset: int, stream: Stream) -> None:
        codec, raw = context.reduction_codec, reduction.payload.raw
        values = wire.decode(codec, raw, len(raw) // 4) + 1e-3 * next(times)
        payload = wire.Payload.of(wire.encode(codec, values))
        header = reduction.header.__class__(**{**vars(reduction.header), "hash": payload.hash})
        await give(wire.Reduction(header, payload), offset, stream)

    reducer._give = other  # type: ignore[method-assign]


# ------------------------------------------------------------------------------ as a program

LATE: dict[str, Change] = {
    "contributes 15 s late": partial(contributes_late, late_s=15.0),
    "contributes 4.5 s late": partial(contributes_late, late_s=4.5),
    "contributes nothing": contributes_nothing,
    "reduces 15 s late": partial(reduces_late, late_s=15.0),
    "reduces 7 s late": partial(reduces_late, late_s=7.0),
    "reduces 4.5 s late": partial(reduces_late, late_s=4.5),
    "reduces nothing": reduces_never,
    "answers garbage": gives_garbage,
    "refuses all": refuses,
    "does nothing": does_nothing,
}
INSIDERS: dict[str, Change] = {
    "leaves": lambda node: signal.raise_signal(signal.SIGTERM),
    "goes on: all are honest": lambda node: None,
    "hangs a shard, then a state of 3.0": hangs_then_lies,
    "two with one state of 3.0, done": partial(lie, ahead=12),
    "late to one, then a near state": partial(late_to_one_then_near, other="w1"),
    "momentum of 1e8": partial(lie, ahead=12, value=None, momentum=1e8),
    "means of 1e4": partial(reduces_falsely, kind="1e4"),
    "means times -20": partial(reduces_falsely, kind="-20 times"),
    "its first mean again": partial(reduces_falsely, kind="stale"),
    "means of 0": partial(reduces_falsely, kind="zero"),
    "counts only itself": partial(closes, change=false_means.only_itself),
    "counts itself, and turns it": counts_itself_turned,
    "scales all to nothing": partial(closes, change=false_means.next_to_nothing),
    "names a ghost as contributor": names_a_ghost,
    "names four ghosts as joiners": partial(closes, change=with_ghosts),
    **LATE,
    "other bytes to each peer": gives_other_bytes,
    "two that ended: w1 is not reached": partial(ends_and_names, other="w1"),
    "answers no lease": answers_no_lease,
}


def change_when_told(change: Change) -> None:
    """The node of this process, once it gets SIGUSR1."""
    honest = Node.listen

    async def listen(node: Node) -> str:
        loop = asyncio.get_running_loop()
        told.append(lambda: loop.call_soon_threadsafe(change, node))
        return await honest(node)

    told: list[Callable[[], object]] = []
    signal.signal(signal.SIGUSR1, lambda *_: [each() for each in told])
    Node.listen = listen  # type: ignore[method-assign]


if __name__ == "__main__":
    if (name := sys.argv.pop(1)) in LIES:
        contribute_instead(LIES[name])
    else:
        change_when_told(INSIDERS[name])
    main()
