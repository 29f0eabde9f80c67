"""A run on the internet is closed to strangers: real workers, real TLS, tokens of every kind."""

import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from murmuration.coordinator.asking import ask
from murmuration.coordinator.cli import status
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.exit_codes import MurmurError
from murmuration.worker.cli.doctor import doctor
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import FOLDER, Identity, IdentityError, Role
from murmuration.worker.identity.tokens import Token
from murmuration.worker.node.admission import Newcomer
from tests.support.stranger import serving
from tests.support.workers import (
    ENDLESS,
    PACED,
    QUICK,
    SMALL,
    Event,
    WorkerProcess,
    free_addresses,
    printed,
    settings_of,
)

TASK = PACED[:2]  # who joins says that it trusts the code


def enrolled(token: Token, name: str, contacts: list[str]) -> Identity:
    with Newcomer(contacts) as newcomer:
        return newcomer.enrol(token, name)


def certificate_at(address: str, out: Path) -> bytes:
    """DER: that the worker shows there, to the one of the folder."""
    context = ssl.create_default_context(cafile=str(out / FOLDER / "authority.pem"))
    context.load_cert_chain(out / FOLDER / "certificate.pem", out / FOLDER / "key.pem")
    context.check_hostname = False
    host, port = address.rsplit(":", 1)
    plain = socket.create_connection((host, int(port)))
    with context.wrap_socket(plain) as encrypted:
        shown = encrypted.getpeercert(binary_form=True)
    assert shown is not None
    return shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admission")


@pytest.fixture(scope="module")
def run(folder: Path) -> Authority:
    return Authority.make(folder / "first")


@pytest.fixture(scope="module")
def first(folder: Path, run: Authority) -> Iterator[str]:
    """The address of the worker that has begun the run, and holds its key."""
    with WorkerProcess(
        ["up", "--out", str(folder / "first"), "--json", *ENDLESS, *QUICK], "first"
    ) as worker:
        listening = worker.wait_for(lambda e: e["event"] == "listening", "address")
        worker.wait_for(lambda e: e["event"] == "started", "start")
        yield str(listening["address"])


def test_a_token_lets_a_worker_in_and_its_certificate_lets_it_in_again(folder, run, first):
    token, out = run.create_token(), folder / "second"
    arguments = ["join", first, "--out", str(out), "--name", "second", "--token", str(token), *TASK]
    for _ in range(2):  # the token is used up, which the command line that started it may not know
        with WorkerProcess([*arguments, "--json"], "second") as worker:
            worker.wait_for(lambda e: e["event"] == "round" and e["contributors"] == 2, "round")
            members = ask(first, identity=Identity.load(folder / "first"))["members"]
            assert {m["peer"] for m in members if m["health"] == "alive"} >= {"second"}
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
    (record,) = [each for each in run.tokens() if each.id == token.id]
    assert record.admitted == ("second",)
    said = (out / "events.jsonl").read_text() + (folder / "first/events.jsonl").read_text()
    assert str(token)[20:60] not in said
    assert "PRIVATE KEY" not in said


def test_a_certificate_that_ends_soon_is_renewed_and_no_round_is_lost(folder, run, first):
    out = folder / "short"
    # Certificates begin a day ago; this one is due ten seconds from now, in the midst of rounds.
    short = run.new_identity(Role.PEER, "short", valid_s=12 * 3600 + 15)
    short.save(out)
    with WorkerProcess(["join", first, "--out", str(out), "--json", *TASK], "short") as worker:
        begun = worker.wait_for(
            lambda e: e["event"] == "round" and e["contributors"] == 2, "a round of both"
        )
        if not worker.of("renewed"):
            worker.wait_for(lambda e: e["event"] == "renewed", "a later certificate")
        worker.wait_for_round(worker.of("round")[-1]["round"] + 5)
        since = [each for each in worker.of("round") if each["round"] > begun["round"]]
        assert {each["contributors"] for each in since} == {2}
        assert all(each["round"] <= begun["round"] for each in worker.of("round_failed"))
        held = Identity.load(out)
        assert held is not None
        assert held.key == short.key
        assert held.expires - short.expires > timedelta(days=300)
        (listening,) = worker.of("listening")
        assert certificate_at(str(listening["address"]), out) == held.der


def test_a_coordinators_certificate_is_renewed_too(folder):
    (address,) = free_addresses(1)
    out = folder / "long lived"
    # Due when it starts: certificates begin a day ago, and a third of the time is left.
    short = Authority.make(out).new_identity(Role.COORDINATOR, "coordinator", valid_s=3600)
    short.save(out)
    words = ["--listen", address, "--out", str(out), "--json"]
    with WorkerProcess(words, "coordinator", ("murmuration.coordinator.cli",)) as helper:
        helper.wait_for(lambda e: e["event"] == "renewed", "a later certificate")
        held = Identity.load(out)
        assert held is not None
        assert (held.key, held.role) == (short.key, Role.COORDINATOR)
        assert held.expires - short.expires > timedelta(days=300)
        assert ask(address, identity=held)["encrypted"]
        assert certificate_at(address, out) == held.der


def test_nobody_speaks_with_an_expelled_member(folder, run, first):
    token, out = run.create_token(), folder / "expelled"
    arguments = ["join", first, "--out", str(out), "--name", "expelled", "--json", *TASK]
    with WorkerProcess([*arguments, "--token", str(token)], "expelled") as worker:
        worker.wait_for(lambda e: e["event"] == "round" and e["contributors"] == 2, "round")
        printed("token", "expel", str(folder / "first"), "expelled")
        worker.wait_for(
            lambda e: e["event"] == "warning" and "peer expelled was expelled" in e["text"],
            "word of it",
        )
    known = Identity.load(folder / "first")
    members = {m["peer"]: m["health"] for m in ask(first, identity=known)["members"]}
    assert members["expelled"] == "left"
    with WorkerProcess(arguments, "again") as again:
        assert again.wait() != 0
        assert "was expelled" in again.errors


def test_a_second_holder_of_the_key_lets_in_when_the_first_is_gone(tmp_path):
    begun = Authority.make(tmp_path / "h1")

    def started(name: str, *words: str) -> WorkerProcess:
        out = ("--out", str(tmp_path / name), "--json")
        return up.enter_context(WorkerProcess([*words, *out], name))

    def both(event: Event) -> bool:
        return event["event"] == "round" and event["contributors"] == 2

    with ExitStack() as up:
        h1 = started("h1", "up", *ENDLESS, *QUICK)
        address = str(h1.wait_for(lambda e: e["event"] == "listening", "address")["address"])
        printed("token", "share", str(tmp_path / "h1"), str(tmp_path / "h2"))
        h2 = started("h2", "join", address, "--name", "h2", *TASK)
        h2.wait_for(both, "round of both")
        h1.send(signal.SIGKILL)
        (listening,) = h2.of("listening")
        second = Authority.load(tmp_path / "h2")
        assert second is not None
        token = second.create_token(uses=2)
        joins = ("join", str(listening["address"]), "--token", str(token), *TASK)
        taken = started("x", *joins, "--name", "h2")
        assert taken.wait() == 10
        assert "another key has the name 'h2'" in taken.errors
        started("h3", *joins, "--name", "h3").wait_for(both, "round of both")
        assert begun.tokens() == []


def test_an_expired_token_is_refused_by_the_worker_too(run, first, monkeypatch):
    """By whose clock it is over, whatever the joiner's says."""
    monkeypatch.setattr(Token, "check_date", lambda token: None)
    with pytest.raises(IdentityError, match="does not take this certificate"):
        enrolled(run.create_token(valid_s=-1), "third", [first])


def test_a_man_in_the_middle_learns_nothing(folder, run):
    """Neither from somebody who joins nor from one who asks, though he answers at the address."""
    heard: list[bytes] = []

    def listens(request: bytes) -> bytes:
        heard.append(request)
        return pb.EnrolReply(certificate=run.certificate).SerializeToString()

    his = Authority.make(folder / "his").new_identity(Role.PEER, "first")
    both = replace(his, authority=run.certificate + his.authority)  # he would take anybody's
    with serving({"Control/Enrol": listens, "Control/Status": listens}, identity=both) as there:
        with pytest.raises(IdentityError, match="not of this run's authority"):
            enrolled(run.create_token(), "third", [there])
        with pytest.raises(MurmurError, match="is of another run than the folder"):
            ask(there, identity=run.new_identity(Role.PEER, "third"))
    assert heard == []


def test_a_holder_of_the_token_cannot_stand_in_for_the_run(run):
    token, heard = run.create_token(uses=2), []
    with (
        serving(
            {"Control/Enrol": lambda raw: heard.append(raw) or b""}, identity=token.identity
        ) as there,
        pytest.raises(IdentityError, match="or not a peer's"),
    ):
        enrolled(token, "third", [there])
    assert heard == []


def test_who_is_not_let_in_is_told_in_one_line(folder, run, first):
    out, token = folder / "not let in", run.create_token()
    run.revoke(token.id)
    with WorkerProcess(["join", first, "--out", str(out), "--token", str(token)], "x") as worker:
        assert worker.wait() == 10
    assert worker.errors.count("\n") == 1
    assert "murmur: not let in by token" in worker.errors
    assert f"{first} refuses: token" in worker.errors
    assert [path.name for path in out.rglob("*.*")] == ["key.pem"]  # for the next token


def test_one_without_a_token_is_told_what_it_lacks(first, folder):
    with WorkerProcess(["join", first, "--out", str(folder / "no token")], "x") as worker:
        assert worker.wait() == 10
    assert worker.errors == (
        f"murmur: {first}: this run is encrypted; give a token with --token (`murmur token create` "
        "on a member makes one)\n"
    )


def test_who_asks_without_a_certificate_is_told_so(first, tmp_path):
    says = f"{first}: this run is encrypted; name the folder of a worker of it"
    with pytest.raises(MurmurError, match=says) as refused:
        status.main([first], standalone_mode=False)
    assert refused.value.exit_code == 10
    done = CliRunner().invoke(doctor, [first, "--out", str(tmp_path)], standalone_mode=False)
    assert f"{first}: this run is encrypted; give a token with --token" in done.output


def test_the_doctor_tells_of_a_wrong_token(first, folder, tmp_path):
    token = Authority.make(folder / "a fourth").create_token()
    done = CliRunner().invoke(doctor, [first, "--out", str(tmp_path), "--token", str(token)])
    assert done.exception is None
    bad = [line for line in done.output.splitlines() if line.startswith("BAD  ")]
    assert [line for line in bad if "authority" in line and line.startswith("BAD  token: ")]
    assert "is encrypted" not in done.output


def test_the_doctor_uses_up_no_token(run, first, tmp_path):
    token = run.create_token()  # for one machine
    asked = [first, "--out", str(tmp_path / "out"), "--token", str(token), "--name", "looked at"]
    asked += TASK
    for _ in range(2):
        done = CliRunner().invoke(doctor, asked, standalone_mode=False)
        assert [x for x in done.output.splitlines() if x.startswith("BAD  ")] == [], done.output
        assert f"{first} answers, a worker, encrypted" in done.output
        assert "ok   token: with it, or with --out, this machine" in done.output
        assert " dials 127.0.0.1:" in done.output
        assert not (tmp_path / "out").exists()
    assert enrolled(token, "looked at", [first]).name == "looked at"
    done = CliRunner().invoke(doctor, asked, standalone_mode=False)
    assert "has let in 1 of 1: it is used up" in done.output


def test_a_token_or_certificate_is_of_no_use_where_nothing_is_encrypted(run):
    with serving({}) as there:
        with pytest.raises(IdentityError, match=f"{there}: this run is not encrypted: .*join with"):
            enrolled(run.create_token(), "third", [there])
        with (
            Newcomer([there]) as newcomer,
            pytest.raises(IdentityError, match=f"{there}: this run is not encrypted: .*join with"),
        ):
            newcomer.ask_run(run.new_identity(Role.PEER, "third"))


def test_a_coordinator_lets_workers_in(folder):
    (address,) = free_addresses(1)
    out = folder / "coordinator"
    authority, words = Authority.make(out), ["--listen", address, "--out", str(out), "--json"]
    token = folder / "token"
    token.write_text(str(authority.create_token(uses=2)))
    steps = [*SMALL, *QUICK, *settings_of(run__steps=20, diloco__inner_steps=5)]
    shared = ["--coordinator", address, "--token-file", str(token), "--min-peers", "2", "--json"]
    with ExitStack() as up:
        helper = WorkerProcess(words, "coordinator", ("murmuration.coordinator.cli",))
        up.enter_context(helper).wait_for(lambda e: e["event"] == "listening", "address")
        given = {n: ["up", "--name", n, "--out", str(folder / "led" / n)] for n in ("w0", "w1")}
        workers = [
            up.enter_context(WorkerProcess([*words, *shared, *steps], name))
            for name, words in given.items()
        ]
        for worker in workers:
            assert worker.wait() == 0, worker.errors
            assert worker.result["rounds_completed"] == 4
        document = ask(address, identity=Identity.load(folder / "led" / "w0"))
        assert document["encrypted"] is True
        assert {member["peer"] for member in document["members"]} == {"w0", "w1"}
        with pytest.raises(MurmurError, match="this run is encrypted"):
            ask(address)
