"""The coordinator's process: the gRPC service around a registry, until the run is over."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from murmuration.coordinator import Failure
from murmuration.coordinator.asking import TIMEOUT_S, AskedSwarm, ask
from murmuration.coordinator.registry import Registry
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos import murmuration_pb2_grpc as rpc
from murmuration.protos.addresses import (
    LOOPBACK_HOST,
    caller_host,
    is_wildcard,
    join_address,
    split_address,
)
from murmuration.protos.documents import pack
from murmuration.protos.events import Event, new_event, printable
from murmuration.protos.exit_codes import ExitCode
from murmuration.protos.files import print_line
from murmuration.protos.reach import cannot_listen, listening_problem
from murmuration.worker.identity import (
    Authority,
    Identity,
    IdentityError,
    Renewal,
    Role,
    certified_key,
    certified_name,
    enrol,
    subject,
)
from murmuration.worker.identity.serving import ServerCertificate
from murmuration.worker.views import PagePlace
from murmuration.worker.views.lines import page_event, page_words

if TYPE_CHECKING:
    from grpc import ServicerContext

    from murmuration.worker.views.page import PageServer

PATIENCE_S = 30.0  # for a silent worker, before the run counts as over without it
_TICK_S = 0.25
_MEMBERS = frozenset({Role.PEER, Role.COORDINATOR})
_LAST_CALLS_S = 1.0
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # else two coordinators could share a port and half of the calls
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # of TLS, and of HTTP/2 without it
]


class CoordinatorService(rpc.CoordinatorServicer):
    """Introduces workers."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.authority: Authority | None = None
        self.certificate: ServerCertificate | None = None  # that the server shows

    async def Introduce(  # noqa: N802 (as in the .proto)
        self, request: pb.IntroduceRequest, context: "ServicerContext"
    ) -> pb.IntroduceReply:
        revoked = await _revoked(self.authority)
        caller = await _check(context, {Role.PEER}, revoked, claimed=request.member.peer)
        reply = self.registry.introduce(request, time.monotonic())
        if caller.name and not reply.refusal:
            self.registry.keys[caller.name] = caller.key
        reply.revocations.extend(revoked)
        return reply


class EntryService(rpc.ControlServicer):
    """What a worker answers too: says what the run is, lets in, and tells `murmur status`. A worker
    that joins introduces itself then."""

    def __init__(self, service: CoordinatorService) -> None:
        self._registry, self._authority = service.registry, service.authority
        self._encrypted = service.certificate is not None

    async def Status(  # noqa: N802 (as in the .proto)
        self, request: pb.StatusRequest, context: "ServicerContext"
    ) -> pb.StatusReply:
        await _check(context, _MEMBERS, await _revoked(self._authority))
        document = self._registry.status(time.monotonic()) | {"encrypted": self._encrypted}
        return pb.StatusReply(document=pack(document))

    async def Enrol(  # noqa: N802 (as in the .proto)
        self, request: pb.EnrolRequest, context: "ServicerContext"
    ) -> pb.EnrolReply:
        caller = await _check(context, {Role.TOKEN, Role.PEER})
        holder = self._registry.keys.get(request.name)
        return await asyncio.to_thread(
            lambda: enrol(self._authority, request, caller.role, caller.name, holder=holder)
        )

    async def Join(  # noqa: N802 (as in the .proto)
        self, request: pb.JoinRequest, context: "ServicerContext"
    ) -> pb.JoinReply:
        await _check(context, _MEMBERS, await _revoked(self._authority))
        if not self._registry.manifest:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker has been here yet")
        return pb.JoinReply(
            manifest=self._registry.manifest,
            coordinator=True,
            seen_from=caller_host(context.peer()),
            time_ms=time.time_ns() // 1_000_000,
        )


class _Caller(NamedTuple):
    """A caller by its certificate, and the fingerprint of its key; empty where nothing is
    encrypted."""

    role: str = ""
    name: str = ""
    key: str = ""


async def _revoked(authority: Authority | None) -> list[pb.Revocation]:
    """By the run's authority, if its key is here."""
    if authority is not None:
        with suppress(IdentityError):  # the file cannot be read now
            return await asyncio.to_thread(authority.revocations)
    return []


async def _check(
    context: "ServicerContext",
    roles: Collection[Role],
    revoked: Collection[pb.Revocation] = (),
    *,
    claimed: str | None = None,
) -> _Caller:
    """Ends the call of a caller that has none of these roles, whose certificate was revoked, or
    that claims another name than it has."""
    # grpcio declares no type that says so.
    tls: Mapping[str, Iterable[bytes]] = context.auth_context()  # type: ignore[assignment]
    if "x509_pem_cert" not in tls:  # with TLS everybody has one
        return _Caller()
    names = [name.decode() for name in tls.get("x509_subject_alternative_name", ())]
    role, name = certified_name(names) or ("", "")
    if role not in roles or claimed not in (None, name):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"the certificate of {role} {printable(name)} is not for this call",
        )
    if subject(Role(role), name) in {each.subject for each in revoked}:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, f"{role} {printable(name)} was expelled"
        )
    (certificate,) = tls["x509_pem_cert"]
    return _Caller(role, name, certified_key(certificate))


async def start_server(
    listen: str,
    service: CoordinatorService,
    identity: Identity | None = None,
    authority: Authority | None = None,
) -> tuple[aio.Server, str]:
    """Starts serving.

    Args:
        identity: of the coordinator; None: nothing is encrypted.
        authority: of the run, if its key is here.

    Returns:
        The server, and the address with the bound port.

    Raises:
        Failure: the port is taken, or the address is not this machine's.
    """
    service.authority = authority
    service.certificate = ServerCertificate(identity) if identity is not None else None
    server = aio.server(options=_OPTIONS)
    rpc.add_CoordinatorServicer_to_server(service, server)
    entry = EntryService(service)  # type: ignore[abstract]  # no more is served
    rpc.add_ControlServicer_to_server(entry, server)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its stubs
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    try:
        port = _add_port(server, listen, service.certificate)
    except RuntimeError:
        port = 0
    if port == 0:
        line = cannot_listen("--listen", listen, listening_problem(listen))
        raise Failure(line, ExitCode.ADDRESS_IN_USE)
    await server.start()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    return server, f"{listen.rpartition(':')[0]}:{port}"


def _add_port(server: aio.Server, listen: str, certificate: ServerCertificate | None) -> int:
    if certificate is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, certificate.credentials())


class CoordinatorRun:
    """One life of the coordinator, from listening to the end of the run.

    Args:
        as_json: prints events as JSON on stdout instead of lines.
        expect: the run is over when this many workers are through; None: when a signal comes.
        identity, authority: as `start_server` takes them.
        page: where to serve the page of the swarm, or None.
        keep: puts a renewed identity where the next start finds it. Raises OSError.
    """

    def __init__(
        self,
        as_json: bool,
        expect: int | None,
        identity: Identity | None = None,
        authority: Authority | None = None,
        page: PagePlace | None = None,
        keep: Callable[[Identity], None] = lambda identity: None,
    ) -> None:
        self.registry = Registry()
        self._page, self._keep = page, keep
        self._identity, self._authority = identity, authority
        self._as_json, self._expect, self._began_s = as_json, expect, time.monotonic()
        self._told: dict[str, str] = {}
        self._stop = asyncio.Event()

    async def run(self, listen: str) -> None:
        """Serves until the expected workers are through, or a signal comes. Raises Failure."""
        service = CoordinatorService(self.registry)
        server, address = await start_server(listen, service, self._identity, self._authority)
        loop = asyncio.get_running_loop()

        def stop(_number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._stop.set)

        # Not the loop's own handlers, which Windows lacks.
        before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        self._say(new_event("listening", address=address), f"listening on {address}")
        renewing = loop.create_task(self._renewed(service)) if self._identity else None
        page = (
            await asyncio.to_thread(self._serve_page, self._page, address) if self._page else None
        )
        try:
            while not (self._stop.is_set() or self._over()):
                self._poll_health()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _TICK_S)
            self._poll_health()  # of those that came since
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if renewing is not None:
                renewing.cancel()
            if page is not None:
                await asyncio.to_thread(page.close)
            await server.stop(_LAST_CALLS_S)

    # --------------------------------------------------------------------------------- inside

    async def _renewed(self, service: CoordinatorService) -> None:
        """Renews the certificate, as workers do, until cancelled."""
        certificate = service.certificate
        assert self._identity is not None
        assert certificate is not None

        def show(identity: Identity) -> None:
            self._identity = identity
            certificate.renew(identity)

        def log(event: Event) -> None:
            renewed = event["event"] == "renewed"
            told = f"the certificate is renewed until {event['expires']}" if renewed else None
            self._say(event, told or f"warning: {event['text']}")

        await Renewal(
            self._identity,
            self._authority,
            keep=self._keep,
            renewed=show,
            offload=asyncio.to_thread,
            log=log,
        ).run()

    def _serve_page(self, place: PagePlace, address: str) -> "PageServer":
        """Asks this coordinator itself who there is, and then everybody. Raises Failure."""
        host, port = split_address(address)
        loopback = "::1" if ":" in host else LOOPBACK_HOST
        own = join_address(loopback if is_wildcard(host) else host, port)
        page = AskedSwarm(own, self._ask).serve_page(place, encrypted=self._identity is not None)
        event = page_event(page.url, page.token_path)
        self._say(event, page_words(event, terminal=sys.stdout.isatty()))
        return page

    def _ask(self, address: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """With the certificate of now."""
        return ask(address, timeout_s, self._identity)

    def _over(self) -> bool:
        return self._expect is not None and self.registry.all_over(
            self._expect, time.monotonic(), PATIENCE_S
        )

    def _poll_health(self) -> None:
        """Says which worker came, was lost or came back."""
        now = time.monotonic()
        for name, member in self.registry.members.items():
            health = member.health(now)
            if self._told.get(name) != health:
                self._told[name] = health
                line = f"{name} at {member.member.address} is {health}"
                self._say(new_event("member", peer=name, health=health), line)

    def _say(self, event: Event, line: str) -> None:
        shown = f"{time.monotonic() - self._began_s:.1f} s  {line}"
        print_line(json.dumps(event, default=str) if self._as_json else shown)
