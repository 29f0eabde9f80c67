"""The questions before there is a peer: to whom, for how long, and what the user hears."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import folder
from murmuration.worker.config import Config
from murmuration.worker.errors import PeersUnreachable
from murmuration.worker.folder import NOTHING, Remembered
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Role
from murmuration.worker.manifest import Manifest
from murmuration.worker.node import admission
from murmuration.worker.node.admission import Newcomer
from murmuration.worker.transport.grpc import GrpcTransport
from tests.support.stranger import handing_out, serving
from tests.support.workers import free_addresses

RUN = Manifest.of(Config(), ())


def peer(address: str = "127.0.0.1:0", **manifest: Any) -> AbstractContextManager[str]:
    """One that says what its run is."""
    return serving({"Control/Join": handing_out({**RUN.document, **manifest})}, address)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_TELL_S", 0.0)
    monkeypatch.setattr(admission, "_PAUSE_S", 0.01)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_of_several_that_answers_is_enough(where):
    addresses = free_addresses(3)
    with peer(addresses[where]), Newcomer(addresses) as asks:
        first = asks.ask_run(None)
    assert (first.address, first.manifest.run) == (addresses[where], RUN.run)
    assert first.peers(addresses) == tuple(addresses)


ALONE = "begin another by `murmur up`; trying"
ENDS = {
    None: f"if the run is over, {ALONE} for 2 min 00 s more",
    False: f"if the run is over, {ALONE} until one does",
    True: f"this peer's run is over: {ALONE} for 2 min 00 s more",
}


@pytest.mark.parametrize("over", ENDS)  # None: of one that was no member
def test_who_comes_later_is_waited_for_and_the_user_told_whom_it_waits_for(over):
    first, second = free_addresses(2)
    known = NOTHING if over is None else Remembered(RUN.run, (first,), (first,), over)
    told: list[str] = []
    with ExitStack() as later:

        def tell(line: str) -> None:
            told.append(line)
            later.enter_context(peer(second))

        with Newcomer([first, second], remembered=known, tell=tell) as asks:
            assert asks.ask_run(None).address == second
    (line,) = told
    refused = "connection refused"
    assert line.startswith(f"nobody answers yet: {first}: {refused}; {second}: {refused}; check ")
    assert line.endswith(f"; {ENDS[over]}")


def test_a_coordinator_says_that_the_run_is_over():
    said = pb.JoinReply(manifest=RUN.pack(), coordinator=True, refusal="over\33[2J")
    with (
        serving({"Control/Join": lambda _: said.SerializeToString()}) as address,
        Newcomer([address]) as asks,
        pytest.raises(PeersUnreachable, match=f"^{address}: over\\?\\[2J; begin another by"),
    ):
        asks.ask_run(None)


@pytest.mark.parametrize("stranger", [False, True])
def test_who_is_only_remembered_is_believed_to_be_of_that_run_alone(tmp_path, stranger):
    """Another run has its address by now, or a stranger, who ends nothing."""
    named, other = free_addresses(2)
    identity = Authority.make(tmp_path).new_identity(Role.PEER, "x")
    there = serving({}, other, identity) if stranger else peer(other)
    known = Remembered(RUN.run ^ (not stranger), (named,), (other,))
    with (
        there,
        Newcomer([named], remembered=known, wait_s=0.1) as asks,
        pytest.raises(PeersUnreachable, match=named if stranger else f"{other}: another run by"),
    ):
        asks.ask_run(None)


def lets_in(run: Authority) -> Callable[[bytes], bytes]:
    def answer(raw: bytes) -> bytes:
        asked = pb.EnrolRequest.FromString(raw)
        certificate = run.admit(run.create_token().id, asked.name, asked.request, None)
        return pb.EnrolReply(certificate=certificate).SerializeToString()

    return answer


@pytest.mark.parametrize("notebook", [False, True])
def test_all_is_asked_over_one_client_whether_or_not_a_loop_runs(tmp_path, monkeypatch, notebook):
    run, made = Authority.make(tmp_path), list[GrpcTransport]()

    class Counted(GrpcTransport):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(admission, "GrpcTransport", Counted)
    answers = {"Control/Enrol": lets_in(run), "Control/Join": handing_out(RUN.document)}
    shown = run.new_identity(Role.PEER, "first")

    def joins() -> str:
        with serving(answers, identity=shown) as address, Newcomer([address]) as asks:
            identity, again = (asks.enrol(run.create_token(), "second", tmp_path) for _ in range(2))
            assert identity.key == again.key, "though the first answer is lost"
            asks.ask_run(identity)
            asks.check_run(Config(), identity)
            return identity.name

    async def cell() -> str:
        return joins()

    assert (asyncio.run(cell()) if notebook else joins()) == "second"
    assert len(made) == 1


def test_a_contact_that_closes_the_connection_once_has_not_refused_the_token(tmp_path, monkeypatch):
    run = Authority.make(tmp_path)
    away = [admission.Untrusted("it closes the connection", closed=True) for _ in range(2)]

    async def call(_address: str, _method: str, raw: bytes, _timeout_s: float) -> bytes:
        if away:
            raise away.pop()
        return lets_in(run)(raw)

    client = SimpleNamespace(call=call, close=AsyncMock())
    monkeypatch.setattr(admission, "GrpcTransport", lambda *_: client)
    with Newcomer(["a:1"]) as asks:
        assert asks.enrol(run.create_token(), "second").name == "second"


async def test_who_answers_has_turned_nobody_away(monkeypatch):
    away = admission.Untrusted("another authority")
    answer = pb.JoinReply(manifest=RUN.pack(), seen_from="no host\33[2J").SerializeToString()
    asks, client = Newcomer(), AsyncMock(side_effect=[away, away, answer, away, away])
    monkeypatch.setattr(asks, "_transport", SimpleNamespace(call=client))
    found = [await asks._glance("a:1", False, 1.0) for _ in range(5)]
    assert [each and each.seen_from for each in found] == [None, None, "", None, None]


def quiet(line: str) -> None:
    raise AssertionError(line)


def test_members_are_remembered_for_the_same_command(tmp_path):
    Remembered(RUN.run, ("a:1",), ("b:2", "w3@c:3", "odd", "d:4")).keep(tmp_path)
    known = Remembered(RUN.run, ("a:1",), ("b:2", "d:4"))  # nobody dials a relayed one at once
    for contacts in (["a:1"], ["x:1", "a:1"], ["b:2"]):
        assert folder.remembered(tmp_path, contacts, quiet) == known
    for contacts in (["x:1"], []):  # another run's, in the same folder
        assert folder.remembered(tmp_path, contacts, quiet) == NOTHING
    for nowhere in (None, tmp_path / "new"):
        assert folder.remembered(nowhere, ["a:1"], quiet) == NOTHING
    Remembered(RUN.run, (), ("b:2",)).keep(tmp_path)  # by the first peer of a run
    assert folder.remembered(tmp_path, [], quiet).members == ("b:2",)
    assert folder.remembered(tmp_path, ["x:1"], quiet) == NOTHING


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"null", b"[" * 30_000, b"x" * 100_000),
        {"members": None},
        *({"members": found} for found in ("b:2", [7], ["b"], ["b:99999"], ["b:2"] * 100)),
        {"members": [f"{'b' * 400}:1"]},
        *({"run": "x"}, {"run": None}),
    ],
)
def test_what_cannot_be_read_is_not_believed(tmp_path, content):
    if not isinstance(content, bytes):
        kept = {"run": "1", "contacts": ["a:1"], "members": ["b:2"]} | content
        content = json.dumps({key: it for key, it in kept.items() if it is not None}).encode()
    (tmp_path / "members.json").write_bytes(content)
    told: list[str] = []
    assert folder.remembered(tmp_path, ["a:1"], told.append) == NOTHING
    assert told == [
        f"{tmp_path}/members.json is damaged or cannot be read: its members of the run are not "
        "tried"
    ]
