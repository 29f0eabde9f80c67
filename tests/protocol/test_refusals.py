"""A reducer refuses contributions, says what and where, and keeps nothing of them."""

import struct
from collections.abc import Callable, Iterator

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.view import ShardKey
from tests.support.frames import frames
from tests.unit.worker.exchange.allreduce.layouts import BYTES, ROUND_S, encoded, on_a_loop
from tests.unit.worker.exchange.allreduce.reducing import Contribution, Reducing, told

INVALID = pb.RefusalCode.REFUSAL_INVALID
AGAIN = pb.RefusalCode.REFUSAL_AGAIN  # damaged on the way: sending it again helps
PAYLOAD = encoded(ord("d"))


@pytest.fixture
def made() -> Iterator[Reducing]:
    """A reducer that nothing of a refused contribution stays at: the next round closes as ever."""
    with on_a_loop() as clock:
        reducing = Reducing(clock)
        yield reducing
        streams = reducing.contribute("abcd")
        assert told(streams) == {"mean of abcd"}
        assert streams[0].mean == {98.5}  # by their letters


def refusal_of(made: Reducing, messages: list[bytes]) -> pb.Refusal:
    """All that comes back for a stream of these messages."""
    stream = Contribution(made, messages[0], PAYLOAD)
    for message in messages[1:]:
        stream.gives(message)
    stream.ends()
    assert stream.task.done()
    (answer,) = map(pb.ExchangeDown.FromString, stream.sent)
    assert answer.WhichOneof("body") == "refusal", answer
    return answer.refusal


Messages = Callable[[Reducing], list[bytes]]


def header(**changes: object) -> Messages:
    return lambda made: [made.header(PAYLOAD, **changes)]


def frame_of(payload: memoryview, change: Callable[[pb.Frame], None] = lambda _: None) -> bytes:
    (frame,) = frames([payload])
    change(frame)
    return pb.ExchangeUp(frame=frame).SerializeToString()


def with_frame(change: Callable[[pb.Frame], None]) -> Messages:
    """A contribution whose only frame was changed."""
    return lambda made: [made.header(PAYLOAD), frame_of(PAYLOAD, change)]


def payload(values: memoryview, **changes: object) -> Messages:
    return lambda made: [made.header(values, **changes), frame_of(values)]


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


CASES: dict[str, tuple[Messages, int, str]] = {
    "another run": (header(run=78), pb.RefusalCode.REFUSAL_RUN, "another run"),
    "another group": (header(group=("b", "d")), pb.RefusalCode.REFUSAL_GROUP, "group"),
    "a fragment that does not exist": (header(fragment=3), INVALID, "fragment 3 of 3"),
    "a shard that does not exist": (header(shard=4), INVALID, "shard 4"),
    "another codec": (header(codec=2), INVALID, "codec 2"),
    "an unknown codec": (header(codec=99), INVALID, "codec 99"),
    "another shape": (header(elements=9), INVALID, "9 values"),
    "another size": (header(total_bytes=36), INVALID, "36 bytes"),
    "a terabyte": (header(total_bytes=2**40, elements=2**38), INVALID, f"{2**40} bytes"),
    "a stranger": (header(sender="x"), AGAIN, "x is not a member"),
    "nobody": (header(sender=""), AGAIN, "not a member"),
    "garbage": (lambda _: [b"\xff\xff\xff"], AGAIN, "not a ExchangeUp"),
    "a frame before its header": (
        lambda _: [frame_of(PAYLOAD)],
        INVALID,
        "must begin with its header",
    ),
    "an empty message": (lambda _: [b""], INVALID, "must begin with its header"),
    "a header in place of a frame": (
        lambda made: [made.header(PAYLOAD)] * 2,
        AGAIN,
        "frame of 0 bytes",
    ),
    "a damaged frame": (with_frame(flip), AGAIN, "damaged"),
    "a frame with another hash": (with_frame(set_fields(hash=5)), AGAIN, "damaged"),
    "a frame out of place": (with_frame(set_fields(offset=4)), AGAIN, "at 4, expected 0"),
    "a frame far out of place": (with_frame(set_fields(offset=2**63)), AGAIN, "expected 0"),
    "a frame that is too long": (with_frame(longer), AGAIN, "44 bytes"),
    "a payload of another hash": (payload(PAYLOAD, hash=5), AGAIN, "payload is damaged"),
    "NaN": (payload(encoded(float("nan"))), INVALID, "NaN"),
    "infinity": (payload(encoded(float("-inf"))), INVALID, "Inf"),
    "absurdly large values": (payload(encoded(1e38)), INVALID, "large"),
    "an end amid the payload": (header(), AGAIN, "broke off"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_refused_and_leaves_no_trace(made, case):
    messages, code, reason = case
    refusal = refusal_of(made, messages(made))
    assert refusal.code == code
    assert reason in refusal.reason


def test_one_nan_among_many_values_is_found_wherever_it_is(made):
    for at in range(0, BYTES, 4):
        values = encoded(ord("d"))
        values[at : at + 4] = struct.pack("<f", float("nan"))
        assert "NaN" in refusal_of(made, payload(values)(made)).reason


def test_every_flipped_bit_is_found(made):
    """Bits of the whole message: payload, offset, hash, lengths and tags."""
    frame = frame_of(PAYLOAD)
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        refusal = refusal_of(made, [made.header(PAYLOAD), bytes(damaged)])
        assert refusal.code in (INVALID, AGAIN)


def test_a_redirect_names_who_ranks_above(made):
    assert made.answer(ShardKey(0, 0, 1)) == "to b"


def test_a_round_to_come_is_held_and_then_refused(made):
    stream = made.offer(key=ShardKey(0, 1, 0))
    made.tick(ROUND_S - 1)
    assert stream.told == []
    made.tick(2 * ROUND_S)
    assert stream.told == ["pruned"]


def test_a_pruned_round_is_refused_by_where_the_reducer_is():
    with on_a_loop() as clock:
        stream = Reducing(clock, version=9).offer()
        assert stream.told == ["pruned"]
        assert "this peer is at 9" in pb.ExchangeDown.FromString(stream.sent[0]).refusal.reason
