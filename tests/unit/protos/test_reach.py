"""Why nobody is reached: names, handshakes, and gRPC's words for what happens below it."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos import reach
from protos.identity import Authority, Identity, Role
from protos.reach import Mismatch, is_encrypted_run, mismatch, plain_cause, resolved, unresolved
from worker.transport import NOBODY
from worker.transport.grpc import GrpcTransport


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Hosts that the name servers were asked for, in order. That of silent.example never answers,
    until the test is over."""
    over, hosts = threading.Event(), list[str]()

    def look_up(host: str, port: None, type: int) -> list[object]:
        hosts.append(host)
        if host == "silent.example":
            over.wait()
        if host in ("no.such.example", "silent.example"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", ("192.0.2.7", 0))]

    monkeypatch.setattr(reach.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(reach, "_look_ups", {})
    yield hosts
    over.set()


def test_a_name_that_nobody_knows_is_said_to_be_one(asked: list[str]) -> None:
    assert unresolved(["w0.example:7700", "192.0.2.7:7700", "[::1]:7700", "no address"]) == {}
    (problem,) = unresolved(["w0.example:7700", "no.such.example:7700"]).values()
    assert problem.why == (
        "no address is known for the name no.such.example (name or service not known)"
    )
    assert not problem.silent
    assert resolved("w0.example") == ((socket.AF_INET, "192.0.2.7"),)
    assert asked == ["w0.example", "no.such.example"]


def test_name_servers_are_asked_once_and_all_that_ask_share_the_time(asked: list[str]) -> None:
    """One that does not answer took `murmur doctor` half a minute: it was asked again and again."""
    for _ in range(3):
        (problem,) = unresolved(["silent.example:7700"], timeout_s=0.01).values()
        assert problem.silent
        assert "no name server answers" in problem.why
        assert resolved("silent.example", timeout_s=0.01) == ()
    assert asked == ["silent.example"]


REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect "
    "to remote host: Connection refused"
)
NAMELESS = (
    "errors resolving x:1: [field:hostname lookup error:address lookup failed for x:1: Domain name "
    "not found]"
)


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        ("UNAVAILABLE", REFUSED, "connection refused"),
        ("UNAVAILABLE", REFUSED.replace("Connection refused", "No route to host"), "no route"),
        ("UNAVAILABLE", REFUSED.replace("Connection refused", "Odd"), "unavailable (Odd)"),
        ("UNAVAILABLE", NAMELESS, "its name is not known"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", "the connection broke"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "no answer in time"),
        ("RESOURCE_EXHAUSTED", "32 calls are under way", "resource exhausted (32 calls are under"),
        ("UNAVAILABLE", "", "unavailable"),
    ],
)
def test_what_grpc_says_is_said_plainly(code: str, details: str, said: str) -> None:
    assert plain_cause(code, details).startswith(said)


def test_a_broken_handshake_is_told_from_a_port_that_is_shut() -> None:
    closed = REFUSED.replace("Connection refused", "Socket closed")
    assert mismatch(closed, encrypts=False) is Mismatch.CLOSED
    assert mismatch(closed, encrypts=True) is Mismatch.NOT_TAKEN
    assert mismatch(REFUSED, encrypts=True) is None
    assert mismatch("Socket closed", encrypts=True) is None  # a connection that there was


class Deaf:
    async def on_call(self, method: str, request: bytes, caller: object = NOBODY) -> bytes:
        return b""

    async def on_stream(self, method: str, stream: object, caller: object = NOBODY) -> None:
        """Nothing."""


@pytest.mark.parametrize("role", [None, Role.PEER, Role.COORDINATOR])
def test_an_encrypted_run_is_known_by_its_certificate(tmp_path: Path, role: Role | None) -> None:
    identity = None if role is None else Authority.make(tmp_path).new_identity(role, "a")

    async def scenario() -> tuple[bool, bool]:
        server = GrpcTransport("127.0.0.1:0", security=identity)
        address = await server.listen(Deaf())
        try:
            there = await asyncio.to_thread(is_encrypted_run, address)
        finally:
            await server.close()
        return there, await asyncio.to_thread(is_encrypted_run, address)

    assert asyncio.run(scenario()) == (role is not None, False)


def test_something_else_that_encrypts_is_no_run(tmp_path: Path) -> None:
    """A token's certificate names no member; a web server's neither."""
    token: Identity = Authority.make(tmp_path).create_token().identity
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    key.write_bytes(token.key)
    certificate.write_bytes(token.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as one, context.wrap_socket(one, server_side=True) as tls:
                tls.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        assert not is_encrypted_run(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
