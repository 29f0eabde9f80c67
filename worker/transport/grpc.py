"""The transport over gRPC: one server, and per peer one channel for control and one for data.

Messages are bytes here; `protos/murmuration.proto` says what they are. With a certificate, both
sides prove who they are by TLS; without one nothing is encrypted. The settings were measured:
without BDP probing and a large look-ahead one stream over a 100 ms link stays at a tenth of what it
can carry, and without keepalive a dead link is noticed after many minutes.
"""

import asyncio
import gc
import itertools
import os
import socket
import stat
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from grpc import aio

from murmuration.protos import reach
from murmuration.worker import transport
from murmuration.worker.identity.serving import ServerCertificate
from murmuration.worker.transport import Stream, Traffic, Unreachable
from murmuration.worker.transport.served import COMMON_OPTIONS, PACKAGE, Router, server_options

if TYPE_CHECKING:
    from murmuration.worker.identity.certificates import Identity

_MAX_DETAILS = 300  # characters of what another peer says of a failure
# What grpc.aio raises for a stream that is over; the last two where it has ended meanwhile.
_ENDED = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError, aio.InternalError)

_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *COMMON_OPTIONS,
    ("grpc.http2.bdp_probe", 1),
    ("grpc.http2.lookahead_bytes", 16 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),  # else control and data would share one connection
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # for one attempt: a slow link takes several trips
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

_served: set[int] = set()  # ports, of this process
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_OPEN_FILES = "/proc/self/fd"


def _leave_to_the_parent() -> None:
    """In a forked process, such as a loader's worker. It has none of gRPC's threads, so that what
    gRPC holds must not be collected. Nor may it keep a port when its parent has been killed."""
    gc.freeze()
    with suppress(OSError):
        for fd in map(int, os.listdir(_OPEN_FILES) if _served else ()):
            with suppress(OSError), ExitStack() as kept:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    found = socket.socket(fileno=fd)
                    kept.callback(found.detach)
                    if found.family in _INTERNET and found.getsockname()[1] in _served:
                        os.close(fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


class GrpcTransport:
    """Serves `host:port` and calls others. Port 0 takes a free one. Args: proxy: HOST:PORT of an
    HTTP CONNECT proxy to reach all others through, whatever `no_proxy` says in the environment;
    security: proof of this process and others; None: nothing is encrypted, anything may call."""

    def __init__(
        self, listen_address: str, proxy: str | None = None, security: "Identity | None" = None
    ) -> None:
        self._listen_address, self._security = listen_address, security
        self._shown: ServerCertificate | None = None
        self._proxy, self._proxy_options = proxy, _proxy_options(proxy)
        self.traffic, self.encrypted = Traffic(), security is not None
        self._server: aio.Server | None = None
        self._connections: dict[_Line, _Connection] = {}
        self._targets: dict[str, str] = {}  # of addresses that have a name
        self._numbers = itertools.count()
        self._ending: set[asyncio.Task[None]] = set()
        self.tunnel: Callable[[str], str | None] = lambda address: None

    async def listen(self, handler: transport.Handler) -> str:
        server = aio.server(options=server_options())
        server.add_generic_rpc_handlers((Router(handler, self.traffic, self._security),))
        host = self._listen_address.rpartition(":")[0]
        try:
            if self._security is None:
                port = server.add_insecure_port(self._listen_address)
            else:
                self._shown = ServerCertificate(self._security)
                port = server.add_secure_port(self._listen_address, self._shown.credentials())
        except RuntimeError:
            port = 0
        if port == 0:
            problem = reach.listening_problem(self._listen_address)
            raise transport.AddressInUse(
                reach.cannot_listen("--listen", self._listen_address, problem)
            )
        await server.start()
        self._server = server
        _served.add(port)
        return f"{host}:{port}"

    async def call(
        self, address: str, method: str, request: bytes, timeout_s: float, peer: str | None = None
    ) -> bytes:
        line = self._line(address, peer, "control")
        if not (line in self._connections or line.tunnel or self._proxy):  # it looks names up
            try:
                found = await reach.find_target(address, min(reach.LOOK_UP_S, timeout_s))
            except reach.UnknownName as error:
                raise Unreachable(f"{address}: {error}") from error
            self._targets[address] = found  # streams use it too
        connection = self._connection(line)
        self.traffic.count_sent(method, len(request))
        connection.uses += 1
        try:
            multicallable = connection.channel.unary_unary(PACKAGE + method, None, None)
            answer: bytes = await multicallable(request, timeout=timeout_s)
        except aio.AioRpcError as error:
            self._forget(line, error)
            raise _unreachable(line, error) from error
        finally:
            connection.uses -= 1
        self.traffic.count_received(method, len(answer))
        return answer

    def open(self, address: str, method: str, peer: str | None = None) -> Stream:
        alone = method in transport.RELAY_METHODS
        line = self._line(address, peer, f"{method} {next(self._numbers)}" if alone else "data")
        connection = self._connection(line)
        call = connection.channel.stream_stream(PACKAGE + method, None, None)(None)
        connection.uses += 1

        def ended(_call: object) -> None:
            connection.uses -= 1
            if alone:
                self._end(line)

        call.add_done_callback(ended)
        # What a tunnel carries is counted by what is in it.
        traffic = Traffic() if alone else self.traffic
        return _ClientStream(line, method, peer, call, traffic, partial(self._forget, line))

    def connect(self, address: str, peer: str | None = None) -> None:
        self._connection(self._line(address, peer, "data")).channel.get_state(try_to_connect=True)

    def drop(self, address: str) -> None:
        for line in [each for each in self._connections if each.address == address]:
            self._end(line)

    def close_unneeded(self, needed: Container[str]) -> set[str]:
        for line, connection in list(self._connections.items()):
            if line.address not in needed and not connection.uses:
                self._end(line)
        return {line.address for line in self._connections}

    def renew(self, security: "Identity") -> None:
        self._security = security
        if self._shown is not None:
            self._shown.renew(security)
        self._connections.clear()  # a call that is under way keeps its own

    async def close(self) -> None:
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            await connection.channel.close(None)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None

    def _line(self, address: str, peer: str | None, use: str) -> "_Line":
        security = self._security
        name = security.server_name(peer) if security is not None else None
        return _Line(address, use, name, self.tunnel(address))

    def _end(self, line: "_Line") -> None:
        connection = self._connections.pop(line, None)
        if all(each.address != line.address for each in self._connections):
            self._targets.pop(line.address, None)
        if connection is not None:
            task = asyncio.ensure_future(connection.channel.close(None))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _forget(self, line: "_Line", error: aio.AioRpcError) -> None:
        """Drops a channel that cannot connect: it would fail until its back-off ends."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._connections.pop(line, None)

    def _connection(self, line: "_Line") -> "_Connection":
        if line in self._connections:
            return self._connections[line]
        security, ways = self._security, reach.ways(line.address, line.tunnel)
        if self._proxy:  # it is asked for one
            ways = [line.tunnel or ways[0]]
        target = self._targets.get(line.address) or reach.known_target(",".join(ways))
        proxy = self._proxy_options if line.tunnel is None else _proxy_options(None)
        options = [*_CHANNEL_OPTIONS, *proxy]
        if security is None or line.server_name is None:
            options.append(("grpc.default_authority", ways[0]))
            channel = aio.insecure_channel(target, options=options)
        else:
            pems = security.authority, security.key, security.certificate
            # Peers have names, and come to other addresses: the host's name is not verified.
            options.append(("grpc.ssl_target_name_override", line.server_name))
            credentials = grpc.ssl_channel_credentials(*pems)
            channel = aio.secure_channel(target, credentials, options=options)
        self._connections[line] = connection = _Connection(channel)
        return connection


class _Line(NamedTuple):  # which connection
    address: str
    use: str  # those with one use have one connection
    server_name: str | None  # that the certificate there must have; None: not encrypted
    tunnel: str | None  # HOST:PORT that leads there; None: the address itself


@dataclass
class _Connection:
    channel: aio.Channel
    uses: int = 0


class _ClientStream:
    def __init__(
        self,
        line: _Line,
        method: str,
        peer: str | None,
        call: "aio.StreamStreamCall[bytes, bytes]",
        traffic: Traffic,
        failed: Callable[[aio.AioRpcError], None],
    ) -> None:
        self._line, self._method, self._call, self._traffic = line, method, call, traffic
        self._peer, self._failed = peer, failed

    async def send(self, message: bytes) -> None:
        """Goes below `write`. That takes a call which the other side has ended early for done: its
        last words are lost, and it keeps its place on the connection though it is cancelled
        (https://github.com/grpc/grpc/issues/36066)."""
        self._traffic.count_sent(self._method, len(message), self._peer)
        below: Any = self._call
        try:
            await self._call.wait_for_connection()
            await below._cython_call.send_serialized_message(message)
        except _ENDED as error:
            raise self._broken(error) from error
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def done(self) -> None:
        with suppress(*_ENDED):  # what the other side has said is there all the same
            await self._call.done_writing()

    async def receive(self) -> bytes | None:
        try:
            message = await self._call.read()
        except _ENDED as error:
            raise self._broken(error) from error
        if not isinstance(message, bytes):  # grpc.aio.EOF
            return None
        self._traffic.count_received(self._method, len(message), self._peer)
        return message

    def cancel(self) -> None:
        self._call.cancel()

    def _broken(self, error: Exception) -> Unreachable:
        if isinstance(error, aio.AioRpcError):
            self._failed(error)
            return _unreachable(self._line, error)
        return Unreachable(f"{self._line.address}: the stream has ended")


def _proxy_options(proxy: str | None) -> list[tuple[str, int | str]]:
    if proxy is None:  # peers are peers, whatever the environment says of the web
        return [("grpc.enable_http_proxy", 0)]
    os.environ["no_grpc_proxy"] = ""  # noqa: SIM112 (gRPC reads it before no_proxy)
    with suppress(reach.UnknownName):  # gRPC will fail, and say so
        proxy = reach.numeric(proxy)
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", f"http://{proxy}")]


def _unreachable(line: _Line, error: aio.AioRpcError) -> Unreachable:
    details = (error.details() or "").splitlines()
    # The peer's own words, where it was the one to end the call.
    said = "".join(c for c in details[0][:_MAX_DETAILS] if c.isprintable()) if details else ""
    alone = len(reach.ways(line.address, line.tunnel)) == 1 and line.tunnel is None
    if alone and (why := reach.mismatch(said, encrypts=line.server_name is not None)):
        return transport.Untrusted(f"{line.address}: {why}", closed=why.closed)
    refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT  # as `served` has it
    return (transport.Untrusted if refused else Unreachable)(
        f"{line.address}: {reach.plain_cause(error.code().name, said)}"
    )
