"""The transport over gRPC: one server, and per peer one channel for control and one for data.

Messages are bytes here; `protos/murmuration.proto` says what they are. Health checks of gRPC are
answered too. With a certificate, both sides prove who they are by TLS; without one nothing is
encrypted. The settings were measured: without BDP probing and a large look-ahead one stream over a
100 ms link stays at a tenth of what it can carry, and without keepalive a dead link is noticed
after many minutes.
"""

import asyncio
import os
from collections.abc import Callable
from typing import NamedTuple

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from worker.transport.base import (
    CONTROL_METHODS,
    DATA_METHODS,
    MAX_CONTROL_BYTES,
    MAX_DATA_BYTES,
    AddressInUse,
    Caller,
    Handler,
    Refused,
    Security,
    Stream,
    Traffic,
    Unreachable,
    Untrusted,
)

_PACKAGE = "/murmuration.v1."
_MAX_DETAILS = 300  # characters of what another peer says of a failure
# What grpc.aio raises for a stream that is over; the last where it has ended on its own meanwhile.
_ENDED = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError)
_WANTS = "it closes the connection: it may want a certificate, see --token"
_TAKES_NOT = "it closes the connection: it does not take this certificate"
# What gRPC says of a handshake, and what it means, by whether this side encrypts.
_HANDSHAKE = {
    False: [("Socket closed", _WANTS), ("reset by peer", _WANTS)],
    True: [
        ("WRONG_VERSION_NUMBER", "it does not encrypt: it was started with --insecure"),
        ("Hostname Verification", "somebody else answers there: the certificate has another name"),
        ("TSI_PROTOCOL_FAILURE", "its certificate is not of this run's authority"),
        ("Socket closed", _TAKES_NOT),
        ("reset by peer", _TAKES_NOT),
    ],
}

_COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_DATA_BYTES),
    ("grpc.max_send_message_length", MAX_DATA_BYTES),
    ("grpc.http2.bdp_probe", 1),
    ("grpc.http2.lookahead_bytes", 16 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # else two peers could share a port and half of the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),  # BDP probes of a busy link are no offence
    ("grpc.server_handshake_timeout_ms", 10_000),  # of TLS, and of HTTP/2 without it
]
_MOST_CONNECTIONS = 4096
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else control and data would share one connection
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # for one attempt: a slow link takes several trips
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class GrpcTransport:
    """Serves `host:port` and calls others. Port 0 takes a free one.

    Args:
        proxy: HOST:PORT of an HTTP CONNECT proxy to reach others through. All of them: exceptions
            that the environment makes for the web (`no_proxy`) do not count in this process then.
        security: what this process proves itself by, and believes others by; None: nothing is
            encrypted, and anything that reaches the port may call.
    """

    def __init__(
        self, listen_address: str, proxy: str | None = None, security: Security | None = None
    ) -> None:
        self._listen_address, self._security = listen_address, security
        self._channel_options = [*_CHANNEL_OPTIONS, *_proxy_options(proxy)]
        self._traffic = Traffic()
        self._server: aio.Server | None = None
        self._channels: dict[_Line, aio.Channel] = {}

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    @property
    def encrypted(self) -> bool:
        return self._security is not None

    async def listen(self, handler: Handler) -> str:
        most = ("grpc.max_allowed_incoming_connections", _most_connections())
        server = aio.server(options=[*_SERVER_OPTIONS, most])
        router = _Router(handler, self._traffic, self._security)
        server.add_generic_rpc_handlers((router,))
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its stubs
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        host = self._listen_address.rpartition(":")[0]
        try:
            port = self._add_port(server)
        except RuntimeError:
            port = 0
        if port == 0:
            raise AddressInUse(
                f"cannot listen on {self._listen_address}: the port is taken or the address is not "
                "this machine's; choose another with --listen HOST:PORT (port 0 takes a free one)"
            )
        await server.start()
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        return f"{host}:{port}"

    async def call(
        self, address: str, method: str, request: bytes, timeout_s: float, peer: str | None = None
    ) -> bytes:
        line = self._line(address, peer, data=False)
        multicallable = self._channel(line).unary_unary(_PACKAGE + method, _as_is, _as_is)
        self._traffic.count_sent(method, len(request))
        try:
            answer: bytes = await multicallable(request, timeout=timeout_s)
        except aio.AioRpcError as error:
            self._forget(line, error)
            raise _unreachable(line, error) from error
        self._traffic.count_received(method, len(answer))
        return answer

    def open(self, address: str, method: str, peer: str | None = None) -> Stream:
        line = self._line(address, peer, data=True)
        multicallable = self._channel(line).stream_stream(_PACKAGE + method, _as_is, _as_is)
        return _ClientStream(
            line,
            method,
            multicallable(None),
            self._traffic,
            lambda error: self._forget(line, error),
        )

    def connect(self, address: str, peer: str | None = None) -> None:
        self._channel(self._line(address, peer, data=True)).get_state(try_to_connect=True)

    def renew(self, security: Security) -> None:
        self._security = security
        self._channels.clear()  # a call that is under way keeps its own

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None

    def _add_port(self, server: aio.Server) -> int:
        if (security := self._security) is None:
            return server.add_insecure_port(self._listen_address)
        credentials = grpc.dynamic_ssl_server_credentials(
            _server_configuration(security),
            lambda: _server_configuration(self._security or security),  # at each handshake
            require_client_authentication=True,
        )
        return server.add_secure_port(self._listen_address, credentials)

    def _line(self, address: str, peer: str | None, *, data: bool) -> "_Line":
        security = self._security
        return _Line(address, data, security.server_name(peer) if security is not None else None)

    def _forget(self, line: "_Line", error: aio.AioRpcError) -> None:
        """Drops a channel that cannot connect: it would fail every call until its back-off ends,
        though the peer may have come up meanwhile. How often to try is for the caller to say."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._channels.pop(line, None)

    def _channel(self, line: "_Line") -> aio.Channel:
        if line not in self._channels:
            self._channels[line] = self._new_channel(line)
        return self._channels[line]

    def _new_channel(self, line: "_Line") -> aio.Channel:
        security = self._security
        if security is None or line.server_name is None:
            return aio.insecure_channel(line.address, options=self._channel_options)
        credentials = grpc.ssl_channel_credentials(
            security.authority, security.key, security.certificate
        )
        # Peers have names, and come to other addresses: what is verified is not the host's name.
        name = ("grpc.ssl_target_name_override", line.server_name)
        options = [*self._channel_options, name]
        return aio.secure_channel(line.address, credentials, options=options)


class _Line(NamedTuple):
    """Which connection. Args: server_name: that the certificate there must have; None: not
    encrypted."""

    address: str
    data: bool
    server_name: str | None


class _ClientStream:
    def __init__(
        self,
        line: _Line,
        method: str,
        call: "aio.StreamStreamCall[bytes, bytes]",
        traffic: Traffic,
        failed: Callable[[aio.AioRpcError], None],
    ) -> None:
        self._line, self._method, self._call, self._traffic = line, method, call, traffic
        self._failed = failed

    async def send(self, message: bytes) -> None:
        self._traffic.count_sent(self._method, len(message))
        try:
            await self._call.write(message)
        except _ENDED as error:
            raise self._broken(error) from error

    async def done(self) -> None:
        try:
            await self._call.done_writing()
        except _ENDED as error:
            raise self._broken(error) from error

    async def receive(self) -> bytes | None:
        try:
            message = await self._call.read()
        except _ENDED as error:
            raise self._broken(error) from error
        if not isinstance(message, bytes):  # grpc.aio.EOF
            return None
        self._traffic.count_received(self._method, len(message))
        return message

    def cancel(self) -> None:
        self._call.cancel()

    def _broken(self, error: Exception) -> Unreachable:
        if isinstance(error, aio.AioRpcError):
            self._failed(error)
            return _unreachable(self._line, error)
        return Unreachable(f"{self._line.address}: the stream has ended")


class _ServerStream:
    def __init__(
        self, method: str, context: "aio.ServicerContext[bytes, bytes]", traffic: Traffic
    ) -> None:
        self._method, self._context, self._traffic = method, context, traffic

    async def send(self, message: bytes) -> None:
        self._traffic.count_sent(self._method, len(message))
        try:
            await self._context.write(message)
        except (aio.AioRpcError, aio.UsageError, aio.InternalError) as error:
            raise Unreachable(f"{self._context.peer()}: the stream has ended") from error

    async def done(self) -> None:
        """The stream ends when its handler returns."""

    async def receive(self) -> bytes | None:
        try:
            message: object = await self._context.read()
        except (aio.AioRpcError, aio.UsageError, aio.InternalError) as error:
            raise Unreachable(f"{self._context.peer()}: the stream has ended") from error
        if not isinstance(message, bytes):  # grpc.aio.EOF
            return None
        self._traffic.count_received(self._method, len(message))
        return message

    def cancel(self) -> None:
        """Served streams end by returning; nothing to cancel."""


class _Router(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only the stubs are generic
    """Leads each known method to the handler, as bytes."""

    def __init__(self, handler: Handler, traffic: Traffic, security: Security | None) -> None:
        self._handler, self._traffic, self._security = handler, traffic, security
        self._handlers = {
            **{_PACKAGE + method: self._unary(method) for method in CONTROL_METHODS},
            **{_PACKAGE + method: self._stream(method) for method in DATA_METHODS},
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        return self._handlers.get(handler_call_details.method)

    def _unary(self, method: str) -> "grpc.RpcMethodHandler[bytes, bytes]":
        handler, traffic = self._handler, self._traffic

        async def serve(request: bytes, context: "aio.ServicerContext[bytes, bytes]") -> bytes:
            traffic.count_received(method, len(request))
            if len(request) > MAX_CONTROL_BYTES:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{method} takes at most {MAX_CONTROL_BYTES} bytes, got {len(request)}",
                )
            try:
                answer = await handler.on_call(method, request, self._caller(context))
            except Refused as refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
            traffic.count_sent(method, len(answer))
            return answer

        return grpc.unary_unary_rpc_method_handler(serve)

    def _stream(self, method: str) -> "grpc.RpcMethodHandler[bytes, bytes]":
        handler, traffic = self._handler, self._traffic

        async def serve(_requests: object, context: "aio.ServicerContext[bytes, bytes]") -> None:
            stream = _ServerStream(method, context, traffic)
            try:
                await handler.on_stream(method, stream, self._caller(context))
            except Refused as refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))

        return grpc.stream_stream_rpc_method_handler(serve)

    def _caller(self, context: "aio.ServicerContext[bytes, bytes]") -> Caller:
        """TLS has verified the certificate before it comes to a call."""
        if self._security is None:
            return Caller(context.peer())
        names = context.auth_context().get("x509_subject_alternative_name", ())
        certified = self._security.certified([name.decode() for name in names])
        return Caller(context.peer(), *certified)


def _server_configuration(security: Security) -> "grpc.ServerCertificateConfiguration":
    return grpc.ssl_server_certificate_configuration(
        [(security.key, security.certificate)], security.authority
    )


def _most_connections() -> int:
    """That this process accepts: half of its open files are left to the rest of it."""
    try:
        import resource
    except ImportError:  # no such limit there
        return _MOST_CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    return _MOST_CONNECTIONS if unlimited else max(1, min(_MOST_CONNECTIONS, files // 2))


def _proxy_options(proxy: str | None) -> list[tuple[str, int | str]]:
    if proxy is None:  # peers are peers, whatever the environment says of the web
        return [("grpc.enable_http_proxy", 0)]
    os.environ["no_grpc_proxy"] = ""  # noqa: SIM112 (gRPC reads it before no_proxy)
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", f"http://{proxy}")]


def _as_is(message: bytes) -> bytes:
    return message


def _unreachable(line: _Line, error: aio.AioRpcError) -> Unreachable:
    code = error.code().name.lower().replace("_", " ")
    details = (error.details() or "").splitlines()
    # The peer's own words, where it was the one to end the call.
    said = "".join(c for c in details[0][:_MAX_DETAILS] if c.isprintable()) if details else ""
    if said.startswith("failed to connect"):
        for part, meaning in _HANDSHAKE[line.server_name is not None]:
            if part in said:
                return Untrusted(f"{line.address}: {meaning}")
    return Unreachable(f"{line.address}: {code}" + (f" ({said})" if said else ""))
