"""Peers on real sockets: one that nobody dials, its relays, and one that dials through them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import relayed_address, split_address
from murmuration.protos.events import Warnings
from murmuration.worker.background import Tasks
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Role
from murmuration.worker.identity.gate import Gate
from murmuration.worker.membership import Member
from murmuration.worker.node.answers import NodeServer
from murmuration.worker.relay.relayed import RelayedPeer
from murmuration.worker.relay.service import RelayService, RelayTable
from murmuration.worker.relay.tunnels import Tunnels, message, own_port, pump, received
from murmuration.worker.transport import Stream, Unreachable, Untrusted
from murmuration.worker.transport.grpc import GrpcTransport

_WAIT_S = 20.0
SECRET = b"what the relay must not read"


class Party:
    """A peer that relays, is relayed, or dials; its streams of `Data/Fetch` repeat what they hear.

    Args: run: None: nothing is encrypted."""

    def __init__(self, name: str, run: Authority | None, rate_mbps: float = 1000.0) -> None:
        self.name = name
        identity = None if run is None else run.new_identity(Role.PEER, name)
        self.transport = GrpcTransport("127.0.0.1:0", security=identity)
        self.tunnels = Tunnels(self.transport, name, time.monotonic)
        self.transport.tunnel = self.tunnels.port
        self.me, self.members = Member(name, "", 1), (Member(name, "", 1),)
        self.table = RelayTable(rate_mbps)
        self.service = RelayService(self.table, self, run is not None, time.monotonic)
        gate = Gate(None, offload=_inline, refused=lambda: None, log=lambda _: None)
        self.server = NodeServer(gate, lambda _: None, Warnings(lambda _: None))
        self.server.streams |= {"Data/Fetch": _repeat, **self.service.streams}
        self.address = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def listen(self) -> None:
        self.address = await self.transport.listen(self.server)
        self.me = Member(self.name, self.address, 1)

    async def reserve(self, relay: "Party") -> None:
        """Is reached through the relay from now on."""
        stream = self.transport.open(relay.address, "Relay/Reserve")
        await stream.send(message(header=pb.RelayHeader(sender=self.name)))
        assert (await received(stream, _WAIT_S)).opened.address == relay.address
        self._tasks.append(asyncio.ensure_future(self._accept_all(stream, relay.address)))

    async def _accept_all(self, reserved: Stream, relay: str) -> None:
        while True:
            number = (await received(reserved, _WAIT_S)).dialled
            if number:
                self._tasks.append(asyncio.ensure_future(self._accept(relay, number)))

    async def _accept(self, relay: str, number: int) -> None:
        stream = self.transport.open(relay, "Relay/Accept")
        await stream.send(message(header=pb.RelayHeader(sender=self.name, dialled=number)))
        await pump(stream, *await asyncio.open_connection(*own_port(self.address)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.service.close()
        await self.tunnels.close()
        await self.transport.close()


async def _inline(work: Callable[[], object], /) -> object:
    return work()


async def _repeat(stream: Stream) -> None:
    while (said := await stream.receive()) is not None:
        await stream.send(said)


@asynccontextmanager
async def parties(run: Authority | None, *names: str) -> AsyncIterator[list[Party]]:
    made = [Party(name, run) for name in names]
    try:
        for party in made:
            await party.listen()
        yield made
    finally:
        for party in made:
            await party.close()


@pytest.fixture(params=["insecure", "certified"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Authority | None:
    return None if request.param == "insecure" else Authority.make(tmp_path)


async def heard_back(by: Party, address: str, peer: str, said: bytes) -> None:
    stream = by.transport.open(address, "Data/Fetch", peer)
    await stream.send(said)
    assert await stream.receive() == said
    await stream.done()
    assert await stream.receive() is None


async def test_a_relay_sees_nothing_of_what_it_carries(tmp_path):
    run, passed = Authority.make(tmp_path), bytearray()
    async with parties(run, "x", "relay", "r") as (x, relay, r):
        dial = relay.service.dial

        class Listening:
            """Keeps all that the relay is sent and sends."""

            def __init__(self, stream: Stream) -> None:
                self._stream = stream
                self.done, self.cancel = stream.done, stream.cancel

            async def send(self, said: bytes) -> None:
                passed.extend(said)
                await self._stream.send(said)

            async def receive(self) -> bytes | None:
                said = await self._stream.receive()
                passed.extend(said or b"")
                return said

        relay.server.streams["Relay/Dial"] = lambda stream: dial(Listening(stream))
        await r.reserve(relay)
        await heard_back(x, relayed_address("r", [relay.address]), "r", SECRET * 100)
        assert len(passed) > 2 * 100 * len(SECRET)
        assert SECRET not in passed


async def test_a_relay_cannot_answer_in_the_place_of_the_peer(tmp_path):
    """It leads the dial to itself: its certificate has another name."""
    async with parties(Authority.make(tmp_path), "x", "relay", "r") as (x, relay, r):
        r.address = relay.address
        await r.reserve(relay)
        with pytest.raises((Untrusted, Unreachable)):
            await heard_back(x, relayed_address("r", [relay.address]), "r", SECRET)


async def test_a_peer_that_is_itself_the_relay_reaches_the_relayed_one(run):
    """At an address that it could not dial itself, as behind a router that forwards a port."""
    async with parties(run, "relay", "r") as (relay, r):
        relay.members = (relay.me,)
        await r.reserve(relay)
        elsewhere = f"nowhere.invalid:{split_address(relay.address)[1]}"
        relay.tunnels.own = (elsewhere, relay.address)
        await heard_back(relay, relayed_address("r", [elsewhere]), "r", SECRET)


async def test_neighbours_dial_a_relayed_peer_directly(tmp_path):
    async with parties(Authority.make(tmp_path), "x", "relay", "r") as (x, relay, r):
        await heard_back(x, relayed_address("r", ["127.0.0.1:1"], r.address), "r", SECRET)
        await r.reserve(relay)
        for nobody_or_another in ("127.0.0.1:1", relay.address):
            address = relayed_address("r", [relay.address], nobody_or_another)
            await heard_back(x, address, "r", SECRET)


async def test_nobody_else_is_reached_through_a_relay(run):
    async with parties(run, "x", "relay", "r") as (x, relay, r):
        relay.members = (relay.me, x.me)
        with pytest.raises(Unreachable):
            await heard_back(x, relayed_address("r", [relay.address]), "r", SECRET)
        await r.reserve(relay)
        unknown = "between members only" if run is None else "does not speak for stranger"
        for sender, peer, says in (("x", r.address, "not reached"), ("stranger", "r", unknown)):
            stream = x.transport.open(relay.address, "Relay/Dial")
            await stream.send(message(header=pb.RelayHeader(sender=sender, peer=peer)))
            with pytest.raises(Unreachable, match=says):
                await stream.receive()
            stream.cancel()


async def test_a_tunnel_in_use_is_not_the_one_that_gives_way(monkeypatch):
    """Whatever others say where they are reached."""
    monkeypatch.setattr("murmuration.worker.relay.tunnels._MOST_PORTS", 4)
    tunnels, used = Party("a", None).tunnels, relayed_address("honest", ["127.0.0.1:1"])
    first = tunnels.port(used)
    for number in range(40):
        tunnels.port(relayed_address(f"ghost{number}", ["127.0.0.1:1"]))
        assert tunnels.port(used) == first
    tunnels.close_unneeded({used})
    assert list(tunnels._ports) == [used]
    await tunnels.close()


async def _drops(stream: Stream) -> None:
    """A relay that opens a tunnel, and takes whatever comes."""
    await received(stream, _WAIT_S)
    await stream.send(message(opened=pb.RelayOpened()))
    while await stream.receive() is not None:
        pass


async def test_another_relay_is_taken_where_one_drops_what_it_is_given(run, monkeypatch):
    monkeypatch.setattr("murmuration.worker.relay.tunnels._FIRST_S", 0.2)
    async with parties(run, "x", "p", "q", "r") as (x, p, q, r):
        p.server.streams["Relay/Dial"] = _drops
        q.members = (q.me, x.me)
        await r.reserve(q)
        address = relayed_address("r", [p.address, q.address])
        with pytest.raises(Unreachable):
            await heard_back(x, address, "r", b"through p")
        assert x.tunnels.problems[p.address] == "it drops what it is given"
        x.transport.drop(address)
        await heard_back(x, address, "r", b"through q")


@pytest.mark.parametrize(
    ("later_s", "silent_s", "fails"),
    [(2.0, 11.0, True), (2.0, 9.0, False), (0.0, 11.0, False)],
    ids=["silence", "a short one", "an acknowledgement"],
)
async def test_a_relay_whose_tunnel_ends_after_long_silence_comes_last(later_s, silent_s, fails):
    """It drops all but the first word."""
    now, answers, asked = [100.0], asyncio.Queue[bytes | None](), asyncio.Event()
    answers.put_nowait(message(payload=b"first"))
    send = AsyncMock(side_effect=lambda _: asked.set())
    stream = Mock(send=send, receive=answers.get, done=AsyncMock())
    tunnels = Tunnels(Party("x", None).transport, "x", lambda: now[0])
    tunnels._dialled = AsyncMock(return_value=stream)
    host, port = split_address(tunnels.port(relayed_address("r", ["p:1"])) or "")
    reader, writer = await asyncio.open_connection(host, port)
    assert await reader.read(5) == b"first"
    now[0] += later_s
    writer.write(b"asked")
    await asked.wait()
    now[0] += silent_s
    answers.put_nowait(None)
    assert await reader.read() == b""
    while len(tunnels._tasks._tasks) > 1:  # the port goes on listening
        await asyncio.sleep(0)
    await tunnels.close()
    writer.close()
    assert ("p:1" in tunnels.problems) == fails


class LoneNode:
    """As much of a node as a peer needs that is reached through relays."""

    def __init__(self, party: Party) -> None:
        self.transport, self.clock = party.transport, time.monotonic
        self.tasks, self.texts = Tasks(), list[object]()
        self.spawn = self.tasks.spawn
        self.me, self.others = party.me, list[Member]()

    def log(self, event: dict[str, object]) -> None:
        self.texts.append(event.get("text"))

    def update(self, **_: object) -> None:
        pass


async def test_a_relay_that_opens_tunnels_without_end_gets_a_few_and_is_named(monkeypatch):
    monkeypatch.setattr("murmuration.worker.relay.relayed._MOST_TUNNELS", 3)
    opened = set[int]()

    async def keeps(stream: Stream) -> None:
        opened.add((await received(stream, _WAIT_S)).header.dialled)
        await asyncio.Event().wait()

    async with parties(None, "p", "r") as (p, r):

        async def floods(stream: Stream) -> None:
            await received(stream, _WAIT_S)
            await stream.send(message(opened=pb.RelayOpened(peer="p", address=p.address)))
            for number in range(1, 11):
                await stream.send(message(dialled=number))
            await asyncio.Event().wait()

        p.server.streams |= {"Relay/Reserve": floods, "Relay/Accept": keeps}
        node = LoneNode(r)
        peer = RelayedPeer(node, r.address, node, lambda _: None)  # type: ignore[arg-type]
        assert await peer.begin(p.address)
        while len(opened) < 3 or not any("tunnels at once" in str(text) for text in node.texts):
            await asyncio.sleep(0)
        assert peer._tunnels[p.address] == 3
        await peer.close()
        await node.tasks.close()
    assert opened == {1, 2, 3}
