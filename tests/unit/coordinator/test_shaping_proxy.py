"""The proxy: its decisions on a virtual clock, and what happens on real sockets."""

import asyncio
import errno
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from murmuration.algorithms.link import Link
from murmuration.coordinator.processes import ProxyProcess
from murmuration.coordinator.shaping_proxy import (
    BURST_S,
    Bucket,
    LinkedPeer,
    ShapedPipe,
    ShapingProxy,
    listen,
)

RATE = 250_000.0  # bytes a second: 2 Mbit/s


def member(name: str, **link: float) -> LinkedPeer:
    return LinkedPeer(name, Link(**{"rate_mbps": 2, **link}))


@given(st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 2)), min_size=1, max_size=50))
def test_never_more_than_the_rate_and_a_burst_passes(chunks):
    bucket, now, passed = Bucket(RATE), 0.0, []
    for n_bytes, pause_s in chunks:
        now += pause_s
        passed.append((max(now, bucket.take(n_bytes, now)), n_bytes))
    for first in range(len(passed)):
        total = 0
        for when, n_bytes in passed[first:]:
            total += n_bytes
            # The first of them may have passed in part before.
            span_s = when - passed[first][0] + passed[first][1] / RATE
            assert total <= RATE * (span_s + BURST_S) * (1 + 1e-9)


def test_connections_of_one_worker_share_its_link_both_ways_apart():
    w0, w1, w2 = (member(f"w{i}") for i in range(3))
    chance = random.Random(0)
    ahead, other = ShapedPipe(w0, w1, chance), ShapedPipe(w0, w2, chance)
    back = ShapedPipe(w1, w0, chance)
    n = round(RATE)  # a second's worth
    assert ahead.enter(n, 0.0)[0] == pytest.approx(1 - BURST_S)
    assert other.enter(n, 0.0)[0] == pytest.approx(2 - BURST_S)  # behind it, on w0's way up
    assert back.enter(n, 0.0)[0] == pytest.approx(1 - BURST_S)
    assert ShapedPipe(w1, w2, chance).enter(n, 0.0)[0] == pytest.approx(2 - BURST_S)
    assert (w0.sent_bytes, w0.received_bytes) == (2 * n, n)
    assert (w2.sent_bytes, w2.received_bytes) == (0, 2 * n)


# --------------------------------------------------------------------------------- real sockets


FAST = Link(rate_mbps=1000)


@dataclass
class Net:
    """A proxy, and behind each worker's address a server that answers with what it gets."""

    proxy: ShapingProxy
    proxies: dict[str, int]
    addresses: dict[str, str]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def ask(self, name: str, head: str) -> tuple[bytes, asyncio.StreamReader]:
        """Sends a request to a worker's proxy; the status line, and what follows."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxies[name])
        self.writers.append(writer)
        writer.write(f"{head}\r\nHost: there\r\n\r\n".encode())
        status = (await reader.readuntil(b"\r\n")).rstrip()
        while await reader.readline() not in (b"\r\n", b""):
            pass
        return status, reader

    async def connect(self, name: str, to: str) -> asyncio.StreamReader:
        """A connection from one worker to another; its writer is the last of `writers`."""
        status, reader = await self.ask(name, f"CONNECT {self.addresses[to]} HTTP/1.1")
        assert status == b"HTTP/1.1 200 OK"
        return reader


@asynccontextmanager
async def net(*links: Link | None) -> AsyncIterator[Net]:
    members = {f"w{i}": LinkedPeer(f"w{i}", link) for i, link in enumerate(links)}
    servers = {name: await asyncio.start_server(echo, "127.0.0.1", 0) for name in members}
    ports = {name: server.sockets[0].getsockname()[1] for name, server in servers.items()}
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    proxy = ShapingProxy(members, {address: name for name, address in addresses.items()}, seed=1)
    listeners = {name: listen("127.0.0.1", member) for name, member in members.items()}
    proxies = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    serving = asyncio.create_task(proxy.serve(listeners))
    await asyncio.sleep(0)  # begun, so that it closes what it was given
    made = Net(proxy, proxies, addresses)
    try:
        yield made
    finally:
        for writer in made.writers:
            writer.close()
        serving.cancel()
        await asyncio.wait([serving])
        for server in servers.values():
            server.close()
    assert serving.cancelled()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize(
    "link", [FAST, Link(rate_mbps=400, delay_s=0.01, jitter_s=0.01), None], ids=str
)
async def test_bytes_arrive_complete_and_in_order(link):
    sent = random.Random(0).randbytes(2_000_001)
    async with net(link, link) as here:
        reader = await here.connect("w0", "w1")
        here.writers[-1].write(sent)
        here.writers[-1].write_eof()
        assert await reader.read(-1) == sent  # the end came through too
        for member in here.proxy.members.values():
            assert (member.sent_bytes, member.received_bytes) == (len(sent), len(sent))


async def test_a_link_is_as_slow_as_it_says():
    sent = bytes(500_000)  # 0.4 s at 10 Mbit/s; only "not faster" is certain
    async with net(Link(rate_mbps=10, delay_s=0.05), Link(rate_mbps=100)) as here:
        loop = asyncio.get_running_loop()
        reader = await here.connect("w0", "w1")
        began_s = loop.time()
        here.writers[-1].write(sent)
        await reader.readexactly(len(sent))
        assert loop.time() - began_s >= 0.38 + 0.05


async def test_senders_are_held_back():
    async with net(Link(rate_mbps=1), None) as here:
        await here.connect("w0", "w1")
        writer = here.writers[-1]
        # Small kernel buffers on this side, so that what is accepted is what the proxy holds.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)
        writer.write(bytes(4_000_000))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.2)  # 32 s at this rate
        writer.transport.abort()


async def test_what_is_refused():
    async with net(FAST, FAST) as here:
        asked = {
            f"GET {here.addresses['w1']} HTTP/1.1": b"HTTP/1.1 405",
            "CONNECT 127.0.0.1:22 HTTP/1.1": b"HTTP/1.1 403",
            "nonsense": b"HTTP/1.1 405",
            "CONNECT " + 9000 * "a": b"HTTP/1.1 400",
        }
        for head, status in asked.items():
            assert (await here.ask("w0", head))[0].startswith(status)


async def test_a_worker_that_does_not_listen_is_told_at_once():
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        async with net(FAST, FAST) as here:
            gone = f"127.0.0.1:{taken.getsockname()[1]}"
            here.proxy._targets[gone] = "w1"
            status, _ = await here.ask("w0", f"CONNECT {gone} HTTP/1.1")
            assert status == b"HTTP/1.1 502 Connection refused"


async def test_connections_break_by_reset():
    async with net(Link(rate_mbps=1000, loss=6000), FAST) as here:
        reader = await here.connect("w0", "w1")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)


def test_the_process_counts_and_ends_with_its_stdin():
    with ProxyProcess({"w0": ("127.0.0.1:1", FAST), "w1": ("127.0.0.1:2", None)}) as proxy:
        assert list(proxy.proxies) == ["w0", "w1"]
        assert [c["sent_bytes"] for c in proxy.counters().values()] == [0, 0]
    with pytest.raises((RuntimeError, ValueError)):
        proxy.counters()


def test_a_process_that_cannot_start_says_so():
    with pytest.raises(RuntimeError, match="the shaping proxy has ended with exit code 1"):
        ProxyProcess({"w0": ("127.0.0.1:1", FAST)}, host="203.0.113.1")


async def test_it_goes_on_where_too_many_files_are_open(monkeypatch):
    loop, errors = asyncio.get_running_loop(), [OSError(errno.EMFILE, "Too many open files")]
    accept = loop.sock_accept

    async def sometimes(listener: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            raise errors.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", sometimes)
    async with net(FAST, FAST) as made:
        await made.connect("w0", to="w1")
