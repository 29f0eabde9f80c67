"""The serving side of gRPC: each known method is led to the handler, within limits.

All methods are served as streams, which on the wire are the same: so a place is taken before a call
is read, and not after. The window of a stream is fixed (docs/adr/0019).
"""

import asyncio
import ctypes
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from murmuration.worker import transport
from murmuration.worker.transport import Caller, Method, Places, Refused, Traffic

if TYPE_CHECKING:
    from murmuration.worker.identity.certificates import Identity

PACKAGE = "/murmuration.v1."
COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", transport.MAX_DATA_BYTES),
    ("grpc.max_send_message_length", transport.MAX_DATA_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
STREAMS_EACH_CONNECTION = 16  # at once: a caller's own gRPC lets further ones wait
_SERVER_OPTIONS: list[tuple[str, int]] = [
    *COMMON_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", transport.WINDOW_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_EACH_CONNECTION),
    ("grpc.so_reuseport", 0),  # else two peers could share a port and half of the calls
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),  # BDP probes of a busy link are no offence
    ("grpc.server_handshake_timeout_ms", 10_000),  # of TLS, and of HTTP/2 without it
]
_MOST_CONNECTIONS = 4096
_CALLS_SHARE, _CALLS_EACH, MOST_CALLS = 4, 8, 32  # control calls at once
_ENROLMENTS_EACH, _MOST_ENROLMENTS = 2, 16  # at once
_REQUEST_S = 10.0
_RETURN_S = 1.0
_HEALTH = "/grpc.health.v1.Health/Check"
_ENDED = (aio.AioRpcError, aio.UsageError, aio.InternalError)

_Context = aio.ServicerContext[bytes, bytes]


class Router(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only the stubs are generic
    def __init__(
        self, handler: transport.Handler, traffic: Traffic, security: "Identity | None"
    ) -> None:
        self._handler, self._traffic, self._security = handler, traffic, security
        self._calls = Places("calls", _CALLS_SHARE, _CALLS_EACH, lambda: MOST_CALLS)
        # Of tokens and of those that were expelled too, so that these take no place of a member.
        self._enrolments = Places("calls", 1, _ENROLMENTS_EACH, lambda: _MOST_ENROLMENTS)
        self._returning = False
        self._handlers = {_HEALTH: self._serving(_HEALTH, self._check)}
        for method in Method:
            answer = self._call if method in transport.CONTROL_METHODS else self._stream
            self._handlers[PACKAGE + method] = self._serving(method, answer)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        return self._handlers.get(handler_call_details.method)

    def _serving(
        self, method: str, answer: "Callable[[str, _Context, Caller], Awaitable[None]]"
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def serve(_requests: object, context: "_Context") -> None:
            try:
                caller = Caller(context.peer())
                if self._security is not None:
                    names = context.auth_context().get("x509_subject_alternative_name", ())
                    certified = self._security.certified([name.decode() for name in names])
                    caller = Caller(context.peer(), *certified)
                self._handler.admit(method, caller)
                await answer(method, context, caller)
            except transport.Busy as busy:
                if not self._returning:
                    self._returning = True
                    asyncio.get_running_loop().call_later(_RETURN_S, self._return_memory)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy))
            except Refused as refused:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))

        return grpc.stream_stream_rpc_method_handler(serve)

    def _return_memory(self) -> None:
        """Returns the memory of what refused streams had sent ahead. glibc would keep it for this
        process: 0.7 GB after 2,000 of them at once."""
        self._returning = False
        with suppress(AttributeError, TypeError, OSError, RuntimeError):  # another libc; the end
            trim = ctypes.CDLL(None).malloc_trim
            asyncio.get_running_loop().run_in_executor(None, trim, 0)

    async def _call(self, method: str, context: "_Context", caller: Caller) -> None:
        places = self._enrolments if method == Method.ENROL else self._calls
        with places.taken(caller):
            request = await self._request(method, context)
            answer = await self._handler.on_call(method, request, caller)
            self._traffic.count_sent(method, len(answer))
            await context.write(answer)

    async def _stream(self, method: str, context: "_Context", caller: Caller) -> None:
        stream: transport.Stream = _ServerStream(method, context, self._traffic)
        await self._handler.on_stream(method, stream, caller)

    async def _check(self, method: str, context: "_Context", caller: Caller) -> None:
        """The health check of gRPC: whatever serves is well."""
        with self._calls.taken(caller):
            asked = health_pb2.HealthCheckRequest.FromString(await self._request(method, context))
            if asked.service:
                await context.abort(grpc.StatusCode.NOT_FOUND, "there is one service, without name")
            well = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
            await context.write(well.SerializeToString())

    async def _request(self, method: str, context: "_Context") -> bytes:
        """Reads what a control call asks. Raises Refused: it does not come, or is too large."""
        try:
            async with asyncio.timeout(_REQUEST_S):
                request: object = await context.read()
        except TimeoutError:
            raise Refused(f"{method}: no request in {_REQUEST_S:g} s") from None
        if not isinstance(request, bytes):  # grpc.aio.EOF
            raise Refused(f"{method}: an empty call")
        self._traffic.count_received(method, len(request))
        if len(request) > transport.MAX_CONTROL_BYTES:
            raise Refused(
                f"{method} takes at most {transport.MAX_CONTROL_BYTES} bytes, got {len(request)}"
            )
        return request


class _ServerStream:
    def __init__(self, method: str, context: "_Context", traffic: Traffic) -> None:
        self._method, self._context, self._traffic = method, context, traffic

    async def send(self, message: bytes) -> None:
        self._traffic.count_sent(self._method, len(message))
        try:
            await self._context.write(message)
        except _ENDED as error:
            raise transport.Unreachable(f"{self._context.peer()}: the stream has ended") from error

    async def done(self) -> None: ...

    async def receive(self) -> bytes | None:
        try:
            message: object = await self._context.read()
        except _ENDED as error:
            raise transport.Unreachable(f"{self._context.peer()}: the stream has ended") from error
        if not isinstance(message, bytes):  # grpc.aio.EOF
            return None
        self._traffic.count_received(self._method, len(message))
        return message

    def cancel(self) -> None:
        """Served streams end by returning; nothing to cancel."""


def server_options() -> list[tuple[str, int]]:
    most = _MOST_CONNECTIONS
    with suppress(ImportError):  # there is no such limit
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:  # half of the files are left to the rest of the process
            most = max(1, min(most, files // 2))
    return [*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most)]
