"""The service over real sockets on loopback."""

import asyncio
import io
import json
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest.mock import Mock

import grpc
import pytest
from click.testing import CliRunner

from murmuration.coordinator import cli, rendezvous
from murmuration.coordinator.asking import ask
from murmuration.coordinator.processes import ReservedPorts
from murmuration.coordinator.registry import Registry
from murmuration.coordinator.rendezvous import CoordinatorRun, CoordinatorService, start_server
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack
from murmuration.protos.events import Event, Log
from murmuration.protos.exit_codes import MurmurError
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import FOLDER, Role, new_key, request_for
from tests.support.commands import refused
from tests.support.stranger import Stranger, calling, serving as answered

MANIFEST = pack({"diloco": {"inner_steps": 50}})
INTRODUCE = "Coordinator/Introduce"


def request(
    peer: str, *, phase: pb.Phase.ValueType = pb.PHASE_TRAINING, manifest: bytes = MANIFEST
) -> pb.IntroduceRequest:
    member = pb.Member(peer=peer, address=f"{peer}:7700", start_ms=1, phase=phase, step=40)
    return pb.IntroduceRequest(member=member, manifest=manifest)


@asynccontextmanager
async def serving(
    listen: str = "127.0.0.1:0", run: Authority | None = None, log: Log = lambda event: None
) -> AsyncIterator[tuple[str, Registry]]:
    registry = Registry()
    identity = run.new_identity(Role.COORDINATOR, "c") if run else None
    server, address = await start_server(listen, CoordinatorService(registry, log), identity, run)
    try:
        yield address, registry
    finally:
        await server.stop(None)


def call(address: str, *requests: pb.IntroduceRequest) -> list[pb.IntroduceReply]:
    with calling(address) as somebody:
        return [somebody.call(INTRODUCE, each, pb.IntroduceReply) for each in requests]


async def test_introduces_and_refuses_and_says_how_it_is():
    async with serving() as (address, _):
        other = pack({"diloco": {"inner_steps": 25}})
        replies = await asyncio.to_thread(
            call, address, request("w0"), request("w1"), request("w2", manifest=other)
        )
        assert [member.peer for member in replies[1].members] == ["w0"]
        assert replies[1].members[0].address == "w0:7700"
        assert "diloco.inner_steps: 50 in this run, 25 in yours" in replies[2].refusal
        run = await asyncio.to_thread(CliRunner().invoke, cli.status, [address, "--json"])
        document = json.loads(run.output)
        assert (run.exit_code, document["kind"]) == (0, "coordinator")
        assert document["members"][0]["peer"] == "w0"
        shown = await asyncio.to_thread(CliRunner().invoke, cli.status, [address])
        assert "w0:7700" in shown.output
        with pytest.raises(MurmurError, match="cannot listen on") as failure:
            await start_server(address, CoordinatorService(Registry()))
        assert failure.value.exit_code == 7


def enrolled(somebody: Stranger, name: str, certificate: bytes = b"") -> pb.EnrolReply:
    asked = pb.EnrolRequest(name=name, request=request_for(new_key()), certificate=certificate)
    return somebody.call("Control/Enrol", asked, pb.EnrolReply)


async def test_a_member_spends_nobodys_token_and_takes_nobodys_name(tmp_path, monkeypatch):
    """It is let in by one that holds the run's key too; the coordinator's ledger does not know."""
    run = Authority.make(tmp_path / "run")
    token = run.create_token(uses=5)
    run.share(tmp_path / "other")
    other = Authority.load(tmp_path / "other")
    assert other is not None
    w1 = other.new_identity(Role.PEER, "w1")
    named_as_the_token = other.new_identity(Role.PEER, token.id)

    def refusals(address: str) -> list[str]:
        with calling(address, named_as_the_token) as sybil:
            refused = [enrolled(sybil, "sybil"), enrolled(sybil, "sybil", named_as_the_token.der)]
        with calling(address, w1) as member:
            member.call(INTRODUCE, request("w1"), pb.IntroduceReply)
        with calling(address, token.identity) as newcomer:
            refused.append(enrolled(newcomer, "w1"))
            with monkeypatch.context() as within:
                within.setattr(run, "revocations", lambda: pytest.fail("it is read for a token"))
                with pytest.raises(grpc.RpcError, match="not for this call"):
                    newcomer.call("Control/Status", b"", pb.StatusReply)
            assert not enrolled(newcomer, "w2").refusal
        gone = run.new_identity(Role.PEER, "gone")
        run.expel("gone")
        ledger = tmp_path / "run" / FOLDER / "ledger.json"
        held = ledger.read_bytes()
        with calling(address, gone) as expelled:
            for method in (INTRODUCE, "Control/Status", "Control/Join", INTRODUCE):
                asked = request("gone") if method == INTRODUCE else b""
                with pytest.raises(grpc.RpcError, match="peer gone was expelled"):
                    expelled.call(method, asked, pb.StatusReply)
                ledger.write_text("{")  # what is known counts while it cannot be read
        ledger.write_bytes(held)
        return [reply.refusal for reply in refused]

    events: list[Event] = []
    async with serving(run=run, log=events.append) as (address, _):
        no_certificate, other_key, name = await asyncio.to_thread(refusals, address)
    assert "ledger.json cannot be read" in str(events[0]["text"])
    assert "cannot be read" in no_certificate
    assert "renewed for the key that it has" in other_key
    assert "another key has the name 'w1'" in name
    assert run.tokens()[0].admitted == ("w2",)


async def test_one_caller_enrols_twice_at_once(monkeypatch):
    under_way, most, both = list[int](), list[int](), threading.Barrier(2)

    def enrol(*_: object, **__: object) -> pb.EnrolReply:
        under_way.append(0)
        most.append(len(under_way))
        both.wait(60)
        under_way.pop()
        return pb.EnrolReply()

    monkeypatch.setattr(rendezvous, "enrol", enrol)
    service, context = CoordinatorService(Registry()), Mock(auth_context=dict)
    asked = (service.Enrol(pb.EnrolRequest(), context) for _ in range(6))
    assert await asyncio.gather(*asked) == [pb.EnrolReply()] * 6
    assert max(most) == 2


async def test_started_again_it_learns_the_swarm_back():
    with ReservedPorts(1) as ports:
        async with serving(ports.addresses[0]) as (address, _):
            await asyncio.to_thread(call, address, request("w0"), request("w1"))
        async with serving(ports.addresses[0]) as (address, registry):
            assert registry.members == {}
            asked = request("w1"), request("w0"), request("w1")
            replies = await asyncio.to_thread(call, address, *asked)
            assert [member.peer for member in replies[-1].members] == ["w0"]
            assert registry.members["w0"].member.step == 40
            assert registry.manifest == MANIFEST


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"Control/Status": b"junk"}, "not with a status"),
        ({}, "neither a worker nor a coordinator"),
    ],
)
def test_an_answer_that_is_no_status_is_refused(answers, says):
    replies = {m: pb.StatusReply(document=d).SerializeToString() for m, d in answers.items()}
    answering = {method: lambda _, raw=raw: raw for method, raw in replies.items()}
    with answered(answering) as address, pytest.raises(MurmurError, match=says) as failure:
        ask(address)
    assert failure.value.exit_code == 6


def test_nobody_there_is_said():
    with ReservedPorts(1) as ports:
        line = refused(cli.status, 6, ports.addresses[0])
    assert line.startswith(f"{ports.addresses[0]} does not answer: tried Control/")
    assert " (connection refused); check the address" in line  # soon, on a machine with time


def test_one_that_listens_and_says_nothing_is_given_up_in_time():
    says = r"does not answer: tried Control/Status for \d+\.\d s"
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(MurmurError, match=says):
        ask(f"127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.3)


class Lines(io.StringIO):
    """Collects what is printed; calls back with the address once it is known."""

    def __init__(self, on_listening: Callable[[str], None]) -> None:
        super().__init__()
        self._on_listening = on_listening

    def write(self, text: str) -> int:
        if "listening on " in text:
            self._on_listening(text.rpartition(" ")[2].strip())
        return super().write(text)


async def test_a_session_ends_when_the_expected_workers_are_done(monkeypatch):
    threads = []

    def workers(address: str) -> None:
        requests = [request("w0"), request("w1")]
        requests += [request(name, phase=pb.PHASE_DONE) for name in ("w0", "w1")]
        threads.append(threading.Thread(target=call, args=(address, *requests)))
        threads[0].start()

    lines = Lines(workers)
    monkeypatch.setattr(sys, "stdout", lines)
    session = CoordinatorRun(as_json=False, expect=2)
    await session.run("127.0.0.1:0")
    await asyncio.to_thread(threads[0].join)
    assert all(known.done for known in session.registry.members.values())
    assert "w1 at w1:7700 is alive" in lines.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_on_a_loop_that_has_no_handlers_for_them(monkeypatch, number):
    """As that of Windows."""

    def lacking(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.unix_events._UnixSelectorEventLoop, "add_signal_handler", lacking)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "stdout", Lines(lambda _address: signal.raise_signal(number)))
    asyncio.run(CoordinatorRun(as_json=False, expect=2).run("127.0.0.1:0"))
    assert signal.getsignal(signal.SIGTERM) is before
