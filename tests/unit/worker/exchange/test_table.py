"""A table by hand: what a partner's parts may be, and what stays of them."""

from collections.abc import Callable

import pytest
import torch

from algorithms.codecs import codec_by_name
from algorithms.plan import Plan
from protos import murmuration_pb2 as pb
from tests.support.frames import frames_of
from worker import wire
from worker.exchange.compression import Compression
from worker.exchange.context import Context
from worker.exchange.pairwise.buffer import ANCHOR, CONTRIBUTION, PairBuffer, codec_of
from worker.exchange.pairwise.round import Broken, Declined, Met, PairRound, Received
from worker.exchange.types import ExchangeConfig, RoundConfig, View
from worker.wire import Payload

FP32 = codec_by_name("fp32")
ELEMENTS = 100
PAYLOADS = {
    (peer, part): Payload.of(wire.encode(FP32, torch.full((ELEMENTS,), float(number))))
    for number, (peer, part) in enumerate(
        (peer, part) for peer in "abc" for part in (ANCHOR, CONTRIBUTION)
    )
}


def table_of(me: str = "b", group: str = "abc") -> PairBuffer:
    return PairBuffer(
        3, 7, tuple(group), {part: PAYLOADS[me, part] for part in (ANCHOR, CONTRIBUTION)}
    )


def header(peer: str, part: int, **changes: int) -> pb.PartHeader:
    payload = PAYLOADS[peer, part]
    fields = {
        "part": part,
        "codec": FP32.wire_id,
        "total_bytes": len(payload.raw),
        "hash": payload.hash,
        "offset": 0,
    }
    return pb.PartHeader(**{**fields, **changes})


def expect(table: PairBuffer, peer: str, part: int, weight: int = 1, **changes: int) -> None:
    table.expect(peer, header(peer, part, **changes), FP32, ELEMENTS, weight)


def give(table: PairBuffer, peer: str, part: int, stop: int | None = None, **changes: int) -> None:
    """The part's header and its frames of 100 bytes, up to `stop` bytes."""
    expect(table, peer, part, **changes)
    _, incoming = table.arriving(peer)
    start = changes.get("offset", 0)
    with frames_of(100):
        for raw, size, _ in wire.payload_messages(pb.MeetMessage, PAYLOADS[peer, part], start):
            if stop is None or incoming.received_bytes + size <= stop:
                incoming.add(pb.MeetMessage.FromString(raw).frame)


def check_all(table: PairBuffer, peer: str) -> None:
    for part, incoming in table.unchecked(peer):
        incoming.verify()
        table.checked.add((peer, part))


async def inline(work: Callable[[], object]) -> object:
    return work()


def context() -> Context:
    return Context(
        me="b",
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


def begun(table: PairBuffer) -> PairBuffer:
    table.meeting = PairRound(
        "b",
        table.group,
        View(),
        RoundConfig(),
        fragment=table.fragment,
        round_=table.round,
        began_at=0.0,
        payload_bytes=0,
    )
    return table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_bytes": 404}, "round 7 of fragment 3 from a: 404 bytes .*expected 400 bytes"),
        ({"total_bytes": 2**40}, f"{2**40} bytes"),
        ({"codec": 2}, "of codec 2; expected 400 bytes of fp32"),
    ],
)
def test_a_part_of_another_size_or_codec_is_refused(changes: dict[str, int], message: str) -> None:
    table = table_of()
    with pytest.raises(wire.WireError, match=message):
        expect(table, "a", ANCHOR, **changes)
    assert table.theirs["a"] == {}


def test_a_frame_before_any_part_is_refused() -> None:
    table = table_of()
    with pytest.raises(wire.WireError, match="a frame of no part"):
        table.arriving("a")
    expect(table, "a", ANCHOR)
    table.drop("a", ANCHOR)
    with pytest.raises(wire.WireError, match="a frame of no part"):
        table.arriving("a")


def test_a_part_goes_on_where_it_broke_off() -> None:
    table = table_of()
    give(table, "a", CONTRIBUTION, stop=200)
    give(table, "a", CONTRIBUTION, offset=200)
    assert [part for part, _ in table.unchecked("a")] == [CONTRIBUTION]
    check_all(table, "a")
    assert table.unchecked("a") == []


def test_a_part_that_goes_on_elsewhere_is_wanted_again() -> None:
    table = table_of()
    give(table, "a", CONTRIBUTION, stop=200)
    with pytest.raises(wire.Again, match="goes on at 300"):
        expect(table, "a", CONTRIBUTION, offset=300)
    with pytest.raises(wire.Again, match="goes on at 300"):
        expect(table, "c", CONTRIBUTION, offset=300)


def test_other_values_replace_what_has_come_as_long_as_nothing_counts_on_it() -> None:
    table = table_of()
    give(table, "a", ANCHOR)
    give(table, "a", CONTRIBUTION)
    check_all(table, "a")
    assert table.received("a")
    expect(table, "a", ANCHOR, hash=5)
    assert not table.received("a")
    assert table.theirs["a"][ANCHOR].received_bytes == 0


@pytest.mark.parametrize("changes", [{"hash": 5}, {"weight": 9}], ids=["values", "weight"])
def test_other_values_are_refused_once_the_round_counts_on_them(changes: dict[str, int]) -> None:
    table = begun(table_of())
    give(table, "a", ANCHOR)
    give(table, "a", CONTRIBUTION)
    check_all(table, "a")
    with pytest.raises(wire.WireError, match="other values than before"):
        expect(table, "a", CONTRIBUTION, **changes)
    with pytest.raises(wire.Again, match="goes on at 0"):
        expect(table, "a", CONTRIBUTION)
    expect(table, "a", CONTRIBUTION, offset=400)
    assert table.received("a")


def test_what_was_dropped_is_not_received() -> None:
    table = table_of()
    for part in (ANCHOR, CONTRIBUTION):
        give(table, "a", part)
    assert not table.received("a")  # not checked yet
    check_all(table, "a")
    assert table.received("a")
    table.drop("a", ANCHOR)
    assert not table.received("a")


def test_the_header_tells_what_is_held_of_the_partner() -> None:
    table = table_of()
    give(table, "a", ANCHOR)
    give(table, "a", CONTRIBUTION, stop=100)
    said = pb.MeetMessage.FromString(table.header(context(), "a")).header
    assert (said.run, said.fragment, said.round, said.sender) == (77, 3, 7, "b")
    assert said.group == wire.group_hash(("a", "b", "c"))
    hashes = [PAYLOADS["a", part].hash for part in (ANCHOR, CONTRIBUTION)]
    assert [(held.hash, held.offset) for held in said.held] == [(hashes[0], 400), (hashes[1], 100)]
    to_c = pb.MeetMessage.FromString(table.header(context(), "c")).header
    assert [(held.hash, held.offset) for held in to_c.held] == [(0, 0), (0, 0)]


def test_what_was_seen_before_the_round_began() -> None:
    table = table_of()
    give(table, "a", ANCHOR)
    assert table.seen("b") == []
    give(table, "c", CONTRIBUTION, stop=100)
    assert table.seen("b") == [Met("c")]
    give(table, "a", CONTRIBUTION)
    check_all(table, "a")
    broken = Broken("a", 0, "a: the stream broke off")  # this peer does not call it
    assert table.seen("b") == [Met("a"), Received("a"), broken, Met("c")]
    table.declined["c"] = "it was late"
    assert table.seen("b")[-1] == Declined("c", "it was late")


def test_payloads_and_weights_are_in_the_order_of_the_group() -> None:
    table = table_of()
    for weight, peer in ((4, "c"), (2, "a")):
        give(table, peer, ANCHOR)
        expect(table, peer, CONTRIBUTION, weight=weight)
    table.weight = 3
    anchors, _ = table.payloads(ANCHOR, "b")
    assert anchors == [PAYLOADS[peer, ANCHOR].raw for peer in "abc"]
    assert table.payloads(CONTRIBUTION, "b")[1] == [2, 3, 4]


def test_a_table_has_ended_either_way() -> None:
    assert not table_of().ended
    won, lost = table_of(), table_of()
    won.succeeded, lost.failed = True, "the link broke"
    assert won.ended
    assert lost.ended


def test_each_part_has_its_codec() -> None:
    plan = Plan(
        exchange="pairs", outer_lr=0.7, outer_momentum=0.5, codec="e3m0", anchor_codec="bf16"
    )
    assert (codec_of(plan, ANCHOR).name, codec_of(plan, CONTRIBUTION).name) == ("bf16", "e3m0")
