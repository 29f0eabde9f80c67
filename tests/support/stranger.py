"""Somebody who speaks the wire contract and means harm: a client and a server on our protos."""

import random
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack
from murmuration.worker.identity.certificates import Identity
from murmuration.worker.manifest import Manifest

T = TypeVar("T", bound=Message)
PATIENCE_S = 20.0
_PACKAGE = "/murmuration.v1."
FAR = 2**64 - 1


def channel_of(address: str, identity: Identity | None, of: Any = grpc) -> Any:
    """A channel of `grpc` or of `grpc.aio`, encrypted where there is an identity."""
    options = [
        *(("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)),
        ("grpc.max_send_message_length", -1),
    ]
    if identity is None:
        return of.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        identity.authority, identity.key, identity.certificate
    )
    name = ("grpc.ssl_target_name_override", identity.server_name(None))
    return of.secure_channel(address, credentials, options=[*options, name])


class Stranger:
    """Calls one worker, as no worker would. Args: identity: that he has got hold of."""

    def __init__(self, address: str, identity: Identity | None = None) -> None:
        self._channel = channel_of(address, identity)

    def call(self, method: str, request: Message | bytes, reply: type[T]) -> T:
        """One unary call. Raises grpc.RpcError, which says what the worker says to it."""
        answer = self._channel.unary_unary(_PACKAGE + method)(_raw(request), timeout=PATIENCE_S)
        return reply.FromString(answer)

    def stream(self, method: str, messages: Iterable[Message | bytes]) -> Iterator[bytes]:
        """Yields what the worker sends until the stream ends. Raises grpc.RpcError."""
        found: Iterator[bytes] = self._channel.stream_stream(_PACKAGE + method)(
            map(_raw, messages), timeout=PATIENCE_S
        )
        return found

    def manifest(self) -> Manifest:
        return Manifest.unpack(self.call("Control/Join", pb.JoinRequest(), pb.JoinReply).manifest)

    def close(self) -> None:
        self._channel.close()


def _raw(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


@contextmanager
def calling(address: str, identity: Identity | None = None) -> Iterator[Stranger]:
    with closing(Stranger(address, identity)) as stranger:
        yield stranger


class _Answers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only the stubs are generic
    def __init__(self, answers: Mapping[str, Callable[[bytes], Any]]) -> None:
        self._answers = answers

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = details.method.removeprefix(_PACKAGE)
        answer = self._answers.get(method)
        if answer is None:
            return None
        if method.startswith("Control/"):
            return grpc.unary_unary_rpc_method_handler(lambda request, _: answer(request))
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, _: answer(next(requests, b""))
        )


@contextmanager
def serving(
    answers: Mapping[str, Callable[[bytes], Any]],
    address: str = "127.0.0.1:0",
    identity: Identity | None = None,
) -> Iterator[str]:
    """Serves these methods: bytes for a control call, an iterator of them for a data stream.
    Yields the address. Args: identity: to show to callers; None: nothing is encrypted."""
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((_Answers(answers),))
    if identity is None:
        port = server.add_insecure_port(address)
    else:
        shown = [(identity.key, identity.certificate)]
        credentials = grpc.ssl_server_credentials(shown, identity.authority, True)
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def handing_out(manifest: Mapping[str, Any]) -> Callable[[bytes], bytes]:
    """Answers Control/Join with a manifest of one's own."""
    reply = pb.JoinReply(manifest=pack(manifest)).SerializeToString()
    return lambda _request: reply


def impossible(peer: str, address: str, start_ms: int) -> dict[str, pb.Member]:
    """Members that cannot be, by what is wrong with each."""
    base = {"peer": peer, "address": address}
    live = base | {"start_ms": start_ms, "heartbeat": 5}
    return {
        "start_ms": pb.Member(**base, start_ms=FAR),
        "incarnation": pb.Member(**live, incarnation=2**32 - 1),
        "heartbeat": pb.Member(**base, start_ms=start_ms, heartbeat=FAR),
        "step": pb.Member(**live, step=FAR),
        "stage": pb.Member(**live, stage=9),
        "fragments": pb.Member(**live, digests=[pb.FragmentDigest()] * 9),
        "version": pb.Member(**live, digests=[pb.FragmentDigest(version=10**12)]),
        "unix:/tmp/socket": pb.Member(peer=peer, address="unix:/tmp/socket", heartbeat=5),
    }


def break_off(address: str, draws: random.Random) -> None:
    """A connection that ends at once, by a reset, amid its first record of TLS, or when the server
    has answered that. Raises OSError."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        how = draws.random()
        if how < 0.2:
            return
        if how < 0.4:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return
        hello = client_hello()
        if how < 0.6:
            connection.sendall(hello[: draws.randrange(1, len(hello))])
            return
        connection.sendall(hello)
        connection.recv(1)  # its answer has begun: it waits for this side's certificate


def client_hello() -> bytes:
    """The first message of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    heard, said = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(heard, said).do_handshake()
    return said.read()
