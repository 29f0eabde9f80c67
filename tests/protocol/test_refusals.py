"""What a reducer refuses, with what and where, and that nothing of it stays behind."""

import asyncio
import random
import struct
from collections.abc import Callable

import pytest

from murmuration.algorithms.reducers import reducer_orders
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from tests.protocol.one_reducer import GROUP, RUN, bench, contribution, encoded, header, up
from tests.protocol.virtual_time import run
from tests.support.frames import frames

NOT_MINE = next(k for k, order in enumerate(reducer_orders(RUN, 0, GROUP)) if order[0] == "a")
INVALID = pb.RefusalCode.REFUSAL_INVALID
AGAIN = pb.RefusalCode.REFUSAL_AGAIN  # damaged on the way: sending it again helps


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
            made.reducer.tick()  # as the node does
            if pending.done():
                break
        (answer,) = await pending
        assert answer.refusal.code == pb.RefusalCode.REFUSAL_PRUNED
        return asyncio.get_running_loop().time()

    assert run(scenario()) < 120
