"""The coordinator's process: the gRPC service around a registry, until the run is over."""

import asyncio
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from murmuration.coordinator.asking import AskedSwarm, ask
from murmuration.coordinator.registry import Registry
from murmuration.protos import addresses, murmuration_pb2 as pb, murmuration_pb2_grpc as rpc
from murmuration.protos.documents import pack
from murmuration.protos.events import Event, Log, Warnings, new_event, printable
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.protos.files import print_line
from murmuration.protos.reach import cannot_listen, listening_problem
from murmuration.worker.identity import certificates
from murmuration.worker.identity.authority import TRIAL, Authority, Renewal, enrol, subject
from murmuration.worker.identity.certificates import MEMBERS, Identity, Role
from murmuration.worker.identity.serving import ServerCertificate
from murmuration.worker.views import PagePlace
from murmuration.worker.views.lines import page_event, page_words

if TYPE_CHECKING:
    from grpc import ServicerContext

    from murmuration.worker.views.page import PageServer

PATIENCE_S = 30.0  # for a silent worker, before the run counts as over without it
_TICK_S = 0.25
_LAST_CALLS_S = 1.0
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # else two coordinators could share a port and half of the calls
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_allowed_incoming_connections", 512),  # half of the files that are usually allowed
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # of TLS, and of HTTP/2 without it
]


class CoordinatorService(rpc.CoordinatorServicer, rpc.ControlServicer):
    """Introduces workers; as a worker does, it says what the run is, lets in, and tells its
    status."""

    def __init__(self, registry: Registry, log: Log = lambda event: None) -> None:
        self.registry = registry
        self.authority: Authority | None = None
        self._known, self._warnings = list[pb.Revocation](), Warnings(log)
        self._enrolling = defaultdict[object, asyncio.Semaphore](lambda: asyncio.Semaphore(2))
        self.certificate: ServerCertificate | None = None  # that the server shows

    async def Introduce(  # noqa: N802 (as in the .proto)
        self, request: pb.IntroduceRequest, context: "ServicerContext"
    ) -> pb.IntroduceReply:
        claimed = request.member.peer
        _, name, key = await _check(context, {Role.PEER}, self._revoked, claimed=claimed)
        reply = self.registry.introduce(request, time.monotonic())
        if name and not reply.refusal:
            self.registry.keys[name] = key
        reply.revocations.extend(self._known)
        return reply

    async def Status(  # noqa: N802 (as in the .proto)
        self, request: pb.StatusRequest, context: "ServicerContext"
    ) -> pb.StatusReply:
        await _check(context, MEMBERS, self._revoked)
        encrypted = self.certificate is not None
        document = self.registry.status(time.monotonic()) | {"encrypted": encrypted}
        return pb.StatusReply(document=pack(document))

    async def Enrol(  # noqa: N802 (as in the .proto)
        self, request: pb.EnrolRequest, context: "ServicerContext"
    ) -> pb.EnrolReply:
        role, name, _ = await _check(context, {Role.TOKEN, Role.PEER})
        holder, who = self.registry.keys.get(request.name), (role, name)
        async with self._enrolling[who]:  # else one takes the threads of all
            return await asyncio.to_thread(enrol, self.authority, request, *who, holder=holder)

    async def Join(  # noqa: N802 (as in the .proto)
        self, request: pb.JoinRequest, context: "ServicerContext"
    ) -> pb.JoinReply:
        await _check(context, MEMBERS, self._revoked)
        if not self.registry.manifest:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker has been here yet")
        return pb.JoinReply(
            manifest=self.registry.manifest,
            coordinator=True,
            refusal=self.registry.ended(time.monotonic()),
            seen_from=addresses.caller_host(context.peer()),
            time_ms=time.time_ns() // 1_000_000,
        )

    async def _revoked(self) -> list[pb.Revocation]:
        """All that was taken back, where the run's key is; what is known, if it cannot be read."""
        if self.authority is not None:
            try:
                self._known = await asyncio.to_thread(self.authority.revocations)
            except certificates.IdentityError as error:
                self._warnings.add(f"expulsions: {error}")
        return self._known


async def _check(
    context: "ServicerContext",
    roles: Collection[Role],
    revoked: Callable[[], Awaitable[Collection[pb.Revocation]]] | None = None,
    *,
    claimed: str | None = None,
) -> tuple[str, str, str]:
    """Ends the call of a caller that has no such role, was revoked, or has another name. Returns
    (role, name, fingerprint of its key) as its certificate says; empty without encryption."""
    # grpcio declares no type that says so.
    tls: Mapping[str, Iterable[bytes]] = context.auth_context()  # type: ignore[assignment]  # stubs
    if "x509_pem_cert" not in tls:  # with TLS everybody has one
        return "", "", ""
    names = [name.decode() for name in tls.get("x509_subject_alternative_name", ())]
    role, name = certificates.certified_name(names) or ("", "")
    problem = ""
    if role not in roles or claimed not in (None, name):
        problem = f"the certificate of {role} {printable(name)} is not for this call"
    elif claimed is not None and name.startswith(TRIAL):
        problem = "a token that is tried lets nobody in: join with it"
    elif revoked and subject(Role(role), name) in {each.subject for each in await revoked()}:
        problem = f"{role} {printable(name)} was expelled"
    if problem:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
    (certificate,) = tls["x509_pem_cert"]
    return role, name, certificates.certified_key(certificate)


async def start_server(
    listen: str,
    service: CoordinatorService,
    identity: Identity | None = None,
    authority: Authority | None = None,
) -> tuple[aio.Server, str]:
    """Starts serving; returns the server, and the address with the bound port. Raises MurmurError.
    Args: identity: else nothing is encrypted; authority: of the run, if its key is here."""
    service.authority = authority
    server = aio.server(options=_OPTIONS)
    rpc.add_CoordinatorServicer_to_server(service, server)
    rpc.add_ControlServicer_to_server(service, server)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in its stubs
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = 0
    with suppress(RuntimeError):
        if identity is None:
            port = server.add_insecure_port(listen)
        else:
            service.certificate = ServerCertificate(identity)
            port = server.add_secure_port(listen, service.certificate.credentials())
    if port == 0:
        line = cannot_listen("--listen", listen, listening_problem(listen))
        raise MurmurError(line, ExitCode.ADDRESS_IN_USE)
    await server.start()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    return server, f"{listen.rpartition(':')[0]}:{port}"


class CoordinatorRun:
    """One life of the coordinator, until `expect` workers are through, or a signal comes. Args:
    keep: puts a renewed identity where the next start finds it (OSError)."""

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
        """Serves until the expected workers are through, or a signal comes. Raises MurmurError."""
        service = CoordinatorService(self.registry, self._log)  # type: ignore[abstract]  # no more is served
        server, address = await start_server(listen, service, self._identity, self._authority)
        loop = asyncio.get_running_loop()

        def stop(_number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._stop.set)

        # Not the loop's own handlers, which Windows lacks.
        before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        self._say(new_event("listening", address=address), f"listening on {address}")
        renewing = page = None
        if self._identity is not None and service.certificate is not None:
            renewing = loop.create_task(self._renewed(self._identity, service.certificate))
        if self._page is not None:
            page = await asyncio.to_thread(self._serve_page, self._page, address)
        try:
            while True:
                now, expect = time.monotonic(), self._expect
                members, told = self.registry.members, self._told
                self._told = {name: known.health(now) for name, known in members.items()}
                for name, health in self._told.items():
                    if told.get(name) != health:
                        line = f"{name} at {members[name].member.address} is {health}"
                        self._say(new_event("member", peer=name, health=health), line)
                over = expect is not None and self.registry.all_over(expect, now, PATIENCE_S)
                if over or self._stop.is_set():
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _TICK_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if renewing is not None:
                renewing.cancel()
            if page is not None:
                await asyncio.to_thread(page.close)
            await server.stop(_LAST_CALLS_S)

    async def _renewed(self, identity: Identity, certificate: ServerCertificate) -> None:
        """Renews the certificate, as workers do, until cancelled."""

        def show(identity: Identity) -> None:
            self._identity = identity
            certificate.renew(identity)

        await Renewal(
            identity,
            self._authority,
            keep=self._keep,
            renewed=show,
            offload=asyncio.to_thread,
            log=self._log,
        ).run()

    def _serve_page(self, place: PagePlace, address: str) -> "PageServer":
        """Asks this coordinator itself who there is, and then everybody. Raises MurmurError."""
        host, port = addresses.split_address(address)
        loopback = "::1" if ":" in host else addresses.LOOPBACK_HOST
        own = addresses.join_address(loopback if addresses.is_wildcard(host) else host, port)
        swarm = AskedSwarm(own, lambda at, wait_s: ask(at, wait_s, self._identity))  # that of now
        page = swarm.serve_page(place, encrypted=self._identity is not None)
        event = page_event(page.url, page.token_path)
        self._say(event, page_words(event, terminal=sys.stdout.isatty()))
        return page

    def _log(self, event: Event) -> None:
        renewed = event["event"] == "renewed"
        told = f"the certificate is renewed until {event['expires']}" if renewed else None
        self._say(event, told or f"warning: {event['text']}")

    def _say(self, event: Event, line: str) -> None:
        shown = f"{time.monotonic() - self._began_s:.1f} s  {line}"
        line = json.dumps(event, default=str) if self._as_json else shown
        print_line(line, waits=self._as_json)
