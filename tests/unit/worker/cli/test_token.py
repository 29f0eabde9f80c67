"""`murmur token`, and what a worker prints to be pasted on others."""

import json
import socket
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from murmuration.worker.cli.commands import WorkerFlags, _joins
from murmuration.worker.cli.token import token
from murmuration.worker.errors import ConfigError, UsageError
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, IdentityError, Role
from murmuration.worker.identity.tokens import Token
from murmuration.worker.node.admission import Admission, Newcomer
from murmuration.worker.transport import AddressInUse
from murmuration.worker.views.lines import describe


def murmur_token(*arguments: object) -> str:
    done = CliRunner().invoke(token, [str(each) for each in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


def test_tokens_are_made_listed_and_revoked(tmp_path):
    run = str(tmp_path / "run")
    made = Token.parse(murmur_token("create", run, "--uses", "3", "--hours", "2"))
    other = Token.parse(murmur_token("create", run))
    assert made.identity.authority == other.identity.authority
    assert murmur_token("revoke", run, other.id) == f"token {other.id} is revoked\n"
    listed = json.loads(murmur_token("list", run, "--json"))
    assert [(each["id"], each["state"], each["uses"]) for each in listed] == [
        (made.id, "valid", 3),
        (other.id, "revoked", 1),
    ]
    assert listed[0]["expires"] - listed[1]["expires"] == pytest.approx(-22 * 3600, abs=60)
    shown = murmur_token("list", run)
    assert made.id in shown
    assert "0 of 3" in shown
    with pytest.raises(IdentityError, match="there is no token x here"):
        murmur_token("revoke", run, "x")
    for command in (["list"], ["revoke", "x"]):
        with pytest.raises(IdentityError, match="does not hold a run's key"):
            murmur_token(command[0], str(tmp_path), *command[1:])


def flags(out: Path, **given: object) -> WorkerFlags:
    """As where nothing else was typed."""
    typed = {each.name: each.metadata["attributes"].get("default") for each in fields(WorkerFlags)}
    return WorkerFlags(**{**typed, "out": out, **given})


def test_who_begins_a_run_on_a_network_makes_its_key_and_prints_what_to_paste(
    tmp_path, monkeypatch
):
    begins = flags(tmp_path, name="w0", listen="0.0.0.0:7700")
    identity = begins.identity(Newcomer())
    assert identity is not None
    assert (identity.role, identity.name) == (Role.PEER, "w0")
    assert begins.identity(Newcomer()) == identity  # again from its folder
    assert flags(tmp_path).identity(Newcomer(["127.0.0.1:1"])) == identity
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert (
        _joins(begins, identity)
        == f"--token TOKEN, as `murmur token create {tmp_path}` gives it here"
    )
    authority = Authority.load(tmp_path)
    assert authority is not None
    assert authority.tokens() == []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    pasted = _joins(begins, identity)
    assert Token.parse(pasted.removeprefix("--token ")).identity.authority == identity.authority
    assert [record.uses for record in authority.tokens()] == [16]
    assert describe({"event": "listening", "peer": "w0", "address": "192.0.2.7:7700"}, pasted) == (
        "w0 is reached at 192.0.2.7:7700\nanother machine joins with: "
        f"murmur join 192.0.2.7:7700 --listen 0.0.0.0:7700 {pasted}"
    )


def test_one_that_was_let_in_says_where_tokens_are_made(tmp_path):
    identity = Authority.make(tmp_path / "first").new_identity(Role.PEER, "w1")
    identity.save(tmp_path / "w1")
    assert _joins(flags(tmp_path / "w1"), identity) == (
        "--token TOKEN, as `murmur token create RUN` gives it where RUN was begun"
    )
    with pytest.raises(ConfigError, match="has the certificate of peer w1, not of peer w2"):
        flags(tmp_path / "w1", name="w2").identity(Newcomer())
    other = Authority.make(tmp_path / "other").create_token()
    with pytest.raises(IdentityError, match="of another run than the token"):
        flags(tmp_path / "w1", token=str(other)).identity(Newcomer(["127.0.0.1:1"]))
    own = Authority.load(tmp_path / "first")
    assert own is not None
    old = str(own.create_token(valid_s=-1))
    assert flags(tmp_path / "w1", token=old).identity(Newcomer(["127.0.0.1:1"])) == identity


def test_what_needs_no_certificate_gets_none(tmp_path):
    assert flags(tmp_path / "a").identity(Newcomer()) is None
    assert flags(tmp_path / "a").identity(Newcomer(["127.0.0.1:1"])) is None
    insecure = flags(tmp_path / "a", listen="0.0.0.0:7700", insecure=True)
    assert insecure.identity(Newcomer()) is None
    assert _joins(insecure, None) == "--insecure"
    assert _joins(flags(tmp_path / "a"), None) == ""
    assert not (tmp_path / "a").exists()
    token = str(Authority.make(tmp_path / "b").create_token())
    with pytest.raises(UsageError, match="one or the other"):
        flags(tmp_path / "a", insecure=True, token=token).identity(Newcomer())
    with pytest.raises(UsageError, match="say whom to join"):
        flags(tmp_path / "a", token=token).identity(Newcomer())
    for public in ({"listen": "0.0.0.0:7700"}, {"advertise": "192.0.2.7:7700"}):
        with pytest.raises(ConfigError, match="so it needs a token"):
            flags(tmp_path / "a", **public).identity(Newcomer(["192.0.2.1:7700"]))


def test_a_token_is_not_spent_by_a_peer_that_could_not_serve(tmp_path):
    token = str(Authority.make(tmp_path / "first").create_token())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=f"cannot listen on {listen}: .*--listen HOST:PORT"):
            flags(tmp_path / "a", listen=listen, token=token).identity(Newcomer(["127.0.0.1:1"]))
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another folder"):
        flags(tmp_path / "file", token=token).identity(Newcomer(["127.0.0.1:1"], wait_s=0.1))


def test_without_a_folder_that_can_be_written_no_run_begins_on_a_network(tmp_path):
    assert Admission(folder=None, default_name="x").identity(Newcomer()) is None
    (tmp_path / "file").write_text("")
    for folder, says in ((None, "name a folder to keep it"), (tmp_path / "file", "choose another")):
        with pytest.raises(ConfigError, match=says):
            Admission(folder=folder, default_name="x", public=True).identity(Newcomer())
    assert Identity.load(tmp_path / "file") is None
