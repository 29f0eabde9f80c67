"""A slow network in one process: an HTTP CONNECT proxy with a port of its own for each worker.

The port says which worker connects, the CONNECT to which one. A chunk of bytes passes the sender's
upward bucket and the receiver's downward one, then waits in a delay line. No root needed. As a
process (`ProxyProcess`) it reads what it is to do from the first line of stdin, and answers each
further one with what has passed, as a line of JSON. It ends with its stdin.
"""

import asyncio
import json
import math
import os
import random
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from murmuration.algorithms.link import Link
from murmuration.protos.addresses import split_address

BURST_S = 0.02  # of the rate: makes up for timers that fire late
_CHUNK_S = 0.004  # of the rate
_CHUNK_BYTES = (4 * 1024, 128 * 1024)  # least and most
_LEAST_SLEEP_S = 0.001  # shorter waits are made up for by the next one
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
_MAX_HEAD_BYTES = 8 * 1024
_CONNECT_S, _FULL_S = 10.0, 0.1
_RECEIVE_S = 0.05  # of the rate: what the kernel may hold for us, beside what is in the proxy
_RECEIVE_BYTES = (64 * 1024, 1024 * 1024)  # least and most


class Bucket:
    """One direction of a link, first come first served. In any T seconds at most
    rate * (T + BURST_S) bytes pass. Args: rate_bytes_s: infinite lets everything pass at once."""

    def __init__(self, rate_bytes_s: float) -> None:
        self._rate, self._free_at_s = rate_bytes_s, -math.inf

    def take(self, n_bytes: int, now_s: float) -> float:
        """Books the next bytes; returns when the last has passed, `now_s` or before if at once."""
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + n_bytes / self._rate
        return self._free_at_s


class LinkedPeer:
    """One worker's link, None where it is not shaped: two buckets, and what has gone through."""

    def __init__(self, name: str, link: Link | None) -> None:
        self.name, self.link = name, link
        self.sent_bytes = self.received_bytes = 0
        self.rate_bytes_s = math.inf if link is None else link.rate_mbps * 1e6 / 8
        self.delay_s = 0.0 if link is None else link.delay_s
        self.up, self.down = Bucket(self.rate_bytes_s), Bucket(self.rate_bytes_s)


class ShapedPipe:
    """One direction of one connection. It holds what fits on such a link, so that a faster sender
    is held back. Bytes come late, by the source's delay and jitter, but in order."""

    def __init__(self, source: LinkedPeer, target: LinkedPeer, chance: random.Random) -> None:
        self._source, self._target, self._chance = source, target, chance
        self._jitter_s = source.link.jitter_s if source.link else 0.0
        rate = min(source.rate_bytes_s, target.rate_bytes_s)
        least, most = _CHUNK_BYTES
        self.chunk_bytes = round(min(most, max(least, rate * _CHUNK_S)))
        in_flight = rate * (source.delay_s + self._jitter_s) if source.delay_s else 0.0
        self._most_bytes = in_flight + 4 * self.chunk_bytes
        self._held_bytes, self._due_s = 0, -math.inf

    def enter(self, n_bytes: int, now_s: float) -> tuple[float, float]:
        """Books bytes that were read. Returns when more may be read, and when these are due."""
        ways = self._source.up.take(n_bytes, now_s), self._target.down.take(n_bytes, now_s)
        self._source.sent_bytes += n_bytes
        self._target.received_bytes += n_bytes
        self._held_bytes += n_bytes
        passed_s = max(now_s, *ways)
        jitter_s = self._chance.uniform(-self._jitter_s, self._jitter_s) if self._jitter_s else 0.0
        self._due_s = max(self._due_s, passed_s + self._source.delay_s + jitter_s)
        return passed_s, self._due_s

    def leave(self, n_bytes: int) -> None:
        self._held_bytes -= n_bytes

    @property
    def full(self) -> bool:
        """Tells whether nothing more may be read until some bytes were delivered."""
        return self._held_bytes >= self._most_bytes


async def _pass_on(pipe: ShapedPipe, source: socket.socket, target: socket.socket) -> None:
    """Reads and writes one direction side by side, until the source sends no more."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    room = asyncio.Event()

    async def until(when_s: float) -> None:
        if (wait_s := when_s - loop.time()) >= _LEAST_SLEEP_S:
            await asyncio.sleep(wait_s)

    async def read() -> None:
        while True:
            chunk = await loop.sock_recv(source, pipe.chunk_bytes)
            more_s, due_s = pipe.enter(len(chunk), loop.time())
            under_way.put_nowait((due_s, chunk))
            if not chunk:
                return
            await until(more_s)
            while pipe.full:
                room.clear()
                await room.wait()

    async def write() -> None:
        while True:
            due_s, chunk = await under_way.get()
            await until(due_s)
            if not chunk:
                target.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(target, chunk)
            pipe.leave(len(chunk))
            room.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        group.create_task(write())


class ProxyRefusal(Exception):
    """A request that is not passed on: an HTTP status line's code and reason."""


class ShapingProxy:
    """The proxy, in one running event loop. `targets` has each member's name by HOST:PORT."""

    def __init__(
        self, members: Mapping[str, LinkedPeer], targets: Mapping[str, str], seed: int
    ) -> None:
        self.members, self._targets = members, targets
        self._chance = random.Random(seed)
        # The task of each connection, oldest first, and between whom it is.
        self._connections: dict[asyncio.Task[None], tuple[LinkedPeer, LinkedPeer]] = {}

    async def serve(self, listeners: Mapping[str, socket.socket]) -> None:
        """Until cancelled; closes the listening sockets then. One per member."""
        with ExitStack() as stack:
            for listener in listeners.values():
                stack.enter_context(listener)
            async with asyncio.TaskGroup() as group:
                for name, listener in listeners.items():
                    group.create_task(self._accept(group, self.members[name], listener))
                    group.create_task(self._break_now_and_then(self.members[name]))

    async def _accept(
        self, group: asyncio.TaskGroup, member: LinkedPeer, listener: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # too many files are open: it waits in the kernel
                await asyncio.sleep(_FULL_S)
                continue
            client.setblocking(False)
            group.create_task(self._serve_client(member, client))

    async def _serve_client(self, member: LinkedPeer, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        server: socket.socket | None = None
        try:
            method, address = await _head(client)
            if method != "CONNECT":
                raise ProxyRefusal("405 only CONNECT is served here")
            if address not in self._targets:
                raise ProxyRefusal(f"403 {address} is not of this swarm")
            target = self.members[self._targets[address]]
            # The handshakes with the proxy took no time; those with the peer would have.
            await asyncio.sleep(member.delay_s + target.delay_s)
            server = await _reached(*split_address(address), target)
            await loop.sock_sendall(client, b"HTTP/1.1 200 OK\r\n\r\n")
            await self._carry(member, target, client, server)
        except ProxyRefusal as refusal:
            answer = f"HTTP/1.1 {refusal}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            with suppress(OSError):
                await loop.sock_sendall(client, answer.encode())
        except OSError:  # either end has gone; the other will see it
            return
        finally:
            for each in filter(None, (client, server)):
                each.close()

    async def _carry(
        self, member: LinkedPeer, target: LinkedPeer, client: socket.socket, server: socket.socket
    ) -> None:
        """Passes bytes on until both directions have ended, or one has failed, or the connection is
        broken: then both ends see a reset, which they cannot take for a regular end."""
        chance = random.Random(self._chance.random())
        there, back = ShapedPipe(member, target, chance), ShapedPipe(target, member, chance)

        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = member, target
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(_pass_on(there, client, server))
                both_ways.create_task(_pass_on(back, server, client))
        except (asyncio.CancelledError, BaseExceptionGroup) as error:
            for end in (client, server):
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Either end may go away at any time; everything else is a defect.
            if isinstance(error, BaseExceptionGroup) and (defect := error.split(OSError)[1]):
                raise defect from None
        finally:
            del self._connections[task]

    async def _break_now_and_then(self, member: LinkedPeer) -> None:
        while member.link and member.link.loss:
            await asyncio.sleep(self._chance.expovariate(member.link.loss / 60))
            if own := [task for task, ends in self._connections.items() if member in ends]:
                self._chance.choice(own).cancel()


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
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    server.setblocking(False)
    set_buffers(server, target)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(server, (host, port))
    except BaseException as error:
        server.close()
        if not isinstance(error, OSError):  # TimeoutError is one
            raise
        reason = os.strerror(error.errno) if error.errno else "no answer"
        raise ProxyRefusal(f"502 {reason}") from error
    return server


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
    host, told = options["host"], options["members"]
    members = {n: LinkedPeer(n, Link(**link) if link else None) for n, (_, link) in told.items()}
    listeners = {name: listen(host, member) for name, member in members.items()}
    proxies = {name: f"{host}:{each.getsockname()[1]}" for name, each in listeners.items()}
    print(json.dumps(proxies), flush=True)
    proxy = ShapingProxy(members, {address: n for n, (address, _) in told.items()}, options["seed"])
    serving = asyncio.create_task(proxy.serve(listeners))
    while await reader.readline():
        counts = {
            name: {"sent_bytes": each.sent_bytes, "received_bytes": each.received_bytes}
            for name, each in members.items()
        }
        print(json.dumps(counts), flush=True)
    serving.cancel()
    await asyncio.wait([serving])


def main() -> None:
    import resource  # which Windows has not

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_main())


if __name__ == "__main__":
    main()
