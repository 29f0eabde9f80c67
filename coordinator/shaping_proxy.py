"""A slow network in one process: an HTTP CONNECT proxy with a port of its own for each worker.

The port says which worker connects, the CONNECT to which one. What passes between them is shaped
as `ShapedPipe` decides, on a clock that is handed in: a chunk of bytes passes the sender's upward
bucket and the receiver's downward one, then waits in a delay line. No root needed.

Run as a process (`python -m murmuration.coordinator.shaping_proxy`) it reads what it is to do from
the first line of stdin, and answers each further one with what has passed, as a line of JSON;
`RelayProcess` speaks that. It ends with its stdin.
"""

import asyncio
import itertools
import json
import math
import os
import random
import socket
import struct
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from murmuration.algorithms.link import Link
from murmuration.protos.addresses import split_address

BURST_S = 0.02  # of the rate: makes up for timers that fire late
_CHUNK_S = 0.004  # of the rate
_CHUNK_BYTES = (4 * 1024, 128 * 1024)  # least and most


class Bucket:
    """One direction of a link, first come first served. In any T seconds at most
    rate * (T + BURST_S) bytes pass.

    Args:
        rate_bytes_s: infinite lets everything pass at once.
    """

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate = rate_bytes_s
        self._free_at_s = -math.inf

    def take(self, n_bytes: int, now_s: float) -> float:
        """Books the next bytes; returns when the last has passed, `now_s` or before if at once."""
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + n_bytes / self._rate
        return self._free_at_s


class DelayLine:
    """The way through the air for one direction of one connection: later, never out of order."""

    def __init__(self, delay_s: float, jitter_s: float, chance: random.Random) -> None:
        self._delay_s, self._jitter_s, self._chance = delay_s, jitter_s, chance
        self._last_s = -math.inf

    def due(self, sent_s: float) -> float:
        """When bytes arrive that were sent at `sent_s`; never before those sent earlier."""
        jitter_s = self._chance.uniform(-self._jitter_s, self._jitter_s) if self._jitter_s else 0.0
        self._last_s = max(self._last_s, sent_s + self._delay_s + jitter_s)
        return self._last_s


@dataclass(eq=False)
class LinkedPeer:
    """One worker's link: its two buckets, and what has gone through.

    Args: link: None for a worker that is not shaped.
    """

    name: str
    link: Link | None
    sent_bytes: int = 0
    received_bytes: int = 0
    up: Bucket = field(init=False)
    down: Bucket = field(init=False)

    def __post_init__(self) -> None:
        self.up, self.down = Bucket(self.rate_bytes_s), Bucket(self.rate_bytes_s)

    @property
    def rate_bytes_s(self) -> float:
        """What the link carries."""
        return math.inf if self.link is None else self.link.rate_mbps * 1e6 / 8

    @property
    def delay_s(self) -> float:
        return 0.0 if self.link is None else self.link.delay_s


class ShapedPipe:
    """One direction of one connection, from `source` to `target`.

    It holds what is under way, bounded by what fits on such a link, so that a faster sender is
    held back.
    """

    def __init__(self, source: LinkedPeer, target: LinkedPeer, chance: random.Random) -> None:
        self._source, self._target = source, target
        delay_s, jitter_s = source.delay_s, source.link.jitter_s if source.link else 0.0
        self._line = DelayLine(delay_s, jitter_s, chance)
        rate = min(source.rate_bytes_s, target.rate_bytes_s)
        least, most = _CHUNK_BYTES
        self.chunk_bytes = round(min(most, max(least, rate * _CHUNK_S)))
        in_flight = rate * (delay_s + jitter_s) if delay_s else 0.0
        self._most_bytes = in_flight + 4 * self.chunk_bytes
        self._held_bytes = 0

    def enter(self, n_bytes: int, now_s: float) -> tuple[float, float]:
        """Books bytes that were read.

        Returns:
            (when more may be read as far as the rates go, when these are to be delivered).
        """
        ways = self._source.up.take(n_bytes, now_s), self._target.down.take(n_bytes, now_s)
        self._source.sent_bytes += n_bytes
        self._target.received_bytes += n_bytes
        passed_s = max(now_s, *ways)
        self._held_bytes += n_bytes
        return passed_s, self._line.due(passed_s)

    def leave(self, n_bytes: int) -> None:
        """Bytes were delivered."""
        self._held_bytes -= n_bytes

    @property
    def full(self) -> bool:
        """Whether nothing more may be read until some bytes were delivered."""
        return self._held_bytes >= self._most_bytes


def next_break_s(loss: float, chance: random.Random) -> float:
    """Seconds to a worker's next broken connection, `loss` a minute on average."""
    return chance.expovariate(loss / 60) if loss else math.inf


_LEAST_SLEEP_S = 0.001  # shorter waits are made up for by the next one
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
_number = itertools.count()


class Connection:
    """Between the member that opened it and the one it meant.

    Args:
        client, server: connected, non-blocking sockets; the caller closes them after `run`.
        seed: of the jitter.
    """

    def __init__(
        self,
        member: LinkedPeer,
        target: LinkedPeer,
        client: socket.socket,
        server: socket.socket,
        seed: float,
    ) -> None:
        self.number = next(_number)
        self._member, self._target = member, target
        self._client, self._server = client, server
        self._seed = seed
        self._task: asyncio.Task[None] | None = None

    def touches(self, member: LinkedPeer) -> bool:
        return member in (self._member, self._target)

    async def run(self) -> None:
        """Until both directions have ended, or one has failed."""
        chance = random.Random(self._seed)
        there = ShapedPipe(self._member, self._target, chance)
        back = ShapedPipe(self._target, self._member, chance)
        task = self._task = asyncio.create_task(self._both(there, back))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        if task.cancelled():
            self._reset()
        elif error := task.exception():
            self._reset()  # the other end must not take it for a regular end
            _raise_unless_lost(error)

    def break_off(self) -> None:
        """Both ends see a reset, as when a router in between has forgotten the connection."""
        if self._task is not None:
            self._task.cancel()

    # --------------------------------------------------------------------------------- inside

    async def _both(self, there: ShapedPipe, back: ShapedPipe) -> None:
        async with asyncio.TaskGroup() as group:
            for pipe, source, target in (
                (there, self._client, self._server),
                (back, self._server, self._client),
            ):
                way = _Way(pipe, source, target)
                group.create_task(way.read())
                group.create_task(way.write())

    def _reset(self) -> None:
        for end in (self._client, self._server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class _Way:
    """One direction: `read` and `write` run side by side, with what is under way between them."""

    def __init__(self, pipe: ShapedPipe, source: socket.socket, target: socket.socket) -> None:
        self._pipe, self._source, self._target = pipe, source, target
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            chunk = await loop.sock_recv(self._source, self._pipe.chunk_bytes)
            more_s, due_s = self._pipe.enter(len(chunk), loop.time())
            self._under_way.append((due_s, chunk))
            self._news.set()
            if not chunk:
                return
            await _until(more_s)
            while self._pipe.full:
                self._room.clear()
                await self._room.wait()

    async def write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._under_way:
                self._news.clear()
                await self._news.wait()
            due_s, chunk = self._under_way.popleft()
            await _until(due_s)
            if not chunk:
                self._target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._target, chunk)
            self._pipe.leave(len(chunk))
            self._room.set()


async def _until(when_s: float) -> None:
    wait_s = when_s - asyncio.get_running_loop().time()
    if wait_s >= _LEAST_SLEEP_S:
        await asyncio.sleep(wait_s)


def _raise_unless_lost(error: BaseException) -> None:
    """Either end may go away at any time; everything else is a defect."""
    rest = error.split(OSError)[1] if isinstance(error, BaseExceptionGroup) else error
    if rest is not None:
        raise rest


_MAX_HEAD_BYTES = 8 * 1024
_CONNECT_S = 10.0
_RECEIVE_S = 0.05  # of the rate: what the kernel may hold for us, beside what is in the relay
_RECEIVE_BYTES = (64 * 1024, 1024 * 1024)  # least and most


class ProxyRefusal(Exception):
    """A request that is not relayed: an HTTP status line's code and reason."""


class Relay:
    """The proxy. Must be used within one running event loop.

    Args:
        members: by name.
        targets: each member's name, by its HOST:PORT.
        seed: of jitter and broken connections.
    """

    def __init__(
        self, members: Mapping[str, LinkedPeer], targets: Mapping[str, str], seed: int
    ) -> None:
        self.members, self._targets = members, targets
        self._chance = random.Random(seed)
        self._connections: set[Connection] = set()
        self._broken = 0

    async def serve(self, listeners: Mapping[str, socket.socket]) -> None:
        """Until cancelled; closes the listening sockets then. One per member."""
        with ExitStack() as stack:
            for listener in listeners.values():
                stack.enter_context(listener)
            async with asyncio.TaskGroup() as group:
                for name, listener in listeners.items():
                    group.create_task(self._accept(group, self.members[name], listener))
                    group.create_task(self._break_now_and_then(self.members[name]))

    def counters(self) -> dict[str, Any]:
        """Bytes that each member has sent and received, and how many connections were broken."""
        each = self.members.values()
        bytes_of = {member.name: [member.sent_bytes, member.received_bytes] for member in each}
        return {"bytes": bytes_of, "broken": self._broken}

    # --------------------------------------------------------------------------------- inside

    async def _accept(
        self, group: asyncio.TaskGroup, member: LinkedPeer, listener: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            client.setblocking(False)
            group.create_task(self._relay(member, client))

    async def _relay(self, member: LinkedPeer, client: socket.socket) -> None:
        """One connection, from its first byte to its last."""
        loop = asyncio.get_running_loop()
        server: socket.socket | None = None
        try:
            host, port, target = self._meant(*await _head(client))
            # The handshakes with the proxy took no time; those with the peer would have.
            await asyncio.sleep(member.delay_s + target.delay_s)
            server = await _reached(host, port, target)
            await loop.sock_sendall(client, b"HTTP/1.1 200 OK\r\n\r\n")
            connection = Connection(member, target, client, server, self._chance.random())
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)
        except ProxyRefusal as refusal:
            await _refuse(client, str(refusal))
        except OSError:  # either end has gone; the other will see it
            return
        finally:
            for each in filter(None, (client, server)):
                each.close()

    def _meant(self, method: str, address: str) -> tuple[str, int, LinkedPeer]:
        if method != "CONNECT":
            raise ProxyRefusal("405 only CONNECT is served here")
        if address not in self._targets:
            raise ProxyRefusal(f"403 {address} is not of this swarm")
        return *split_address(address), self.members[self._targets[address]]

    async def _break_now_and_then(self, member: LinkedPeer) -> None:
        loss = member.link.loss if member.link else 0.0
        while loss:
            await asyncio.sleep(next_break_s(loss, self._chance))
            own = [each for each in self._connections if each.touches(member)]
            if own:
                self._chance.choice(sorted(own, key=lambda each: each.number)).break_off()
                self._broken += 1


async def _head(client: socket.socket) -> tuple[str, str]:
    """(method, target) of a request. Raises ProxyRefusal, OSError."""
    loop, head = asyncio.get_running_loop(), b""
    while not head.endswith(b"\r\n\r\n"):
        more = await loop.sock_recv(client, _MAX_HEAD_BYTES)
        head += more
        if not more or len(head) > _MAX_HEAD_BYTES:
            raise ProxyRefusal("400 no request")
    method, _, rest = head.decode("latin-1").partition(" ")
    return method, rest.partition(" ")[0]


async def _reached(host: str, port: int, target: LinkedPeer) -> socket.socket:
    """Raises ProxyRefusal."""
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    server.setblocking(False)
    set_buffers(server, target)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(server, (host, port))
    except OSError as error:  # TimeoutError is one
        server.close()
        reason = os.strerror(error.errno) if error.errno else "no answer"
        raise ProxyRefusal(f"502 {reason}") from error
    except BaseException:
        server.close()
        raise
    return server


async def _refuse(client: socket.socket, reason: str) -> None:
    answer = f"HTTP/1.1 {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with suppress(OSError):
        await asyncio.get_running_loop().sock_sendall(client, answer.encode())


def set_buffers(end: socket.socket, member: LinkedPeer) -> None:
    """Lets the kernel hold little, so that senders feel the rate. To be called while it is new."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if member.link is None:
        return
    least, most = _RECEIVE_BYTES
    size = round(min(most, max(least, member.rate_bytes_s * _RECEIVE_S)))
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        end.setsockopt(socket.SOL_SOCKET, option, size)


def listen(host: str, member: LinkedPeer) -> socket.socket:
    """A listening socket on a free port. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        set_buffers(listener, member)  # accepted sockets inherit them
        listener.bind((host, 0))
        listener.listen(256)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


async def _main() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    options = json.loads(await reader.readline())
    members = {
        name: LinkedPeer(name, Link(**link) if link else None)
        for name, (_, link) in options["members"].items()
    }
    targets = {address: name for name, (address, _) in options["members"].items()}
    listeners = {name: listen(options["host"], member) for name, member in members.items()}
    ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    _answer({name: f"{options['host']}:{port}" for name, port in ports.items()})
    relay = Relay(members, targets, options["seed"])
    serving = asyncio.create_task(relay.serve(listeners))
    while await reader.readline():
        _answer(relay.counters())
    serving.cancel()
    await asyncio.wait([serving])


def _answer(document: object) -> None:
    print(json.dumps(document), flush=True)


def main() -> None:
    """The relay's process: until stdin ends."""
    import resource  # which Windows has not

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_main())


if __name__ == "__main__":
    main()
