"""What a reducer refuses, with what and where, and that nothing of it stays behind.

One `Reducer` is served over the memory transport, and everything it gets is made by hand.
"""

import asyncio
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from algorithms.codecs import codec_by_name
from algorithms.plan import Plan
from algorithms.rendezvous import reducer_orders
from protos import murmuration_pb2 as pb
from tests.protocol.swarm import inline
from tests.protocol.views import view
from tests.protocol.virtual_time import Stalled, run
from tests.support.frames import frames
from worker import wire
from worker.exchange import Compression, Context, ExchangeConfig, Reducer
from worker.rounds import RoundConfig
from worker.transport import Stream
from worker.transport.memory import MemoryNetwork, MemoryTransport

RUN = 77
GROUP = ("a", "b", "r")
ELEMENTS = 3_000
SHARD = next(k for k, order in enumerate(reducer_orders(RUN, 0, GROUP)) if order[0] == "r")
NOT_MINE = next(k for k, order in enumerate(reducer_orders(RUN, 0, GROUP)) if order[0] == "a")
VALUES = {"a": 1.0, "b": 2.0, "r": 6.0}
INVALID = pb.RefusalCode.REFUSAL_INVALID
AGAIN = pb.RefusalCode.REFUSAL_AGAIN  # damaged on the way: sending it again helps


@dataclass
class Bench:
    """A reducer `r` at version 0 of one fragment, in a swarm of a, b and r."""

    reducer: Reducer
    events: list[dict[str, object]]
    network: MemoryNetwork = field(default_factory=MemoryNetwork)

    async def on_call(self, method: str, request: bytes) -> bytes:
        raise AssertionError("no calls here")

    async def on_stream(self, method: str, stream: Stream) -> None:
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

    async def close_round(self) -> None:
        """Valid contributions of all three give their mean, untouched by what was before."""
        payload = encoded("r")
        own = asyncio.create_task(
            self.reducer.contribute(wire.key_of(header("r")), GROUP, wire.Payload.of(payload))
        )
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
        config=RoundConfig(),
        detection_s=6.0,
        clock=asyncio.get_running_loop().time,
        offload=inline,
        log=events.append,
    )
    made = Bench(Reducer(context), events)
    made.reducer.viewed(view("abr"))
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
    }
    return pb.ContributionHeader(**{**fields, **changes})


def up(message: pb.ContributionHeader | pb.Frame) -> bytes:
    if isinstance(message, pb.Frame):
        return pb.ExchangeUp(frame=message).SerializeToString()
    return pb.ExchangeUp(header=message).SerializeToString()


def contribution(
    peer: str = "a", payload: memoryview | None = None, **changes: object
) -> list[bytes]:
    """A header and its frames; `changes` are to the header."""
    payload = encoded(peer) if payload is None else payload
    changes = {"hash": wire.hash64(payload), **changes}
    return [up(header(peer, **changes)), *(up(frame) for frame in frames([payload]))]


def with_frame(change: Callable[[pb.Frame], None]) -> list[bytes]:
    """A contribution whose only frame was changed."""
    (frame,) = frames([encoded("a")])
    change(frame)
    return [up(header("a")), up(frame)]


def set_fields(**values: object) -> Callable[[pb.Frame], None]:
    def change(frame: pb.Frame) -> None:
        for name, value in values.items():
            setattr(frame, name, value)

    return change


def flip(frame: pb.Frame) -> None:
    frame.payload = bytes([frame.payload[0] ^ 1]) + frame.payload[1:]


def longer(frame: pb.Frame) -> None:
    frame.payload += b"\0\0\0\0"
    frame.hash = wire.hash64(frame.payload)


CASES: dict[str, tuple[list[bytes], int, str]] = {
    "another run": ([up(header(run=78))], pb.RefusalCode.REFUSAL_RUN, "another run"),
    "another group": ([up(header(group=1))], pb.RefusalCode.REFUSAL_GROUP, "group"),
    "a fragment that does not exist": ([up(header(fragment=1))], INVALID, "fragment 1 of 1"),
    "another codec": ([up(header(codec=2))], INVALID, "codec 2"),
    "an unknown codec": ([up(header(codec=99))], INVALID, "codec 99"),
    "another shape": ([up(header(elements=999))], INVALID, "999 values"),
    "another size": ([up(header(total_bytes=3_996))], INVALID, "3996 bytes"),
    "a terabyte": ([up(header(total_bytes=2**40, elements=2**38))], INVALID, f"{2**40} bytes"),
    "a stranger": ([up(header(sender="x"))], AGAIN, "x is not a member"),
    "nobody": ([up(header(sender=""))], AGAIN, "not a member"),
    "garbage": ([b"\xff\xff\xff"], AGAIN, "not a ExchangeUp"),
    "a frame before its header": (contribution()[1:], INVALID, "must begin with its header"),
    "an empty message": ([b""], INVALID, "must begin with its header"),
    "a header in place of a frame": ([up(header()), up(header())], AGAIN, "frame of 0 bytes"),
    "a damaged frame": (with_frame(flip), AGAIN, "damaged"),
    "a frame with another hash": (with_frame(set_fields(hash=5)), AGAIN, "damaged"),
    "a frame out of place": (with_frame(set_fields(offset=4)), AGAIN, "at 4, expected 0"),
    "a frame far out of place": (with_frame(set_fields(offset=2**63)), AGAIN, "expected 0"),
    "a frame that is too long": (with_frame(longer), AGAIN, "4004 bytes"),
    "a payload of another hash": (contribution(hash=5), AGAIN, "payload is damaged"),
    "NaN": (contribution(payload=encoded("a", float("nan"))), INVALID, "NaN"),
    "infinity": (contribution(payload=encoded("a", float("-inf"))), INVALID, "Inf"),
    "absurdly large values": (contribution(payload=encoded("a", 1e38)), INVALID, "large"),
    "an end amid the payload": (contribution()[:1], AGAIN, "broke off"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_refused_and_leaves_no_trace(case: tuple[list[bytes], int, str]) -> None:
    messages, code, reason = case

    async def scenario() -> None:
        made = await bench()
        refusal = await made.refused(messages)
        assert refusal.code == code
        assert reason in refusal.reason
        await made.close_round()

    run(scenario())


def test_a_shard_that_does_not_exist_is_refused() -> None:
    async def scenario() -> None:
        made = await bench()
        refusal = await made.refused([up(header(shard=3))])
        assert refusal.code == INVALID
        await made.close_round()

    run(scenario())


def test_one_nan_among_many_values_is_found_wherever_it_is() -> None:
    rng = random.Random(5)

    async def scenario() -> None:
        made = await bench()
        for at in (0, 999, *(rng.randrange(1_000) for _ in range(10))):
            payload = encoded("a")
            payload[4 * at : 4 * at + 4] = struct.pack("<f", float("nan"))
            refusal = await made.refused(contribution(payload=payload))
            assert "NaN" in refusal.reason
        await made.close_round()

    run(scenario())


def test_every_flipped_bit_is_found() -> None:
    """Bits of the whole message: payload, offset, hash, lengths and tags."""
    rng = random.Random(6)
    first, frame = contribution()
    flips = rng.sample(range(8 * len(frame)), 150) + list(range(8 * 16))

    async def scenario() -> None:
        made = await bench()
        for bit in flips:
            damaged = bytearray(frame)
            damaged[bit // 8] ^= 1 << bit % 8
            refusal = await made.refused([first, bytes(damaged)])
            assert refusal.code in (INVALID, AGAIN)
        await made.close_round()

    run(scenario())


def test_a_redirect_names_who_ranks_above() -> None:
    async def scenario() -> None:
        made = await bench()
        (answer,) = await made.send([up(header(shard=NOT_MINE))])
        order = reducer_orders(RUN, 0, GROUP)[NOT_MINE]
        assert answer.redirect.peer == order[0] == "a"

    run(scenario())


def test_a_pruned_round_is_refused() -> None:
    async def scenario() -> None:
        made = await bench()
        made.reducer.advanced(0, 9, GROUP)
        refusal = await made.refused([up(header())])
        assert refusal.code == pb.RefusalCode.REFUSAL_PRUNED
        assert "this peer is at 9" in refusal.reason

    run(scenario())


def test_a_round_to_come_is_held_and_then_refused() -> None:
    async def scenario() -> float:
        made = await bench()
        pending = asyncio.create_task(made.send([up(header(round=1))]))
        await asyncio.sleep(30)
        assert not pending.done()
        for _ in range(100):
            await asyncio.sleep(1)
            made.reducer.viewed(view("abr"))  # as gossip does, now and then
            if pending.done():
                break
        (answer,) = await pending
        assert answer.refusal.code == pb.RefusalCode.REFUSAL_PRUNED
        return asyncio.get_running_loop().time()

    assert run(scenario()) < 120


def test_a_silent_stream_is_given_up() -> None:
    async def scenario() -> None:
        made = await bench()
        with pytest.raises(TimeoutError):
            await made.reducer.serve(Silent())

    run(scenario())


class Silent:
    """A stream on which nothing ever comes."""

    async def send(self, message: bytes) -> None:
        raise AssertionError

    async def done(self) -> None:
        raise AssertionError

    async def receive(self) -> bytes | None:
        await asyncio.sleep(60)
        raise Stalled("given up too late")

    def cancel(self) -> None:
        raise AssertionError


def test_a_repeated_contribution_counts_once() -> None:
    async def scenario() -> None:
        made = await bench()
        again = []
        for _ in range(3):
            again.append(asyncio.create_task(made.send(contribution("a"))))
            await asyncio.sleep(1)
        await made.close_round()
        for task in again:
            first, *_ = await task
            assert list(first.header.contributors) == ["a", "b", "r"]

    run(scenario())


def test_newer_values_of_a_peer_replace_the_older() -> None:
    async def scenario() -> None:
        made = await bench()
        older = asyncio.create_task(made.send(contribution("a", payload=encoded("a", 50.0))))
        await asyncio.sleep(1)
        await made.close_round()
        await older

    run(scenario())


def test_a_resumed_contribution_goes_on_where_it_broke_off() -> None:
    """Frames are made small by hand: any cut into frames is a valid one."""

    async def scenario() -> None:
        made = await bench()
        payload = encoded("a")
        stream = await made.open("a")
        await stream.send(up(header("a")))
        await stream.send(up(frame_of(payload, 0, 1_200)))
        await asyncio.sleep(0.1)
        stream.cancel()
        await asyncio.sleep(0.1)

        stream = await made.open("a")
        await stream.send(up(header("a", resumed=True)))
        raw = await stream.receive()
        assert raw is not None
        assert pb.ExchangeDown.FromString(raw).resume.offset == 1_200
        await stream.send(up(frame_of(payload, 1_200, 4_000)))
        await stream.done()
        pending = asyncio.create_task(received(stream))
        await made.close_round()
        first, *_ = await pending
        assert list(first.header.contributors) == ["a", "b", "r"]

    run(scenario())


def test_a_later_stream_takes_over_from_one_that_still_trickles() -> None:
    """The contributor saw the link break, the reducer has not yet: old frames still arrive."""

    async def scenario() -> None:
        made = await bench()
        payload = encoded("a")
        old = await made.open("a")
        await old.send(up(header("a")))
        await old.send(up(frame_of(payload, 0, 1_200)))
        await asyncio.sleep(0.1)

        new = await made.open("a")
        await new.send(up(header("a", resumed=True)))
        raw = await new.receive()
        assert raw is not None
        offset = pb.ExchangeDown.FromString(raw).resume.offset
        assert offset == 1_200
        await old.send(up(frame_of(payload, 1_200, 2_400)))
        await asyncio.sleep(0.1)
        await new.send(up(frame_of(payload, offset, 4_000)))
        await new.done()
        pending = asyncio.create_task(received(new))
        await made.close_round()
        first, *_ = await pending
        assert first.WhichOneof("body") == "header", first
        assert list(first.header.contributors) == ["a", "b", "r"]

    run(scenario())


def test_a_round_laid_out_anew_just_before_its_mean_is_computed() -> None:
    """Another state came in at the same moment: nothing of the former layout is computed."""

    async def scenario() -> None:
        made = await bench()
        pending = asyncio.create_task(made.send(contribution("a")))
        await asyncio.sleep(0.1)
        made.reducer.viewed(view("a", dead="br"))  # nobody else is awaited any more
        made.reducer.advanced(0, 0, ("a", "r"))
        (answer,) = await pending
        assert answer.WhichOneof("body") == "refusal"

    run(scenario())


def test_a_reduction_is_given_from_the_offset_that_is_asked_for() -> None:
    async def scenario() -> None:
        made = await bench()
        await made.close_round()
        first, *frames = await made.send([up(header("a", resumed=True, reduction_offset=3_000))])
        assert first.header.total_bytes == 4_000
        assert [(f.frame.offset, len(f.frame.payload)) for f in frames] == [(3_000, 1_000)]

    run(scenario())


def frame_of(payload: memoryview, start: int, stop: int) -> pb.Frame:
    piece = bytes(payload[start:stop])
    return pb.Frame(offset=start, payload=piece, hash=wire.hash64(piece))
