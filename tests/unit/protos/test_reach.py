"""HOST:PORT of peers and of those that call; why nobody is reached: names, handshakes, and gRPC's
words for what happens below it."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import cast
from unittest.mock import Mock

import pytest

from murmuration.protos import reach
from murmuration.protos.addresses import caller_host, is_wildcard, served_at
from murmuration.protos.exit_codes import UsageError
from murmuration.protos.reach import (
    Mismatch,
    UnknownName,
    find_target,
    known_target,
    mismatch,
    numeric,
    plain_cause,
    resolved,
)
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, Role, is_encrypted_run
from murmuration.worker.transport import Handler
from murmuration.worker.transport.grpc import GrpcTransport

V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Hosts that the resolver was asked for, in order. That of silent.example never answers, until
    the test is over."""
    over, hosts = threading.Event(), list[str]()
    known = {
        "w0.example": [(V4, "192.0.2.7")],
        "two.example": [(V4, "192.0.2.7"), (V4, "192.0.2.8"), (V4, "192.0.2.7")],
        "both.example": [(V6, "2001:db8::7"), (V4, "192.0.2.7")],
        "six.example": [(V6, "2001:db8::7")],
        "here.example": [(V4, "127.0.0.2"), (V4, "127.0.0.1")],
        "127.0.0.1": [(V4, "127.0.0.1")],
    }

    def look_up(host: str, port: int | None, *_: int, **__: int) -> list[object]:
        hosts.append(host)
        if host == "silent.example":
            over.wait()
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(kind, socket.SOCK_STREAM, 6, "", (at, port or 0)) for kind, at in known[host]]

    monkeypatch.setattr(reach.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(reach, "_look_ups", {})
    yield hosts
    over.set()


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("w0.example:7700", "ipv4:192.0.2.7:7700"),
        ("two.example:7700", "ipv4:192.0.2.7:7700,192.0.2.8:7700"),
        ("both.example:7700", "ipv6:[2001:db8::7]:7700,[::ffff:192.0.2.7]:7700"),
        ("six.example:7700", "ipv6:[2001:db8::7]:7700"),
        ("192.0.2.7:7700", "192.0.2.7:7700"),
        ("[::1]:7700", "[::1]:7700"),
        ("w3@w0.example:7700", "w3@w0.example:7700"),
        ("gone.example:7700,two.example:7", "ipv4:192.0.2.7:7,192.0.2.8:7"),
        ("no address", "no address"),
    ],
)
def test_a_name_is_dialled_at_all_its_addresses(asked, address, target):
    assert asyncio.run(find_target(address)) == target
    assert len(asked) == (address.count(".example") if "@" not in address else 0)
    assert known_target("w0.example:1,192.0.2.7:1,10.0.0.5:2") == "ipv4:192.0.2.7:1,10.0.0.5:2"
    assert known_target("unix:7700") == "dns:///unix:7700"
    assert known_target(address).removeprefix("dns:///") == address.partition(",")[0]


def test_a_proxy_is_dialled_at_that_address_of_its_name_which_answers(asked):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert numeric(f"here.example:{port}") == f"127.0.0.1:{port}"
    assert numeric("two.example:3128") == "192.0.2.7:3128"
    assert numeric("six.example:3128") == "[2001:db8::7]:3128"
    assert numeric("192.0.2.7:3128") == "192.0.2.7:3128"


def test_a_name_that_nobody_knows_is_said_to_be_one(asked):
    says = "^no address is known for the name no.such.example .name or service not known.$"
    with pytest.raises(UnknownName, match=says):
        asyncio.run(find_target("no.such.example:7700"))
    assert resolved("w0.example") == ((V4, "192.0.2.7"),)
    assert asked == ["no.such.example", "w0.example"]


def test_the_resolver_is_asked_once_and_all_that_ask_share_the_time(asked):
    """One that does not answer took `murmur doctor` half a minute: it was asked again and again."""
    for _ in range(3):
        with pytest.raises(UnknownName, match="no name server answers"):
            resolved("silent.example", timeout_s=0.01)
        with pytest.raises(UnknownName, match="no name server answers"):
            asyncio.run(find_target("silent.example:7700", timeout_s=0.01))
        assert not is_encrypted_run("silent.example:7700", 0.01)
    assert asked == ["silent.example"]


BELOW = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to "
BELOW += "connect to remote host: "
REFUSED = f"{BELOW}Connection refused"
NAMELESS = "errors resolving x:1: [field:hostname lookup error:address lookup failed for x:1: "
NAMELESS += "Domain name not found]"


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        ("UNAVAILABLE", REFUSED, "connection refused"),
        ("UNAVAILABLE", f"{BELOW}No route to host", "no route"),
        ("UNAVAILABLE", f"{BELOW}Odd", "unavailable (Odd)"),
        ("UNAVAILABLE", NAMELESS, "its name is not known"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", "the connection broke"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "no answer in time"),
        ("RESOURCE_EXHAUSTED", "32 calls are under way", "resource exhausted (32 calls are under"),
        ("UNAVAILABLE", "", "unavailable"),
    ],
)
def test_what_grpc_says_is_said_plainly(code, details, said):
    assert plain_cause(code, details).startswith(said)


def test_a_broken_handshake_is_told_from_a_port_that_is_shut():
    closed = f"{BELOW}Socket closed"
    assert mismatch(closed, encrypts=False) is Mismatch.CLOSED
    assert mismatch(closed, encrypts=True) is Mismatch.NOT_TAKEN
    assert mismatch(REFUSED, encrypts=True) is None
    assert mismatch("Socket closed", encrypts=True) is None  # a connection that there was


@pytest.mark.parametrize("role", [None, Role.PEER, Role.COORDINATOR])
async def test_an_encrypted_run_is_known_by_its_certificate(tmp_path, role):
    identity = None if role is None else Authority.make(tmp_path).new_identity(role, "a")
    server = GrpcTransport("127.0.0.1:0", security=identity)
    address = await server.listen(cast(Handler, Mock()))  # which nobody calls
    try:
        assert await asyncio.to_thread(is_encrypted_run, address) == (role is not None)
    finally:
        await server.close()
    assert not await asyncio.to_thread(is_encrypted_run, address)


def test_something_else_that_encrypts_is_no_run(tmp_path):
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


def test_a_port_alone_is_one_of_loopback():
    assert served_at("", None) is None
    assert [served_at("", port) for port in ("9464", 0)] == ["127.0.0.1:9464", "127.0.0.1:0"]
    for whole in ("0.0.0.0:9464", "[::1]:9464", "one.example:9464"):
        assert served_at("", whole) == whole


@pytest.mark.parametrize("given", ["", "one.example", ":9464", "65536", "²"])
def test_what_is_neither_address_nor_port_is_refused(given):
    with pytest.raises(UsageError, match=r"^--web: write a port of this machine"):
        served_at("--web", given)


def test_the_host_of_a_caller():
    hosts = {
        "ipv4:192.0.2.7:41000": "192.0.2.7",
        "ipv6:%5B2001:db8::7%5D:41000": "2001:db8::7",
        "ipv6:[::ffff:192.0.2.7]:41000": "192.0.2.7",
        **dict.fromkeys(("unix:/tmp/socket", "ipv4:nonsense", "w0"), ""),
    }
    assert {peer: caller_host(peer) for peer in hosts} == hosts


def test_a_wildcard_stands_for_all_addresses():
    hosts = ("0.0.0.0", "::", "127.0.0.1", "w0.example")
    assert [is_wildcard(host) for host in hosts] == [True, True, False, False]
