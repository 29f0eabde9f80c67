"""A member takes its time, again and again: rounds go on, and the others say who it is."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from murmuration.algorithms.plan import Plan
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.transport import Stream
from tests.protocol.problem import Problem
from tests.protocol.swarm import Peer, Swarm
from tests.protocol.virtual_time import run

PROBLEM = Problem(plan=Plan(inner_steps=5), steps=1_000_000)
ROUND_S = 0.55

Change = Callable[[Peer], None]


def contributes_late(peer: Peer) -> None:
    rounds: Any = peer.node._own_rounds
    honest = rounds.begin

    async def begin(*args: Any) -> None:
        await asyncio.sleep(15)
        await honest(*args)

    rounds.begin = begin


def _serving(change: Callable[[Callable[..., Awaitable[None]], Stream], Awaitable[None]]) -> Change:
    """It serves the streams of contributors as `change` does."""

    def made(peer: Peer) -> None:
        reducer: Any = peer.node._reducers[0]
        honest = reducer.serve

        async def serve(stream: Stream) -> None:
            await change(honest, stream)

        reducer.serve = serve
        peer.node.server.streams["Data/Exchange"] = serve

    return made


async def _late(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
    await asyncio.sleep(15)
    await honest(stream)


async def _never(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
    await asyncio.Event().wait()


async def _garbage(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
    await stream.receive()
    header = pb.ReductionHeader(contributors="abcd", codec=77, total_bytes=9)
    await stream.send(pb.ExchangeDown(header=header).SerializeToString())


async def _refusal(honest: Callable[..., Awaitable[None]], stream: Stream) -> None:
    await stream.receive()
    await stream.send(wire.refusal_to_message("pruned", "that is over"))


def contributes_nothing(peer: Peer) -> None:
    async def begin(*args: Any) -> None:
        """It says that it trains."""

    rounds: Any = peer.node._own_rounds
    rounds.begin = begin


def does_nothing(peer: Peer) -> None:
    contributes_nothing(peer)
    reduces_never(peer)


reduces_late, reduces_never, gives_garbage, refuses = map(
    _serving, (_late, _never, _garbage, _refusal)
)


LIES = {
    "contributes late": contributes_late,
    "contributes nothing": contributes_nothing,
    "reduces late": reduces_late,
    "reduces nothing": reduces_never,
    "answers garbage": gives_garbage,
    "refuses all": refuses,
    "does nothing": does_nothing,
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("others", ["ab", "abc"])
def test_whoever_is_late_again_and_again_is_named_and_not_waited_for(
    lie: Change, others: str
) -> None:
    async def scenario() -> None:
        async with Swarm(PROBLEM) as swarm:
            await swarm.start(*others, "d")
            honest = [swarm[name] for name in others]
            await swarm.until(lambda: min(swarm["a"].versions) >= 4, 60)
            lie(swarm["d"])
            await swarm.sleep(30)
            before = min(swarm["a"].versions)
            await swarm.sleep(30)
            assert min(swarm["a"].versions) >= before + 0.9 * 30 / ROUND_S
            for peer in honest:
                (told,) = (str(event["text"]) for event in peer.of_kind("warning"))
                assert told.startswith("d ")
                assert peer.of_kind("adopted") == peer.of_kind("round_failed") == []

    run(scenario())


def test_a_peer_that_paused_is_waited_for_again() -> None:
    """Its training stands still for half a minute, and goes on."""

    async def scenario() -> None:
        pace = dict(PROBLEM.step_s)
        async with Swarm(replace(PROBLEM, step_s=pace)) as swarm:
            await swarm.start(*"abcd")
            first = swarm["a"]
            await swarm.until(lambda: min(first.versions) >= 4, 60)
            pace["d"] = 30.0
            await swarm.until(lambda: "d" in first.node.gossip.view.cut_off, 60)
            pace["d"] = 0.1
            await swarm.until(lambda: "d" not in first.node.gossip.view.cut_off, 75)
            begun = len(first.of_kind("round"))
            await swarm.sleep(20)
            assert {event["contributors"] for event in first.of_kind("round")[begun:]} == {4}

    run(scenario())
