"""A slow network in one process: an HTTP CONNECT proxy with a port of its own for each worker.

Who connects is known by the port, who is meant by the CONNECT. What passes between them is shaped
as `shaping` decides. No root needed. Run as a process (`python -m coordinator.links.relay`) it is
told on stdin, by lines, and answers each with a line of JSON; `RelayProcess` speaks that:

    {"host": ..., "seed": ..., "limit_rate": ..., "members": ..., "others": ...}    first
    cut w0 w1 | cut w2 | heal | counters | broken                                      then

It ends with its stdin. A cut link swallows nothing and answers nothing, like a network whose way is
gone: connections over it stand still until `heal`, and those attempted wait.
"""

import asyncio
import json
import os
import random
import resource
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from algorithms.link import Link
from coordinator.links.connection import Connection
from coordinator.links.shaping import Cuts, Member, next_break_s
from protos.addresses import split_address

_MAX_HEAD_BYTES = 8 * 1024
_CONNECT_S = 10.0
_RECEIVE_S = 0.05  # of the rate: what the kernel may hold for us, beside what is in the relay
_RECEIVE_BYTES = (64 * 1024, 1024 * 1024)  # least and most


class Refused(Exception):
    """A request that is not relayed: an HTTP status line's code and reason."""


class Relay:
    """The proxy. Must be used within one running event loop.

    Args:
        members: by name.
        targets: HOST:PORT of each member, and of whom else may be reached (None).
        seed: of jitter and broken connections.
    """

    def __init__(
        self, members: Mapping[str, Member], targets: Mapping[str, str | None], seed: int
    ) -> None:
        self.members, self._targets = members, targets
        self._chance = random.Random(seed)
        self._connections: set[Connection] = set()
        self._cuts = Cuts(tuple(members))
        self._healed = asyncio.Event()
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

    def obey(self, line: str) -> dict[str, Any]:
        """Carries out one command; returns the answer."""
        word, *names = line.split()
        try:
            match word:
                case "cut":
                    self._cuts.cut(*names)
                case "heal":
                    self._cuts.heal()
                    self._healed.set()
                    self._healed = asyncio.Event()
                case "counters":
                    each = self.members.values()
                    return {m.name: [m.sent_bytes, m.received_bytes] for m in each}
                case "broken":
                    return {"broken": self._broken}
                case _:
                    raise ValueError(f"{word!r} is none of cut, heal, counters, broken")
        except ValueError as error:
            return {"error": str(error)}
        return {"done": line}

    async def passable(self, one: Member | None, other: Member | None) -> None:
        """Returns once the link between these is not cut."""
        while one and other and self._cuts.between(one.name, other.name):
            await self._healed.wait()

    # --------------------------------------------------------------------------------- inside

    async def _accept(
        self, group: asyncio.TaskGroup, member: Member, listener: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            client.setblocking(False)
            group.create_task(self._relay(member, client))

    async def _relay(self, member: Member, client: socket.socket) -> None:
        """One connection, from its first byte to its last."""
        loop = asyncio.get_running_loop()
        server: socket.socket | None = None
        try:
            host, port, target = self._meant(*await _head(client))
            await self.passable(member, target)
            # The handshakes with the proxy took no time; those with the peer would have.
            await asyncio.sleep(member.delay_s + (target.delay_s if target else 0.0))
            server = await _reached(host, port, target)
            await loop.sock_sendall(client, b"HTTP/1.1 200 OK\r\n\r\n")
            connection = Connection(
                member, target, client, server, self.passable, self._chance.random()
            )
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)
        except Refused as refusal:
            await _refuse(client, str(refusal))
        except OSError:  # either end has gone; the other will see it
            return
        finally:
            for each in filter(None, (client, server)):
                each.close()

    def _meant(self, method: str, address: str) -> tuple[str, int, Member | None]:
        if method != "CONNECT":
            raise Refused("405 only CONNECT is served here")
        if address not in self._targets:
            raise Refused(f"403 {address} is not of this swarm")
        name = self._targets[address]
        return *split_address(address), self.members[name] if name else None

    async def _break_now_and_then(self, member: Member) -> None:
        loss = member.link.loss if member.link else 0.0
        while loss:
            await asyncio.sleep(next_break_s(loss, self._chance))
            own = [each for each in self._connections if each.touches(member)]
            if own:
                self._chance.choice(sorted(own, key=lambda each: each.number)).break_off()
                self._broken += 1


async def _head(client: socket.socket) -> tuple[str, str]:
    """(method, target) of a request. Raises Refused, OSError."""
    loop, head = asyncio.get_running_loop(), b""
    while not head.endswith(b"\r\n\r\n"):
        more = await loop.sock_recv(client, _MAX_HEAD_BYTES)
        head += more
        if not more or len(head) > _MAX_HEAD_BYTES:
            raise Refused("400 no request")
    method, _, rest = head.decode("latin-1").partition(" ")
    return method, rest.partition(" ")[0]


async def _reached(host: str, port: int, target: Member | None) -> socket.socket:
    """Raises Refused."""
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    server.setblocking(False)
    set_buffers(server, target)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(server, (host, port))
    except OSError as error:  # TimeoutError is one
        server.close()
        reason = os.strerror(error.errno) if error.errno else "no answer"
        raise Refused(f"502 {reason}") from error
    except BaseException:
        server.close()
        raise
    return server


async def _refuse(client: socket.socket, reason: str) -> None:
    answer = f"HTTP/1.1 {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with suppress(OSError):
        await asyncio.get_running_loop().sock_sendall(client, answer.encode())


def set_buffers(end: socket.socket, member: Member | None) -> None:
    """Lets the kernel hold little, so that senders feel the rate. To be called while it is new."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if member is None or member.link is None:
        return
    least, most = _RECEIVE_BYTES
    size = round(min(most, max(least, member.rate_bytes_s * _RECEIVE_S)))
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        end.setsockopt(socket.SOL_SOCKET, option, size)


def listen(host: str, member: Member) -> socket.socket:
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
    asked = json.loads(await reader.readline())
    members = {
        name: Member(name, Link(**link) if link else None, limit_rate=asked["limit_rate"])
        for name, (_, link) in asked["members"].items()
    }
    targets: dict[str, str | None] = dict.fromkeys(asked["others"])
    targets |= {address: name for name, (address, _) in asked["members"].items()}
    listeners = {name: listen(asked["host"], member) for name, member in members.items()}
    ports = {name: listener.getsockname()[1] for name, listener in listeners.items()}
    _answer({name: f"{asked['host']}:{port}" for name, port in ports.items()})
    relay = Relay(members, targets, asked["seed"])
    serving = asyncio.create_task(relay.serve(listeners))
    while line := (await reader.readline()).decode().strip():
        _answer(relay.obey(line))
    serving.cancel()
    await asyncio.wait([serving])


def _answer(document: object) -> None:
    print(json.dumps(document), flush=True)


def main() -> None:
    """The relay's process: until stdin ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_main())


if __name__ == "__main__":
    main()
