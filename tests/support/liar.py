"""Members that mean harm: live peers with a method or two replaced, and all else as it was.

    python -m tests.support.liar "reduces 15 s late" murmur's arguments...

The rest of it is `murmur` itself, so that the others can tell it by what it does alone. It is one
of INSIDERS when it gets SIGUSR1, and honest until then.
"""

import asyncio
import datetime
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from grpc.aio import _utils as grpc_deadlines
from torch import Tensor

from murmuration.algorithms.fragment_state import FragmentState
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.cli import main
from murmuration.worker.exchange.allreduce.closing import DueMean
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.identity import authority, certificates
from murmuration.worker.leases.ledger import Block, LeaseNews
from murmuration.worker.membership import Digest, Phase
from murmuration.worker.membership.evidence import IdlePeers, Reachability
from murmuration.worker.node.node import Node
from murmuration.worker.pipeline.stage_call import StageCall, StageReply
from murmuration.worker.training.mailbox import Begin
from murmuration.worker.transport import Stream
from tests.support import false_means

Change = Callable[[Node], None]
_for_good = ExitStack()
_NEARLY_LATE_S, _STANDSTILL_S = 3.0, 10.0
_CLOCK_BACK_S, _SHIFTED = 25 * 3600.0, "MURMUR_TESTS_CLOCK_IS_BACK"

Lie = Callable[[Tensor], Tensor]


def turned(values: Tensor) -> Tensor:
    """As large as may count: three times the others' norm, as far as this peer knows it."""
    return -2.9 * values


def contribute_instead(lie: Lie) -> None:
    """From now on this process contributes lies."""
    honest = Contributor.begin

    async def begin(self: Contributor, begin: Begin) -> None:
        await honest(self, replace(begin, values=lie(begin.values)))

    Contributor.begin = begin  # type: ignore[method-assign]


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
    """From now on the peer announces, confirms and gives this in place of its own state. Args:
    value: of its anchor; None for its own, and 2 % more; momentum: each value of it; odd: the hash
    that it announces is of another state; gives: how many versions the state that it gives differs
    from the announced one; group: that lays out the next round; None for the peer's own."""
    assert node.published is not None

    def false(own: FragmentState) -> FragmentState:
        anchor = 1.02 * own.anchor if value is None else torch.full_like(own.anchor, value)
        moving = torch.full_like(own.momentum, momentum)
        by = own.group if group is None else group
        hashed, version = wire.state_hash(anchor, moving, by), own.version + ahead
        known = {"group": by, "version": version, "contributors": 4, "hash": hashed}
        return replace(own, anchor=anchor, momentum=moving, **known)

    states, step = tuple(map(false, node.published.states)), node.published.step + 5 * ahead
    node._publish(replace(node.published, phase=phase, step=step, states=states))
    if odd:
        node.gossip.update(digests=tuple(Digest(s.version, 4, s.hash + 1) for s in states))
    given = tuple(replace(state, version=state.version + gives) for state in states)
    node.published = replace(node.published, states=given)
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


def _begins(rounds: Any, change: Callable[..., Awaitable[None]]) -> None:
    """Rounds begin as `change` begins them, which is given the honest way."""
    rounds.begin = partial(change, rounds.begin)


def lies_at_the_end(node: Node, change: Lie) -> None:
    async def begin(honest: Any, begin: Begin) -> None:
        await honest(replace(begin, values=change(begin.values)) if begin.everyone else begin)

    _begins(node._final, begin)


def says_it_is_fast(node: Node) -> None:
    """A thousand times as fast as it is."""
    publish = node._publish
    node._publish = lambda p: publish(replace(p, step_s=p.step_s / 1e3))  # type: ignore[method-assign]


def ends_and_names(node: Node, other: str) -> None:
    """It has ended, and says that it does not reach this one."""

    class Names(Reachability):
        unreachable = (other,)  # type: ignore[assignment]

    publish = node._publish
    node._publish = lambda p: publish(replace(p, phase=Phase.DONE))  # type: ignore[method-assign]
    node.gossip.rules._reach = Names(1.0)


def trickles(node: Node) -> None:
    """It sends 64 bytes a second of what it contributes, and of what it answers."""

    async def slowly(kind: Any, payload: wire.Payload, offset: int, stream: Stream) -> None:
        for message, _ in wire.frame_messages(kind, [payload.raw], offset, 64):
            await asyncio.sleep(1)
            await stream.send(message)

    async def give(reduction: wire.Reduction, offset: int, stream: Stream) -> None:
        await stream.send(wire.reduction_to_message(reduction.header))
        await slowly(pb.ExchangeDown, reduction.payload, offset, stream)

    async def send(
        _round: Any, _peer: str, payload: wire.Payload, stream: Stream, offset: int = 0
    ) -> None:
        await slowly(pb.ExchangeUp, payload, offset, stream)

    rounds: Any = node._own_rounds
    (reducer,) = node._reducers
    rounds._send, reducer._give = send, give  # type: ignore[method-assign]


def begins_again(node: Node) -> None:
    """Each second it says that it was started again, and ends what it was doing for others."""
    rules = node.gossip.rules
    rules._put(replace(rules.me, start_ms=rules.me.start_ms + 1, incarnation=0, heartbeat=0))
    node.gossip.update()
    for caller in [*node.server._open]:
        node.server.end_streams_of(caller)
    for fragment in range(len(node.context.elements)):
        node.give_up(fragment, "it begins again")
    asyncio.get_running_loop().call_later(1.0, begins_again, node)


def takes_words_back(node: Node, kind: type, word: str, each_s: float = 0.4) -> None:
    """Each so many seconds it names another, by the words that `kind` gives."""
    loop, others = asyncio.get_running_loop(), [member.peer for member in node.gossip.others]
    named = property(lambda _: (others[int(loop.time() / each_s) % len(others)],))
    made = type("Flips", (kind,), {word: named})(1.0)
    setattr(node.gossip.rules, "_reach" if kind is Reachability else "_idle", made)


def takes_its_phase_back(node: Node) -> None:
    """It contributes nothing, and says each 2.5 s that it has ended, or that it trains."""
    contributes_nothing(node)
    publish, loop = node._publish, asyncio.get_running_loop()

    def again() -> None:
        node._publish(node.published)  # type: ignore[arg-type]
        loop.call_later(0.5, again)

    phases = Phase.TRAINING, Phase.DONE
    node._publish = lambda p: publish(replace(p, phase=phases[int(loop.time() / 2.5) % 2]))  # type: ignore[method-assign]
    again()


def clock_goes_back(_: object = None) -> None:
    wall, wall_ns = time.time, time.time_ns

    class Date(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Date":
            return super().now(tz) - datetime.timedelta(seconds=_CLOCK_BACK_S)

    time.time = lambda: wall() - _CLOCK_BACK_S
    time.time_ns = lambda: wall_ns() - int(_CLOCK_BACK_S * 1e9)
    shifted: Any = SimpleNamespace(**{**vars(datetime), "datetime": Date})
    certificates.datetime = authority.datetime = shifted
    deadlines: Any = grpc_deadlines  # the clock of gRPC's core is not set back with them
    deadlines.time = SimpleNamespace(time=wall)


def restarts_with_its_clock_back(_: Node) -> None:
    """At once, as after a power cut."""
    os.environ[_SHIFTED] = "1"
    again = ("-m", "tests.support.liar", "goes on: all are honest", *sys.argv[1:])
    os.execv(sys.executable, [sys.executable, *again])


def contributes_late(node: Node, late_s: float) -> None:
    async def begin(honest: Any, *args: Any) -> None:
        await asyncio.sleep(late_s)
        await honest(*args)

    _begins(node._own_rounds, begin)


def contributes_nothing(node: Node) -> None:
    async def begin(*_: Any) -> None:
        """It says that it trains."""

    _begins(node._own_rounds, begin)


def _serves(node: Node, change: Callable[[Any, Stream], Awaitable[None]]) -> None:
    """It serves the streams of contributors as `change` does."""
    reducer: Any = node._reducers[0]
    reducer.serve = node.server.streams["Data/Exchange"] = partial(change, reducer.serve)


def reduces_late(node: Node, late_s: float) -> None:
    async def late(honest: Any, stream: Stream) -> None:
        await asyncio.sleep(late_s)
        await honest(stream)

    _serves(node, late)


async def _never(honest: Any, stream: Stream) -> None:
    await asyncio.Event().wait()


async def _garbage(honest: Any, stream: Stream) -> None:
    await stream.receive()
    header = pb.ReductionHeader(contributors="abcd", codec=77, total_bytes=9)
    await stream.send(pb.ExchangeDown(header=header).SerializeToString())


async def _refusal(honest: Any, stream: Stream) -> None:
    await stream.receive()
    refusal = wire.refusal("pruned", "that is over")
    await stream.send(pb.ExchangeDown(refusal=refusal).SerializeToString())


reduces_never, gives_garbage, refuses = (
    partial(_serves, change=change) for change in (_never, _garbage, _refusal)
)


def does_nothing(node: Node) -> None:
    contributes_nothing(node)
    reduces_never(node)


def answers_no_lease(node: Node) -> None:
    async def never(*_: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    node.server.calls["Control/Lease"] = never


def lies_of_leases(node: Node) -> None:
    """It has used more of all blocks than they have, and holds one that no number can follow."""
    table: Any = node.leases._table
    honest = table._news

    def news(*given: Any) -> LeaseNews:
        mine, *others = (said := honest(*given)).holdings
        mine = replace(mine, held=tuple(Block(each, 2**64 - 1) for each in said.done))
        used = {Block(each, n): 10**9 for each in said.done for n in range(1000)}
        return LeaseNews((mine, *others), said.done, used)

    table._news = news


def reduces_falsely(node: Node, lie: false_means.Lie) -> None:
    _for_good.enter_context(false_means.reducing_falsely(node.context.me, lie))


def closes(node: Node, change: Callable[[DueMean, str], DueMean]) -> None:
    _for_good.enter_context(false_means.closing_falsely(node.context.me, change))


def contributes(node: Node, **how: Any) -> None:
    _for_good.enter_context(false_means.contributing(node.context.me, **how))


def gives(node: Node, **lies: Lie) -> None:
    _for_good.enter_context(false_means.giving(node.context.me, **lies))


def hides_false_means(node: Node) -> None:
    """Its means are turned, and what it contributed to them it shows no more when it is asked."""
    reduces_falsely(node, false_means.LIES["turned"])
    hiding = false_means.showing(node.context.me, pb.CheckedLeaf(), after_s=1.0)
    _for_good.enter_context(hiding)


def counts_itself_turned(node: Node) -> None:
    """Its shards are what it contributes, which is turned and as large as may count."""
    closes(node, false_means.only_itself)
    contribute_instead(turned)


def names_a_ghost(node: Node) -> None:
    """Nobody can show what the ghost contributed, so no mean with it can be computed again."""
    lie = false_means.LIES["turned"]
    _for_good.enter_context(false_means.reducing_falsely(node.context.me, lie, ghost="ghost"))


def with_ghosts(due: DueMean, _: str, number: int = 4) -> DueMean:
    ghosts = tuple(f"ghost {n}" for n in range(number))
    return replace(due, joiners=ghosts if due.key.round % 4 == due.key.shard else ())


def gives_otherwise(node: Node, change: Callable[[memoryview, int], Any]) -> None:
    """The bytes of each answer of this reducer are changed, by how many were before; what it takes
    itself is not."""
    (reducer,) = node._reducers
    give, times = reducer._give, count()

    async def other(reduction: wire.Reduction, offset: int, stream: Stream) -> None:
        payload = wire.Payload.of(memoryview(change(reduction.payload.raw, next(times))).cast("B"))
        await give(
            wire.Reduction(replace(reduction.header, hash=payload.hash), payload), offset, stream
        )

    reducer._give = other  # type: ignore[method-assign]


def gives_other_bytes(node: Node) -> None:
    """Each answer of this reducer is another mean."""
    gives_otherwise(
        node, lambda raw, times: (torch.frombuffer(raw, dtype=torch.float) + 1e-3 * times).numpy()
    )


def revokes_falsely(node: Node, number: int = 40_000) -> None:
    """So many entries that the authority has not signed are in each of its answers."""
    expulsions: Any = node._expulsions
    false = [pb.Revocation(subject="peer/w0", signature=bytes(64))] * number
    expulsions.hash, expulsions.part = 1, lambda: false


def _forwards(node: Node, change: Callable[..., Awaitable[StageReply]]) -> None:
    """It makes its calls to other stages as `change` does, which is given the honest way."""
    assert node.stages is not None
    forwarder: Any = node.stages._forwarder
    forwarder._call = partial(change, forwarder._call)


def calls_with(node: Node, shape: tuple[int, int, int]) -> None:
    """It sends values of that shape on to other stages, or to an origin for the loss, and answers
    its own callers with what it was sent."""

    async def call(honest: Any, peer: str, call: StageCall, values: memoryview) -> StageReply:
        false = memoryview(bytes(4 * math.prod(shape)))
        try:
            reply: StageReply = await honest(peer, replace(call, shape=shape), false)
        except wire.WireError:
            return StageReply(values, (peer,))
        return reply

    _forwards(node, call)


def holds_microbatches(node: Node) -> None:
    """It takes them, and gives none back."""

    async def never(*_: object) -> StageReply:
        await asyncio.Event().wait()
        raise AssertionError

    _forwards(node, never)


def late_in_stages(node: Node, late_s: float) -> None:
    """It is late by so much with each microbatch that it hands on."""

    async def call(honest: Any, *args: Any) -> StageReply:
        await asyncio.sleep(late_s)
        reply: StageReply = await honest(*args)
        return reply

    _forwards(node, call)


def contributes_once(value: float) -> Change:
    """Once it contributes this in one place."""

    def change(_: Node) -> None:
        values = [value]

        def lie(honest: Tensor) -> Tensor:
            honest = honest.clone()
            honest.view(-1)[3] += values.pop() if values else 0.0
            return honest

        contribute_instead(lie)

    return change


LATE: dict[str, Change] = {
    **{f"contributes {s:g} s late": partial(contributes_late, late_s=s) for s in (15, 7, 4.5)},
    "contributes nothing": contributes_nothing,
    **{f"reduces {s:g} s late": partial(reduces_late, late_s=s) for s in (15, 7, 4.5)},
    "reduces nothing": reduces_never,
    "answers garbage": gives_garbage,
    "refuses all": refuses,
    "does nothing": does_nothing,
    "trickles": trickles,
    "begins again each second": begins_again,
    "flips whom it reaches": partial(takes_words_back, kind=Reachability, word="unreachable"),
    "flips whom it waits for": partial(takes_words_back, kind=IdlePeers, word="peers"),
    "the same, each 2.5 s": partial(takes_words_back, kind=IdlePeers, word="peers", each_s=2.5),
    "flips its phase": takes_its_phase_back,
}
# Whoever is one of these is honest, and is to contribute in the end.
HONEST: dict[str, Change] = {
    "goes on: all are honest": lambda node: None,
    "its clock is set back by 25 h": clock_goes_back,
    "a restart with its clock back by 25 h": restarts_with_its_clock_back,
}
INSIDERS: dict[str, Change] = {
    "leaves": lambda node: signal.raise_signal(signal.SIGTERM),
    **HONEST,
    "hangs a shard, then a state of 3.0": hangs_then_lies,
    "two with one state of 3.0, done": partial(lie, ahead=12),
    "late to one, then a near state": partial(late_to_one_then_near, other="w1"),
    "momentum of 1e8": partial(lie, ahead=12, value=None, momentum=1e8),
    "means of 1e4": partial(reduces_falsely, lie=false_means.LIES["1e4"]),
    "means times -20": partial(reduces_falsely, lie=false_means.LIES["-20 times"]),
    "its first mean again": partial(reduces_falsely, lie=false_means.LIES["stale"]),
    "means of 0": partial(reduces_falsely, lie=false_means.LIES["zero"]),
    "means that are turned, and hidden": hides_false_means,
    "contributes what it learned times -2.9": lambda _: contribute_instead(turned),
    "the same, to trimmed means": lambda _: contribute_instead(turned),
    "contributes more than it announces": partial(contributes, factor=-3.5, more=1.45),
    "each shard is said to be all of it": partial(contributes, factor=-1.4, more=1.45, apart=True),
    "-4 times, to its own shard": partial(contributes, factor=-4.0, own=True),
    "means of NaN": partial(gives_otherwise, change=lambda raw, _: b"\xff" * len(raw)),
    "counts only itself": partial(closes, change=false_means.only_itself),
    "counts itself, and turns it": counts_itself_turned,
    "scales all to nothing": partial(closes, change=false_means.next_to_nothing),
    "names a ghost as contributor": names_a_ghost,
    "names four ghosts as joiners": partial(closes, change=with_ghosts),
    "names 20,000 joiners": partial(closes, change=partial(with_ghosts, number=20_000)),
    **LATE,
    "other bytes to each peer": gives_other_bytes,
    "two that ended: w1 is not reached": partial(ends_and_names, other="w1"),
    "answers no lease": answers_no_lease,
    "lies of what it has leased": lies_of_leases,
    "answers 40,000 false revocations": revokes_falsely,
    "in pairs: contributions of 1e4": partial(
        gives, contribution=partial(torch.full_like, fill_value=1e4)
    ),
    "in pairs: contributions times -20": partial(gives, contribution=lambda own: -20 * own),
    "in pairs: anchors of 3.0": partial(gives, anchor=lambda own: own * 0 + 3.0),
    "kseed: contributes 1e6 once": contributes_once(1e6),
    "stages: calls of another width": partial(calls_with, shape=(2, 32, 48)),
    "stages: calls of another length": partial(calls_with, shape=(2, 48, 32)),
    "stages: holds microbatches": holds_microbatches,
    "stages: losses of another width": partial(calls_with, shape=(2, 32, 48)),
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
    if os.environ.get(_SHIFTED):
        clock_goes_back()
    change_when_told(INSIDERS[sys.argv.pop(1)])
    main()
