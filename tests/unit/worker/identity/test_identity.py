"""Who is let into a run, and who is not."""

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker.background import workers
from murmuration.worker.identity import authority, certificates
from murmuration.worker.identity.authority import TRIAL, Authority, enrol
from murmuration.worker.identity.certificates import (
    FOLDER,
    Identity,
    IdentityError,
    Role,
    Verifier,
    certified_name,
    key_to_pem,
    member_identity,
    new_key,
    request_for,
)
from murmuration.worker.identity.gate import Gate
from murmuration.worker.identity.tokens import Token, token_from
from murmuration.worker.transport import Caller, Method, Refused


@pytest.fixture
def run(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "first")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    """The authority of another run."""
    return Authority.make(tmp_path / "other")


def joined(run: Authority, token: Token, name: str) -> Identity:
    key = new_key()
    certificate = run.admit(token.id, name, request_for(key))
    return Identity.of(key_to_pem(key), certificate, token.identity.authority)


def test_a_token_lets_one_peer_in_and_says_nothing_of_it_elsewhere(run, tmp_path):
    token = Token.parse(str(run.create_token()))
    identity = joined(run, token, "w1")
    assert (identity.role, identity.name) == (Role.PEER, "w1")
    (record,) = run.tokens()
    assert (record.id, record.admitted, record.state(time.time())) == (token.id, ("w1",), "used")
    secret = str(token).removeprefix("murmur1.")[:60]
    for path in (tmp_path / "first").rglob("*"):
        if path.is_file():
            assert secret not in path.read_text()
    key = token.identity.key.decode().splitlines()[1]
    assert key not in repr(token)
    assert key not in repr(identity)


def test_a_damaged_token_is_none_and_one_that_has_expired_or_was_wrapped_is_one(run):
    text = str(run.create_token())
    other = "B" if text[40] == "A" else "A"
    damaged = text[:-2], text[:-9], text[9:], f"{text[:40]}{other}{text[41:]}"
    for spoiled in (*damaged, "", "murmur1.", "murmur1.ä", "murmur1." + "A" * 9000):
        with pytest.raises(IdentityError, match="paste the whole"):
            Token.parse(spoiled)
    wrapped = "\n".join(text[start : start + 80] for start in range(0, len(text), 80))
    identity = Token.parse(text).identity
    assert Token.parse(f"  {wrapped}\n").identity.certificate == identity.certificate
    token = Token.parse(str(run.create_token(valid_s=-1)))
    with pytest.raises(IdentityError, match=f"token {token.id} has expired on .* UTC"):
        token.check_date()


def test_a_used_revoked_unknown_or_expired_token_lets_nobody_in(run, other, monkeypatch):
    used, revoked, late = (run.create_token() for _ in range(3))
    joined(run, used, "w1")
    run.revoke(revoked.id)
    for token, says in (
        (used, "1 of 1: it is used up"),
        (revoked, "was revoked"),
        (other.create_token(), "not known here"),
    ):
        with pytest.raises(IdentityError, match=says):
            joined(run, token, "w2")
    later = time.time() + 25 * 3600
    monkeypatch.setattr(authority.time, "time", lambda: later)
    with pytest.raises(IdentityError, match="has expired"):
        joined(run, late, "w2")
    assert [record.state(later) for record in run.tokens()] == ["expired", "revoked", "expired"]
    with pytest.raises(IdentityError, match="there is no token nothing here"):
        run.revoke("nothing")


def test_the_same_key_may_ask_again_when_an_answer_was_lost(run):
    token, key = run.create_token(), new_key()
    first, second = (run.admit(token.id, "w1", request_for(key)) for _ in range(2))
    for certificate in (first, second):
        assert Identity.of(key_to_pem(key), certificate, run.certificate).name == "w1"
    with pytest.raises(IdentityError, match="as 'w1': take that --name"):  # but under no other name
        run.admit(token.id, "w2", request_for(key))
    again, asked = run.create_token(uses=2), request_for(new_key())
    run.admit(again.id, "w4", asked)
    with pytest.raises(IdentityError, match="has let this key in as 'w4'"):
        run.admit(again.id, "w5", asked)
    again, asked = run.create_token(), request_for(key)
    for token_id, name in ((token.id, "w1"), (again.id, f"{TRIAL}w3")):
        asking = pb.EnrolRequest(name=name, request=asked)
        replies = [enrol(run, asking, Role.TOKEN, token_id) for _ in range(30)]
        assert "in the last 30 s" in replies[-1].refusal


def test_one_name_has_one_key(run):
    token = run.create_token(uses=5)
    joined(run, token, "w1")
    with pytest.raises(IdentityError, match=r"another key has the name 'w1'.*--name"):
        joined(run, token, "w1")
    assert run.tokens()[0].admitted == ("w1",)
    assert run.new_identity(Role.PEER, "w0").name == "w0"
    with pytest.raises(IdentityError, match="another key has the name 'w0'"):
        joined(run, token, "w0")


def test_a_certificate_is_renewed_for_its_own_key_and_name(run, other):
    held = run.new_identity(Role.PEER, "b", valid_s=60)
    assert held.renewed_from < datetime.now(UTC) < held.expires
    later = Identity.of(held.key, run.renew("b", held.der, held.request()), run.certificate)
    assert (later.key, later.name) == (held.key, "b")
    assert later.expires - held.expires > timedelta(days=300)
    assert later.renewed_from > datetime.now(UTC) + timedelta(days=200)
    for name, certificate, request, problem in (
        ("a", held.der, held.request(), "is not that of a"),
        ("b", held.der, request_for(new_key()), "for the key that it has"),
        ("b", b"", held.request(), "cannot be read"),
        ("b", run.new_identity(Role.PEER, "b", valid_s=-1).der, held.request(), "not valid now"),
        ("b", run.create_token().identity.der, held.request(), "is not that of b"),
        ("b", other.new_identity(Role.PEER, "b").der, held.request(), "not of this authority"),
    ):
        with pytest.raises(IdentityError, match=problem):
            run.renew(name, certificate, request)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\x1b[31m"])
def test_a_name_must_be_one(run, name):
    with pytest.raises(IdentityError, match="no name or address of a peer"):
        joined(run, run.create_token(), name)


@pytest.mark.parametrize(
    "name", ["w0", "Host-1.example", "ä ö/ü:*", "*.peer.murmuration", "x" * 256]
)
def test_any_name_comes_back_as_it_was(run, name):
    identity = joined(run, run.create_token(), name)
    assert identity.name == name
    assert identity.server_name(name) != identity.server_name(name.swapcase() + "x")
    assert identity.server_name("A") != identity.server_name("a")  # hosts' names have no case


def test_a_request_must_be_signed_by_its_key(run):
    request = bytearray(request_for(new_key()))
    request[-1] ^= 1
    empty = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    others = (
        empty.sign(ed25519.Ed25519PrivateKey.generate(), None),
        empty.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()),
    )
    token, der = run.create_token(), serialization.Encoding.DER
    for bad in (bytes(request), b"", b"\x30\x03abc", *(each.public_bytes(der) for each in others)):
        with pytest.raises(IdentityError, match=r"a request for a certificate|P-256"):
            run.admit(token.id, "w1", bad)
    assert run.tokens()[0].admitted == ()


def test_a_certificate_of_another_authority_or_key_is_no_identity(run, other):
    mine, theirs = (each.new_identity(Role.PEER, "w0") for each in (run, other))
    for key, certificate, reason in (
        (mine.key, theirs.certificate, "authority"),
        (theirs.key, mine.certificate, "another key"),
        (mine.key, b"nothing", "cannot be read"),
        (mine.key, mine.authority, "cannot be read"),
    ):
        with pytest.raises(IdentityError, match=reason):
            Identity.of(key, certificate, mine.authority)


def test_an_odd_extension_of_a_forged_certificate_is_refused_in_one_line(run):
    """The library raises more for one than it says."""
    mine, key = run.new_identity(Role.PEER, "w0"), new_key()
    root = x509.load_pem_x509_certificate(mine.authority)
    built = x509.CertificateBuilder(root.subject, root.subject, key.public_key(), 1)
    built = built.not_valid_before(root.not_valid_before_utc)
    built = built.not_valid_after(root.not_valid_after_utc)
    odd = x509.UnrecognizedExtension(x509.TLSFeature.oid, b"\x30\x03\x02\x01\x63")
    forged = built.add_extension(odd, critical=False).sign(key, hashes.SHA256())
    with pytest.raises(KeyError):
        list(forged.extensions)
    with pytest.raises(IdentityError, match="not of this authority"):
        Verifier(mine.authority).certified(forged.public_bytes(serialization.Encoding.DER))


@pytest.mark.parametrize(
    "names", [[], ["w0"], ["murmur:king/w0"], ["murmur:peer/"], ["murmur:peer"]]
)
def test_other_names_of_a_certificate_say_nothing(names):
    assert certified_name(names) is None


def test_files_are_for_their_user_alone(run, tmp_path):
    joined(run, run.create_token(), "w1").save(tmp_path / "w1")
    for folder in ("first", "w1"):
        kept = tmp_path / folder / FOLDER
        assert stat.S_IMODE(kept.stat().st_mode) == 0o700
        for path in kept.iterdir():
            if path.name != ".lock":  # empty
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert not (tmp_path / "w1" / FOLDER / "authority.key").exists()


def test_it_comes_back_from_its_folder(run, tmp_path):
    assert Identity.load(tmp_path / "w1") is None
    assert Authority.load(tmp_path / "w1") is None
    identity = joined(run, run.create_token(), "w1")
    identity.save(tmp_path / "swarm" / "w1")
    assert Identity.load(tmp_path / "swarm" / "w1") == identity
    assert member_identity(tmp_path / "swarm") == identity
    again = Authority.load(tmp_path / "first")
    assert again is not None
    assert joined(again, again.create_token(), "w2").authority == identity.authority
    with pytest.raises(IdentityError, match="has no certificate of a run"):
        member_identity(tmp_path / "nothing")


def test_damaged_files_are_one_line(run, tmp_path):
    joined(run, run.create_token(), "w1").save(tmp_path / "w1")
    (tmp_path / "w1" / FOLDER / "key.pem").write_text("nothing")
    with pytest.raises(IdentityError, match=r"w1/identity: .*; remove it, and join"):
        Identity.load(tmp_path / "w1")
    (kept := tmp_path / "first" / FOLDER / "ledger.json").unlink()
    run.create_token()
    held = json.loads(kept.read_bytes())
    (token,) = held["tokens"].values()
    by_hand: list[dict[str, object]] = [{"revoked": {"peer/x": each}} for each in (5, "zz", None)]
    odd = (5, {}, token | {"expires": "x"}, token | {"admitted": []}, token | {"more": 1})
    by_hand += [{"tokens": {"ab": each}} for each in odd] + [{"names": {"peer/x": 5}}]
    edited = (json.dumps(held | each).encode() for each in by_hand)
    for garbage in (b"[" * 200_000, b"[]", b"{}", b'{"tokens": 3}', b"x", b"{", *edited):
        kept.write_bytes(garbage)
        for read in (run.tokens, run.revocations, run.create_token):
            with pytest.raises(IdentityError, match=r"ledger\.json cannot be read"):
                read()
    (tmp_path / "first" / FOLDER / "authority.key").write_text("nothing")
    with pytest.raises(IdentityError, match="the run's key cannot be read"):
        Authority.load(tmp_path / "first")


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "authority.pem", "authority.key"])
def test_what_is_no_file_of_a_key_is_one_line_and_is_not_waited_for(tmp_path, name):
    Authority.make(tmp_path).new_identity(Role.PEER, "b").save(tmp_path)
    load = Authority.load if name == "authority.key" else Identity.load
    (path := tmp_path / FOLDER / name).write_bytes(b"")
    os.truncate(path, 1 << 30)
    for make in (lambda: None, os.mkfifo, os.mkdir):
        if make in (os.mkfifo, os.mkdir):
            path.unlink()
            make(path, 0o600)
        with pytest.raises(IdentityError, match=f"^{tmp_path / FOLDER}.*$"):
            load(tmp_path)


def test_of_two_that_begin_a_run_at_once_one_makes_its_key(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(Authority.make, [tmp_path] * 4))
    assert {each.certificate for each in made} == {made[0].certificate}
    identities = [each.new_identity(Role.PEER, f"w{n}") for n, each in enumerate(made)]
    assert all(Verifier(made[0].certificate).certified(each.der) for each in identities)


@pytest.mark.parametrize(
    ("days", "says", "code"), [(36525, "expired on .*; remove", 10), (0, "clock .*; set", 6)]
)
def test_one_that_is_not_valid_is_told_at_the_start(run, tmp_path, monkeypatch, days, says, code):
    """A machine that has just begun may not know the time yet: a service tries again after 6."""
    joined(run, run.create_token(), "w1").save(tmp_path / "w1")

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2000, 1, 1, tzinfo=UTC) + timedelta(days=days)

    monkeypatch.setattr(certificates.datetime, "datetime", Later)
    with pytest.raises(IdentityError, match=says) as failure:
        Identity.load(tmp_path / "w1")
    assert failure.value.exit_code == code


def test_old_tokens_are_forgotten(run, tmp_path, monkeypatch):
    monkeypatch.setattr(authority, "_KEPT", 2)
    old, new = [run.create_token(valid_s=-1).id for _ in range(4)], run.create_token().id
    assert [record.id for record in run.tokens()] == [*old[-2:], new]
    ledger = json.loads((tmp_path / "first" / FOLDER / "ledger.json").read_bytes())
    assert len(ledger["tokens"]) == 3


def test_a_token_comes_from_one_of_three_ways(run, tmp_path):
    text, file = str(run.create_token()), tmp_path / "token"
    file.write_text(f"{text}\n")
    for way in ((text, None, {}), (None, file, {}), (None, None, {"MURMUR_TOKEN": text})):
        assert str(token_from(*way)) == text
    assert token_from(None, None, {}) is None
    with pytest.raises(IdentityError, match="one or the other"):
        token_from(text, file, {})
    with pytest.raises(IdentityError, match=r"--token-file .*nothing: No such file"):
        token_from(None, tmp_path / "nothing", {})


def test_a_trial_uses_nothing_up_and_is_never_renewed(run):
    token, second, request = run.create_token(), run.create_token(), request_for(new_key())
    trial = joined(run, token, f"{TRIAL}new")
    assert trial.name == f"{TRIAL}{token.id}"
    assert trial.expires < datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(IdentityError, match="is for a trial: join with the token"):
        run.renew(trial.name, trial.der, request)
    assert [each.admitted for each in run.tokens()] == [(), ()]
    joined(run, token, "new")
    run.revoke(run.create_token().id)
    revoked = run.tokens()[-1].id
    for token_id, name, says in (
        (token.id, "new", "it is used up"),
        (token.id, "other", "it is used up"),
        (second.id, "new", "another key has the name 'new'"),
        (revoked, "third", "was revoked"),
    ):
        with pytest.raises(IdentityError, match=says):
            run.admit(token_id, f"{TRIAL}{name}", request)


def test_certificates_say_what_they_are_for(run):
    """Nobody can serve with that of a token: it has no name of a host."""
    peer, token = run.new_identity(Role.PEER, "b"), run.create_token().identity
    assert token.role is Role.TOKEN
    of_peer = {peer.server_name(None), peer.server_name("b")}
    for identity, purposes, hosts in ((peer, 2, of_peer), (token, 1, set())):
        found = x509.load_pem_x509_certificate(identity.certificate).extensions
        usage = found.get_extension_for_class(x509.KeyUsage)
        assert usage.critical
        assert (usage.value.digital_signature, usage.value.key_cert_sign) == (True, False)
        assert len(list(found.get_extension_for_class(x509.ExtendedKeyUsage).value)) == purposes
        assert not found.get_extension_for_class(x509.BasicConstraints).value.ca
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value
        assert set(names.get_values_for_type(x509.DNSName)) == hosts


def test_a_certificate_for_another_use_is_not_taken(run, monkeypatch):
    with monkeypatch.context() as patched:
        client_alone = [ExtendedKeyUsageOID.CLIENT_AUTH]
        patched.setattr(certificates, "_purposes", lambda role: client_alone)
        held = run.new_identity(Role.PEER, "b")
    with pytest.raises(IdentityError, match="not for the use of a peer"):
        Verifier(run.certificate).certified(held.der)
    with pytest.raises(IdentityError, match="not for the use of a peer"):
        Identity.of(held.key, held.certificate, held.authority)


@pytest.mark.parametrize("name", ["key.pem", "authority.key"])
def test_a_key_that_others_can_read_is_refused(tmp_path, name):
    Authority.make(tmp_path).new_identity(Role.PEER, "b").save(tmp_path)
    key = tmp_path / "identity" / name
    load = Identity.load if name == "key.pem" else Authority.load
    key.chmod(0o660)  # a volume's group
    assert load(tmp_path) is not None
    key.chmod(0o644)
    with pytest.raises(IdentityError, match="has mode 644, so that others have it: chmod 600 it"):
        load(tmp_path)
    key.chmod(0o600)
    key.with_name("authority.pem" if name == "key.pem" else "ledger.json").chmod(0o666)
    with pytest.raises(IdentityError, match="has mode 666, so that others change it"):
        load(tmp_path)


def test_a_member_does_not_renew_again_and_again(run):
    for name, times in (("b", 100), ("c", 1)):
        held = run.new_identity(Role.PEER, name)
        asked = pb.EnrolRequest(name=name, request=held.request(), certificate=held.der)
        replies = [enrol(run, asked, Role.PEER, name) for _ in range(times)]
        assert [bool(each.certificate) for each in replies] == [True] + [False] * (times - 1)


@pytest.mark.parametrize("method", [Method.GOSSIP, Method.LEASE, Method.EXCHANGE, Method.FETCH])
def test_a_token_that_is_tried_is_no_member(method):
    gate = Gate(None, offload=workers(), refused=lambda: None, log=lambda _: None)
    tries = Caller("ipv4:127.0.0.1:1", Role.PEER, f"{TRIAL}id")
    for asked in (Method.JOIN, Method.STATUS, Method.MEASURE):
        gate.admit(asked, tries)
    with pytest.raises(Refused, match="is not for a token that is tried"):
        gate.admit(method, tries)
    join = pb.JoinRequest(manifest=b"x", member=pb.Member(peer=tries.name))
    with pytest.raises(Refused, match="does not speak for"):
        gate.check(Method.JOIN, join.SerializeToString(), tries)
