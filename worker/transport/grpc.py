"""The transport over gRPC: one server, and per peer one channel for control and one for data.

Messages are bytes here; `protos/murmuration.proto` says what they are. Health checks of gRPC are
answered too. The settings were measured:
without BDP probing and a large look-ahead one stream over a 100 ms link stays at a
tenth of what it can carry, and without keepalive a dead link is noticed after many minutes.
"""

import asyncio
import os
from collections.abc import Callable

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from worker.transport.base import (
    CONTROL_METHODS,
    DATA_METHODS,
    MAX_CONTROL_BYTES,
    MAX_DATA_BYTES,
    AddressInUse,
    Handler,
    Refused,
    Stream,
    Traffic,
    Unreachable,
)

_PACKAGE = "/murmuration.v1."
_MAX_DETAILS = 300  # characters of what another peer says of a failure
# What grpc.aio raises for a stream that is over; the last where it has ended on its own meanwhile.
_ENDED = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError)

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
]
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
    """

    def __init__(self, listen_address: str, proxy: str | None = None) -> None:
        self._listen_address = listen_address
        self._channel_options = [*_CHANNEL_OPTIONS, *_proxy_options(proxy)]
        self._traffic = Traffic()
        self._server: aio.Server | None = None
        self._channels: dict[tuple[str, bool], aio.Channel] = {}

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    async def listen(self, handler: Handler) -> str:
        server = aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((_Router(handler, self._traffic),))
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its stubs
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        host = self._listen_address.rpartition(":")[0]
        try:
            port = server.add_insecure_port(self._listen_address)
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

    async def call(self, address: str, method: str, request: bytes, timeout_s: float) -> bytes:
        multicallable = self._channel(address, data=False).unary_unary(
            _PACKAGE + method, _as_is, _as_is
        )
        self._traffic.count_sent(method, len(request))
        try:
            answer: bytes = await multicallable(request, timeout=timeout_s)
        except aio.AioRpcError as error:
            self._forget(address, data=False, error=error)
            raise Unreachable(_describe(address, error)) from error
        self._traffic.count_received(method, len(answer))
        return answer

    def open(self, address: str, method: str) -> Stream:
        multicallable = self._channel(address, data=True).stream_stream(
            _PACKAGE + method, _as_is, _as_is
        )
        return _ClientStream(
            address,
            method,
            multicallable(None),
            self._traffic,
            lambda error: self._forget(address, data=True, error=error),
        )

    def connect(self, address: str) -> None:
        self._channel(address, data=True).get_state(try_to_connect=True)

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None

    def _forget(self, address: str, *, data: bool, error: aio.AioRpcError) -> None:
        """Drops a channel that cannot connect: it would fail every call until its back-off ends,
        though the peer may have come up meanwhile. How often to try is for the caller to say."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._channels.pop((address, data), None)

    def _channel(self, address: str, *, data: bool) -> aio.Channel:
        key = (address, data)
        if key not in self._channels:
            self._channels[key] = aio.insecure_channel(address, options=self._channel_options)
        return self._channels[key]


class _ClientStream:
    def __init__(
        self,
        address: str,
        method: str,
        call: "aio.StreamStreamCall[bytes, bytes]",
        traffic: Traffic,
        failed: Callable[[aio.AioRpcError], None],
    ) -> None:
        self._address, self._method, self._call, self._traffic = address, method, call, traffic
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
            return Unreachable(_describe(self._address, error))
        return Unreachable(f"{self._address}: the stream has ended")


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

    def __init__(self, handler: Handler, traffic: Traffic) -> None:
        self._handlers = {
            **{
                _PACKAGE + method: self._unary(method, handler, traffic)
                for method in CONTROL_METHODS
            },
            **{
                _PACKAGE + method: self._stream(method, handler, traffic) for method in DATA_METHODS
            },
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        return self._handlers.get(handler_call_details.method)

    @staticmethod
    def _unary(
        method: str, handler: Handler, traffic: Traffic
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def serve(request: bytes, context: "aio.ServicerContext[bytes, bytes]") -> bytes:
            traffic.count_received(method, len(request))
            if len(request) > MAX_CONTROL_BYTES:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{method} takes at most {MAX_CONTROL_BYTES} bytes, got {len(request)}",
                )
            try:
                answer = await handler.on_call(method, request, context.peer())
            except Refused as refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
            traffic.count_sent(method, len(answer))
            return answer

        return grpc.unary_unary_rpc_method_handler(serve)

    @staticmethod
    def _stream(
        method: str, handler: Handler, traffic: Traffic
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def serve(_requests: object, context: "aio.ServicerContext[bytes, bytes]") -> None:
            try:
                await handler.on_stream(method, _ServerStream(method, context, traffic))
            except Refused as refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))

        return grpc.stream_stream_rpc_method_handler(serve)


def _proxy_options(proxy: str | None) -> list[tuple[str, int | str]]:
    if proxy is None:  # peers are peers, whatever the environment says of the web
        return [("grpc.enable_http_proxy", 0)]
    os.environ["no_grpc_proxy"] = ""  # noqa: SIM112 (gRPC reads it before no_proxy)
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", f"http://{proxy}")]


def _as_is(message: bytes) -> bytes:
    return message


def _describe(address: str, error: aio.AioRpcError) -> str:
    code = error.code().name.lower().replace("_", " ")
    details = (error.details() or "").splitlines()
    return f"{address}: {code}" + (f" ({details[0][:_MAX_DETAILS]})" if details else "")
