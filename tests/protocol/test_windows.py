"""The part of a long link that a round of the mean uses, where a stream has gRPC's fixed
window."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
import torch

from murmuration.algorithms.link import Link
from murmuration.algorithms.plan import PRESETS
from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.exchange.allreduce.contributor import Contributor
from murmuration.worker.exchange.allreduce.reducer import Reducer
from murmuration.worker.exchange.measured import Arrivals, Compression, ExchangeConfig
from murmuration.worker.exchange.round_context import Context, RoundConfig
from murmuration.worker.simulation import Scenario
from murmuration.worker.simulation.network import Network
from murmuration.worker.simulation.streams import StreamEnd, frame_sizes, open_stream
from murmuration.worker.simulation.virtual_loop import VirtualLoop
from murmuration.worker.training.mailbox import Begin, RoundDone, RoundFailed
from murmuration.worker.transport import WINDOW_BYTES, Stream
from tests.protocol.swarm import inline
from tests.protocol.views import view
from tests.protocol.virtual_time import run

_PIECE_BYTES = 64 * 1024
_AWAITED_BYTES = 1024 * 1024  # that a reader of a message which has begun has room for


class Windowed(StreamEnd):
    """The calling end: what is under way there has room in the window of the one that serves."""

    sent = come = 0
    room = WINDOW_BYTES
    granted: asyncio.Future[None] | None = None

    async def send(self, message: bytes) -> None:
        whole, loop = self._size(message), asyncio.get_running_loop()
        for start in range(0, whole, _PIECE_BYTES):
            size = min(_PIECE_BYTES, whole - start)
            self.sent += size
            while self.sent > self.room:
                self.granted = loop.create_future()
                await self.granted
            ends = start + size == whole
            left = loop.create_future()
            came = self._piece_came(size, message if ends else None)
            self._stream.send(self._me, came, size, left=lambda: left.set_result(None))  # noqa: B023
            await left
        if not whole:
            await super().send(message)

    def _piece_came(self, size: int, message: bytes | None) -> Callable[[], None]:
        def came() -> None:
            self.come += size
            room = self.come + WINDOW_BYTES + (_AWAITED_BYTES if message is None else 0)
            delay_s = self._network.delay_s(self._stream.callee, self._me)
            self._network.clock.after(delay_s, lambda: self._grant(room))
            if message is not None:
                self.other._came(message)

        return came

    def _grant(self, room: int) -> None:
        self.room = max(self.room, room)
        if self.granted is not None and not self.granted.done():
            self.granted.set_result(None)


class Peer:
    """A contributor and its reducer; `done` is when its round ended."""

    def __init__(self, peers: "dict[str, Peer]", network: Network, me: str, elements: int) -> None:
        clock = network.clock
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._peers, self._network, self._me = peers, network, me
        self._sizes = frame_sizes(pb.ExchangeUp, 1.0), frame_sizes(pb.ExchangeDown, 1.0)
        context = Context(
            me=me,
            run=1,
            elements=[elements],
            plan=PRESETS["diloco"],
            compression=Compression(ExchangeConfig(compression="never")),
            arrivals=Arrivals(clock.time),
            config=RoundConfig(),
            detection_s=6.0,
            clock=clock.time,
            offload=inline,
            log=lambda _: None,
            rng=Random(me),
        )
        self.reducer = Reducer(context)
        self.contributor = Contributor(context, self.reducer, self, self)

    def open(self, peer: str, method: str) -> Stream:
        ends = [*self._peers]
        numbers = ends.index(self._me), ends.index(peer)
        near, far = open_stream(self._network, *numbers, self._sizes)
        near = Windowed(self._network, near._stream, numbers[0], self._sizes[0])
        near.other, far.other = far, near
        far._stream.users[numbers[0]] = near
        loop = asyncio.get_running_loop()

        async def serve() -> None:
            await self._peers[peer].reducer.serve(far)
            far.returned()

        def begin() -> None:
            far.task = loop.create_task(serve())

        far.opens = begin
        return near

    def suspect(self, peer: str) -> None:
        raise AssertionError(f"{self._me} suspects {peer}")

    def finished(self, result: RoundDone | RoundFailed) -> None:
        assert isinstance(result, RoundDone), result
        self.done.set_result(self._network.clock.now)


def share_used(names: str, mbytes: float, link: Link) -> float:
    """What the payload of a round takes at the link's rate, over the time that the round takes."""
    elements = int(mbytes * 1e6) // 4

    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        asked = Scenario(peers=len(names), link=link)
        network = Network(loop, asked, Random(0), lambda *_: None)
        peers: dict[str, Peer] = {}
        peers |= {name: Peer(peers, network, name, elements) for name in names}
        for peer in peers.values():
            peer.reducer.on_view(view(names))
            peer.contributor.on_view(view(names))
            peer.reducer.advanced(0, 0, tuple(names))
        values = torch.zeros(elements)
        for peer in peers.values():
            begin = Begin(0, 0, tuple(names), values, torch.empty(0))
            await peer.contributor.begin(begin)
        ends = await asyncio.gather(*(peer.done for peer in peers.values()))
        for peer in peers.values():
            await peer.contributor.close()
        return max(ends)

    took_s = run(scenario())
    share = 2 * (len(names) - 1) / len(names)
    return share * mbytes * 8 / link.rate_mbps / took_s


@pytest.mark.parametrize(
    ("names", "mbytes", "link", "least"),
    [
        ("ab", 24, Link(rate_mbps=200, delay_s=0.05), 0.85),
        ("ab", 100, Link(rate_mbps=1000, delay_s=0.05), 0.8),
        ("abcd", 6, Link(rate_mbps=20, delay_s=0.05), 0.95),
    ],
    ids=["200 Mbit/s", "1 Gbit/s", "four peers, 20 Mbit/s"],
)
def test_a_round_fills_a_long_link(names: str, mbytes: float, link: Link, least: float) -> None:
    """A round trip takes 100 ms."""
    assert share_used(names, mbytes, link) >= least
