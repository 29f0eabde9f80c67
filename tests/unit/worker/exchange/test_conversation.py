"""One stream of a round by hand: a peer that has given the round up says nothing else any more."""

import asyncio
from collections.abc import Callable

import torch

from algorithms.codecs import codec_by_name
from algorithms.plan import Plan
from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.compression import Compression
from worker.exchange.context import Context, Tasks
from worker.exchange.pairwise.buffer import ANCHOR, CONTRIBUTION, PairBuffer
from worker.exchange.pairwise.round import Event, PairRound
from worker.exchange.pairwise.stream import PairStream
from worker.exchange.types import ExchangeConfig, RoundConfig, View

ELEMENTS = 100


async def inline(work: Callable[[], object]) -> object:
    return work()


class Rounds:
    """Around one table, without a machine."""

    def __init__(self) -> None:
        self.tasks = Tasks()
        self.context = Context(
            me="a",
            run=77,
            elements=[ELEMENTS],
            plan=Plan(),
            compression=Compression(ExchangeConfig()),
            config=RoundConfig(),
            detection_s=6.0,
            clock=lambda: 0.0,
            offload=inline,
            log=lambda _: None,
        )

    def step(self, table: PairBuffer, event: Event) -> None:
        pass

    def busy(self) -> bool:
        return False

    async def changed(self) -> None:
        await asyncio.sleep(0)


class Silent:
    """A stream to a partner that says nothing. `at_last` is called within the last frame."""

    def __init__(self, at_last: Callable[[], None]) -> None:
        self.sent: list[str] = []
        self.heard = asyncio.Event()
        self._at_last = at_last

    async def send(self, message: bytes) -> None:
        self.sent.append(str(pb.MeetMessage.FromString(message).WhichOneof("body")))
        if self.sent.count("frame") == 2:
            self._at_last()
            await asyncio.sleep(0)

    async def done(self) -> None:
        self.heard.set()

    async def receive(self) -> bytes | None:
        await self.heard.wait()
        return None

    def cancel(self) -> None:
        pass


def table_of() -> PairBuffer:
    payload = wire.Payload.of(wire.encode(codec_by_name("fp32"), torch.ones(ELEMENTS)))
    table = PairBuffer(0, 7, ("a", "b"), {ANCHOR: payload, CONTRIBUTION: payload})
    table.meeting = PairRound(
        "a",
        table.group,
        View(),
        RoundConfig(),
        fragment=0,
        round_=7,
        began_at=0.0,
        payload_bytes=0,
    )
    return table


def said(failed: str) -> list[str]:
    """What `a` says, which gets to hold everything, or fails as well, while its last frame goes
    out."""

    async def hold() -> list[str]:
        table, rounds = table_of(), Rounds()

        def at_last() -> None:
            table.complete, table.failed = True, failed

        stream = Silent(at_last)
        conversation = PairStream(rounds, table, "b", stream)
        holding = asyncio.ensure_future(conversation.hold(pb.MeetHeader()))
        await stream.heard.wait()
        await asyncio.gather(holding, return_exceptions=True)
        await rounds.tasks.close()
        return stream.sent

    return asyncio.run(hold())


def test_a_peer_that_holds_everything_says_so() -> None:
    assert said(failed="") == ["part", "frame", "part", "frame", "staged"]


def test_a_peer_that_has_given_up_does_not_say_that_it_holds_everything() -> None:
    """Its partner would count on it, and apply the round."""
    assert said(failed="too late") == ["part", "frame", "part", "frame", "refusal"]
