"""Contributions that come again, go on where they broke off, or are overtaken by another layout."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.exchange.round_context import Context
from tests.protocol.one_reducer import bench, contribution, encoded, header, received, up
from tests.protocol.views import view
from tests.protocol.virtual_time import run

T = TypeVar("T")


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
        made.reducer.on_view(view("a", dead="b", done="r"))  # nobody else is awaited any more
        made.reducer.advanced(0, 0, ("a", "r"))
        (answer,) = await pending
        assert answer.WhichOneof("body") == "refusal"

    run(scenario())


def test_who_comes_while_the_mean_is_computed_is_not_said_to_have_come_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no contributor, and an answer that names it would be refused by everybody."""

    async def slow(_: Context, elements: int, work: Callable[[], T]) -> T:
        await asyncio.sleep(1.0 if elements > 1_000 else 0.0)  # the mean is of several payloads
        return work()

    async def scenario() -> None:
        made = await bench()
        monkeypatch.setattr(Context, "worked", slow)
        own = made.contributes_itself()
        pending = asyncio.create_task(made.send(contribution("a"), "a"))
        await asyncio.sleep(0.1)
        made.reducer.on_view(view("ar", done="b"))  # nobody else is awaited any more
        late, *_ = await made.send(contribution("b"), "b")
        first, *_ = await pending
        await own
        for answer in (first, late):
            assert list(answer.header.contributors) == ["a", "r"]
            assert answer.header.last == "a"

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
