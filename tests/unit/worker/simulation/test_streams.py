"""Streams of the live code on modelled links."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from murmuration.algorithms.link import Link
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.simulation import Scenario
from murmuration.worker.simulation.faults import BreakStreams, Crash, Fault
from murmuration.worker.simulation.loop import context_of, running
from murmuration.worker.simulation.network import SimulatedStream
from murmuration.worker.simulation.streams import StreamEnd, frame_sizes, open_stream
from murmuration.worker.simulation.swarm import SimulatedSwarm
from murmuration.worker.transport import Unreachable

SCALE = 125_000 / 8  # a frame of 8 bytes takes a tenth of a second on 10 Mbit/s
SIZES = frame_sizes(pb.ExchangeUp, SCALE), frame_sizes(pb.ExchangeDown, SCALE)
HEADER = pb.ExchangeUp(header=pb.ContributionHeader(run=1)).SerializeToString()
FRAME = pb.ExchangeUp(frame=pb.Frame(payload=bytes(8))).SerializeToString()
ANSWER = pb.ExchangeDown(redirect=pb.Redirect(peer="x")).SerializeToString()

Side = Callable[[StreamEnd], Awaitable[None]]


class Endpoint:
    def __init__(self, number: int) -> None:
        self._number = number

    def viewed(self, changed: object) -> None: ...

    def died(self) -> None: ...

    def broken(self, stream: SimulatedStream) -> None:
        end = stream.users[self._number]
        assert isinstance(end, StreamEnd)
        end.broke()


def talk(caller: Side, callee: Side, *faults: Fault) -> list[BaseException | None]:
    """Both sides of a stream from peer 0 to peer 1, to their ends; what those ended with that
    were not cancelled."""
    swarm = SimulatedSwarm(Scenario(peers=2, link=Link(rate_mbps=10.0, delay_s=0.05)), faults)
    swarm.endpoints = [Endpoint(0), Endpoint(1)]
    tasks: list[asyncio.Task[None]] = []

    async def side(end: StreamEnd, work: Side) -> None:
        await work(end)

    with running(swarm.clock, swarm.act) as loop:
        near, far = open_stream(swarm.network, 0, 1, SIZES)

        def serve() -> None:
            far.task = loop.create_task(side(far, callee), context=context_of(1))
            far.task.add_done_callback(lambda task: None if task.cancelled() else far.returned())
            tasks.append(far.task)

        far.opens(serve)
        tasks.append(loop.create_task(side(near, caller), context=context_of(0)))
        swarm.clock.run(lambda: all(task.done() for task in tasks), 60.0)
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        return [task.exception() for task in ended]


def now() -> float:
    return round(asyncio.get_running_loop().time(), 3)


def test_messages_take_the_delay_and_frames_their_time_on_the_link() -> None:
    seen: list[tuple[bytes | None, float]] = []

    async def caller(end: StreamEnd) -> None:
        await end.send(HEADER)
        for left_s in (0.1, 0.2):  # each when the one before has left
            await end.send(FRAME)
            assert now() == left_s
        await end.done()
        assert await end.receive() == ANSWER
        assert now() == 0.3
        assert await end.receive() is None
        assert await end.receive() is None

    async def callee(end: StreamEnd) -> None:
        message: bytes | None = HEADER
        while message is not None:
            message = await end.receive()
            seen.append((message, now()))
        await end.send(ANSWER)

    assert talk(caller, callee) == [None, None]
    assert seen == [(HEADER, 0.05), (FRAME, 0.15), (FRAME, 0.25), (None, 0.25)]


def test_who_is_called_finds_out_that_the_stream_was_cancelled() -> None:
    async def caller(end: StreamEnd) -> None:
        await end.send(HEADER)
        await asyncio.sleep(1.0)
        end.cancel()

    async def callee(end: StreamEnd) -> None:
        await end.receive()
        try:
            await end.receive()
        finally:
            assert now() == 1.05

    assert talk(caller, callee) == [None]


@pytest.mark.parametrize("fault", [BreakStreams(0, 0.5), Crash(1, 0.45)])
def test_a_stream_that_breaks_raises_at_its_caller(fault: Fault) -> None:
    async def caller(end: StreamEnd) -> None:
        await end.send(HEADER)
        with pytest.raises(Unreachable, match="a stream broke"):
            await end.receive()
        assert now() == 0.5
        with pytest.raises(Unreachable):
            await end.send(FRAME)
        end.cancel()

    async def callee(end: StreamEnd) -> None:
        await asyncio.Event().wait()

    assert talk(caller, callee, fault) == [None]
