"""The gRPC transport on the wire, and how much callers may have under way at once."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from murmuration.protos import reach
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, Role
from murmuration.worker.node.answers import STREAMS_EACH, most_streams
from murmuration.worker.transport import (
    Busy,
    Caller,
    Handler,
    Places,
    Refused,
    Stream,
    TransportError,
    Unreachable,
    Untrusted,
)
from murmuration.worker.transport.grpc import GrpcTransport
from murmuration.worker.transport.served import STREAMS_EACH_CONNECTION

NAMES = {
    "one.example": ["127.0.0.1"],
    "second.example": ["127.0.0.3", "127.0.0.1"],
    "six.example": ["::1", "127.0.0.1"],
    "many.example": ["127.0.0.3", "::1", "127.0.0.4", "127.0.0.1"],
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that this machine knows, and no name server; a peer serves at 127.0.0.1 only."""

    def look_up(host: str, port: None, type: int) -> list[object]:
        if host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in place else socket.AF_INET for place in NAMES[host]]
        places = zip(families, NAMES[host], strict=True)
        return [(family, type, 6, "", (place, 0)) for family, place in places]

    monkeypatch.setattr(reach.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(reach, "_look_ups", {})


@asynccontextmanager
async def linked(
    handler: Handler,
    there: Identity | None = None,
    here: Identity | None = None,
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[tuple[str, GrpcTransport, GrpcTransport]]:
    """The address of one that serves, one that calls it, and the first itself."""
    server = GrpcTransport(listen, security=there)
    client = GrpcTransport("127.0.0.1:0", security=here)
    try:
        yield await server.listen(handler), client, server
    finally:
        await client.close()
        await server.close()


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_a_peer_is_reached_by_a_name_of_this_machine(run, names, name, encrypted):
    """By a call, and by a stream after it; with a certificate too, which has a name of its own."""
    mine, other = (run.new_identity(Role.PEER, n) if encrypted else None for n in "ab")
    async with linked(Ends(), other, mine) as (address, client, _):
        port = address.rpartition(":")[2]
        several = f"127.0.0.1:1,127.0.0.1:{port}"  # at the first there is nobody
        assert await client.open(several, "Data/PairRound", "b").receive() is None
        assert await client.call(f"{name}:{port}", "Control/Measure", b"", 20.0, "b") == b""
        assert await client.open(f"{name}:{port}", "Data/PairRound", "b").receive() is None


async def test_a_name_that_this_machine_does_not_know_is_said_to_be_one(names):
    client = GrpcTransport("127.0.0.1:0")
    says = "^no.such.example:7700: no address is known for the name no.such.example .name or "
    with pytest.raises(Unreachable, match=says):
        await client.call("no.such.example:7700", "Control/Measure", b"", 20.0)
    await client.close()


class Ends(Handler):
    """Ends every stream at once."""

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return b""

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        return None


class Shouts(Handler):
    """Refuses with words that are long and steer terminals, or answers, and reads no stream."""

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        raise Refused("\x1b[2Jx" + "y" * 3000)

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        if method == "Data/Fetch":
            await self.on_call(method, b"", caller)
        await stream.send(b"no")


async def fill(stream: Stream) -> None:
    while True:
        await stream.send(bytes(2**20))


async def test_last_words_of_who_ends_a_stream_early_arrive_though_much_is_on_its_way():
    """To send is a broken stream then, no failure of the sender's. And the connection has a place
    for the next stream, whether they were read or not."""
    async with linked(Shouts()) as (address, client, _):
        for number in range(4 * STREAMS_EACH_CONNECTION):
            stream = client.open(address, ["Data/StageCall", "Data/Fetch"][number % 2])
            async with asyncio.timeout(20):
                with pytest.raises(TransportError):
                    await fill(stream)
                if number % 4 == 1:
                    with pytest.raises(Untrusted, match="yyy"):
                        await stream.receive()
                elif number % 4 == 2:
                    assert [await stream.receive() for _ in range(2)] == [b"no", None]
            stream.cancel()


async def test_what_a_server_says_of_a_refusal_is_cut_and_steers_no_terminal():
    async with linked(Shouts()) as (address, client, _):
        with pytest.raises(Unreachable) as refused:
            await client.call(address, "Control/Status", b"", 10.0)
    said = str(refused.value)
    assert "[2Jxyyy" in said
    assert said.isprintable()
    assert len(said) < 400


async def test_probes_learn_that_it_serves():
    async with linked(Ends()) as (address, _, _), aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
    assert status == health_pb2.HealthCheckResponse.SERVING


class Repeats(Handler):
    """Says who calls, and on streams all that it hears."""

    async def on_call(self, method: str, request: bytes, caller: Caller) -> bytes:
        return f"{caller.role} {caller.name}".encode()

    async def on_stream(self, method: str, stream: Stream, caller: Caller) -> None:
        while (message := await stream.receive()) is not None:
            await stream.send(message)


@pytest.fixture
def run(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path)


@asynccontextmanager
async def serving(identity: Identity | None) -> AsyncIterator[str]:
    async with linked(Repeats(), identity) as (address, _, _):
        yield address


async def said(identity: Identity | None, address: str, peer: str | None = None) -> bytes:
    client = GrpcTransport("127.0.0.1:0", security=identity)
    try:
        return await client.call(address, "Control/Measure", b"", 20, peer)
    finally:
        await client.close()


async def test_a_renewed_certificate_is_shown_from_the_next_connection_on(run):
    """A stream that there is goes on; what has expired lets nobody connect, nor be connected to."""
    client = run.new_identity(Role.PEER, "b")
    used = linked(Repeats(), run.new_identity(Role.PEER, "a"), client)
    async with used as (address, caller, server):
        stream = caller.open(address, "Data/Fetch", "a")
        await stream.send(b"here")
        assert await stream.receive() == b"here"
        server.renew(run.new_identity(Role.PEER, "a", valid_s=-1))
        with pytest.raises(Unreachable):
            await said(client, address, "a")
        server.renew(run.new_identity(Role.PEER, "a"))
        assert await said(client, address, "a") == b"peer b"
        caller.renew(run.new_identity(Role.PEER, "b", valid_s=-1))
        with pytest.raises(Unreachable):
            await caller.call(address, "Control/Measure", b"", 20, "a")
        caller.renew(client)
        assert await caller.call(address, "Control/Measure", b"", 20, "a") == b"peer b"
        await stream.send(b"still here")
        assert await stream.receive() == b"still here"


async def test_who_has_no_certificate_of_the_run_gets_nothing(run, tmp_path):
    """The last believes the run, and shows a certificate of somebody else's."""
    other = Authority.make(tmp_path / "other").new_identity(Role.PEER, "b")
    mixed = Identity(other.key, other.certificate, run.certificate, Role.PEER, "b")
    async with serving(run.new_identity(Role.PEER, "a")) as address:
        for shown, says in (
            (None, "may want a certificate, see --token"),
            (other, "not of this run's authority"),
            (mixed, "does not take this certificate"),
        ):
            with pytest.raises(Untrusted, match=says):
                await said(shown, address)


async def test_a_server_of_another_run_or_with_a_tokens_certificate_gets_nothing(run, tmp_path):
    client, token = run.new_identity(Role.PEER, "b"), run.create_token().identity
    other = Authority.make(tmp_path / "other").new_identity(Role.PEER, "a")
    for server, caller, says in (
        (other, client, "not of this run's authority"),
        (other, token, "not of this run's authority"),
        (token, client, "not of this run's authority"),
        (None, client, "this run is not encrypted"),
    ):
        async with serving(server) as there:
            with pytest.raises(Untrusted, match=says):
                await said(caller, there)


class Admits(Repeats):
    """As a peer that holds its run's key does."""

    def admit(self, method: str, caller: Caller) -> None:
        if (caller.role == Role.TOKEN) != (method == "Control/Enrol"):
            raise Refused(f"{method} is not for a {caller.role}")


async def test_tokens_and_members_that_hold_calls_leave_a_place_to_each_other(run):
    """Calls that are begun and ask nothing."""
    server = GrpcTransport("127.0.0.1:0", security=run.new_identity(Role.PEER, "a"))
    tokens = [run.create_token().identity for _ in range(9)]
    members = [run.new_identity(Role.PEER, name) for name in "bcdef"]
    callers = [GrpcTransport("127.0.0.1:0", security=each) for each in (*tokens, *members)]
    try:
        address = await server.listen(Admits())
        *others, token, b, c, d, e, member = callers
        held = []
        for caller in (*others, b, c, d, e):
            channel = caller._connection(caller._line(address, "a", "control")).channel
            for method in ("Control/Enrol", "Control/Gossip"):
                begin = channel.stream_stream(f"/murmuration.v1.{method}")
                held += [begin() for _ in range(8)]
        while sum(call.done() for call in held) < len(held) - 16 - 32:
            await asyncio.sleep(0)
        why = [await call.details() for call in held if call.done()]
        assert sum("is not for a" in (each or "") for each in why) == 8 * 8 + 4 * 8
        assert (await token.call(address, "Control/Enrol", b"", 20, "a")).startswith(b"token ")
        assert await member.call(address, "Control/Gossip", b"", 20, "a") == b"peer f"
    finally:
        for caller in callers:
            await caller.close()
        await server.close()


async def test_addresses_that_are_dialled_once_keep_no_connection(run):
    """As many as somebody names; what is under way goes on."""
    there, here = (run.new_identity(Role.PEER, name) for name in "ab")
    async with linked(Repeats(), there, here, "0.0.0.0:0") as (address, caller, _):
        port = address.rpartition(":")[2]
        member, moved = f"127.0.0.1:{port}", f"127.0.1.1:{port}"
        stream = caller.open(moved, "Data/Fetch", "a")
        await stream.send(b"here")
        await caller.call(member, "Control/Gossip", b"", 20, "a")
        for number in range(200):
            dialled = f"127.0.{2 + number // 100}.{1 + number % 100}:{port}"
            await caller.call(dialled, "Control/Gossip", b"", 20, "a")
            assert caller.close_unneeded({member}) == {member, moved}
        assert await stream.receive() == b"here"
        await stream.done()
        assert await stream.receive() is None
        while caller.close_unneeded({member}) != {member}:
            await asyncio.sleep(0)


async def test_peers_speak_tls_1_3(run, tmp_path):
    mine, other = (run.new_identity(Role.PEER, name) for name in ("a", "b"))
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    key.write_bytes(other.key)
    certificate.write_bytes(other.certificate)
    context = ssl.create_default_context(cadata=run.certificate.decode())
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    async with serving(mine) as address:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=mine.server_name("a")
        )
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.transport.abort()


ANNA, BEN = (Caller(f"ipv4:10.0.0.{n}:1", "peer", name) for n, name in enumerate(("anna", "ben")))
SOMEBODY = Caller("ipv4:10.0.0.9:1")


def test_each_caller_has_its_own_places_and_all_have_so_many():
    places = Places("streams", 0, 2, lambda: 6)
    with ExitStack() as held:
        for caller in (ANNA, ANNA):
            held.enter_context(places.taken(caller))
        with pytest.raises(Busy, match="anna has 2 streams here, and may have no more"):
            held.enter_context(places.taken(ANNA))
        held.enter_context(places.taken(BEN))
        with pytest.raises(Busy, match="of at most 6 streams are under way"):
            held.enter_context(places.taken(BEN))
    with places.taken(ANNA), places.taken(BEN):
        pass


@pytest.mark.parametrize(
    ("share", "places", "callers"),
    [(3, 4, (ANNA, ANNA, ANNA, BEN)), (1, 3, (SOMEBODY, SOMEBODY, SOMEBODY))],
    ids=["whatever others have", "without certificates none is told from another"],
)
def test_each_caller_has_its_share(share, places, callers):
    taken = Places("streams", 1, share, lambda: places)
    with ExitStack() as held:
        for caller in callers:
            held.enter_context(taken.taken(caller))
        with pytest.raises(Busy, match=f"of at most {places} streams are under way"):
            held.enter_context(taken.taken(callers[-1]))


def test_places_grow_with_the_swarm_and_no_caller_has_most_of_them():
    assert most_streams(1) == most_streams(8) == 128
    assert most_streams(50) == 800
    assert most_streams(1) / 4 >= STREAMS_EACH
