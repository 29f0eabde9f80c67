"""One `Reducer` served over the memory transport, and contributions to it made by hand."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from murmuration.algorithms.codecs import codec_by_name
from murmuration.algorithms.plan import Plan
from murmuration.algorithms.reducers import reducer_orders
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.allreduce.reducer import Reducer
from murmuration.worker.exchange.measured import Arrivals, Compression, ExchangeConfig
from murmuration.worker.exchange.round_context import Context, RoundConfig
from murmuration.worker.exchange.view import ShardKey
from murmuration.worker.transport import Caller, Stream
from tests.protocol.swarm import inline
from tests.protocol.views import view
from tests.support.frames import frames
from tests.support.memory_transport import MemoryNetwork, MemoryTransport

RUN = 77
GROUP = ("a", "b", "r")
ELEMENTS = 3_000
SHARD = next(k for k, order in enumerate(reducer_orders(RUN, 0, GROUP)) if order[0] == "r")
KEY = ShardKey(0, 0, SHARD)
VALUES = {"a": 1.0, "b": 2.0, "r": 6.0}
NORM = 6.0 * ELEMENTS**0.5  # that each announces


@dataclass
class Bench:
    """A reducer `r` at version 0 of one fragment, in a swarm of a, b and r."""

    reducer: Reducer
    events: list[dict[str, object]]
    network: MemoryNetwork = field(default_factory=MemoryNetwork)

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        raise AssertionError("no calls here")

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        await self.reducer.serve(stream)

    async def open(self, name: str) -> Stream:
        return MemoryTransport(self.network, name).open("r", "Data/Exchange")

    async def send(self, messages: Iterable[bytes], name: str = "a") -> list[pb.ExchangeDown]:
        """All that comes back for one stream."""
        stream = await self.open(name)
        for message in messages:
            await stream.send(message)
        await stream.done()
        return await received(stream)

    async def refused(self, messages: Iterable[bytes]) -> pb.Refusal:
        """The refusal that these messages must meet, at once."""
        async with asyncio.timeout(1):
            (answer,) = await self.send(messages)
        assert answer.WhichOneof("body") == "refusal", answer
        return answer.refusal

    def contributes_itself(self) -> asyncio.Task[object]:
        """The reducer's own peer does."""
        opening, payload = header("r"), wire.Payload.of(encoded("r"))
        return asyncio.create_task(self.reducer.contribute(opening, opening.norm, payload))

    async def close_round(self) -> None:
        """Valid contributions of all three give their mean, untouched by what was before."""
        own = self.contributes_itself()
        answers = await asyncio.gather(
            self.send(contribution("a"), "a"), self.send(contribution("b"), "b")
        )
        await own
        for first, *rest in answers:
            assert list(first.header.contributors) == ["a", "b", "r"]
            raw = b"".join(answer.frame.payload for answer in rest)
            assert np.array_equal(np.frombuffer(raw, "<f4"), np.full(1_000, 3.0, "<f4"))


async def received(stream: Stream) -> list[pb.ExchangeDown]:
    answers = []
    while (raw := await stream.receive()) is not None:
        answers.append(pb.ExchangeDown.FromString(raw))
    return answers


async def bench() -> Bench:
    events: list[dict[str, object]] = []
    context = Context(
        me="r",
        run=RUN,
        elements=[ELEMENTS],
        plan=Plan(),
        compression=Compression(ExchangeConfig(compression="never")),
        arrivals=Arrivals(asyncio.get_running_loop().time),
        config=RoundConfig(),
        detection_s=6.0,
        clock=asyncio.get_running_loop().time,
        offload=inline,
        log=events.append,
    )
    made = Bench(Reducer(context), events)
    made.reducer.on_view(view("abr"))
    made.reducer.advanced(0, 0, GROUP)
    await MemoryTransport(made.network, "r").listen(made)
    return made


def encoded(peer: str, value: float | None = None) -> memoryview:
    values = np.full(1_000, VALUES[peer] if value is None else value, "<f4")
    return memoryview(bytearray(values.tobytes()))


def header(peer: str = "a", **changes: object) -> pb.ContributionHeader:
    payload = encoded(peer)
    fields: dict[str, object] = {
        "run": RUN,
        "fragment": 0,
        "round": 0,
        "shard": SHARD,
        "sender": peer,
        "group": wire.group_hash(GROUP),
        "codec": codec_by_name("fp32").wire_id,
        "elements": 1_000,
        "total_bytes": len(payload),
        "hash": wire.hash64(payload),
        "norm": NORM,
        "root": root(payload),
    }
    return pb.ContributionHeader(**{**fields, **changes})


def root(payload: memoryview, weight: int = 1) -> bytes:
    """What a contributor of this payload commits itself to."""
    codec = codec_by_name("fp32")
    return wire.Commitment(codec, wire.Leaves.of(1_000, [codec]), payload, weight).root


def up(message: pb.ContributionHeader | pb.Frame) -> bytes:
    if isinstance(message, pb.Frame):
        return pb.ExchangeUp(frame=message).SerializeToString()
    return pb.ExchangeUp(header=message).SerializeToString()


def contribution(
    peer: str = "a", payload: memoryview | None = None, **changes: object
) -> list[bytes]:
    """A header and its frames; `changes` are to the header."""
    payload = encoded(peer) if payload is None else payload
    changes = {"hash": wire.hash64(payload), "root": root(payload), **changes}
    return [up(header(peer, **changes)), *(up(frame) for frame in frames([payload]))]
