"""The authority of a run: signs certificates, makes tokens, and keeps who was let in by which.
`murmur token` and the process that lets peers in share the folder's ledger, under a lock."""

import asyncio
import datetime
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric import ec
from filelock import FileLock, Timeout

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import check_name
from murmuration.protos.events import Log, Warnings, new_event
from murmuration.protos.figures import shown
from murmuration.protos.files import read_json
from murmuration.worker.identity import certificates
from murmuration.worker.identity.certificates import FOLDER, Identity, IdentityError, Role
from murmuration.worker.identity.tokens import Token

if TYPE_CHECKING:
    from murmuration.worker.background import Offload

_DAY_S = 24 * 3600.0
PEER_VALID_S = 366 * _DAY_S
TOKEN_VALID_S = _DAY_S
TOKEN_USES = 1
_AUTHORITY_VALID_S = 10 * PEER_VALID_S
_KEY, _CERTIFICATE, _LEDGER = "authority.key", "authority.pem", "ledger.json"
_REVOKED = "revoked.json"  # that the authority has taken back, beside a peer's identity
_LOCK_S = 5.0
_PACE_S, _MOST_RENEWED = 30.0, 4096
_MOST_AGAIN = 16  # certificates of one token within that time, that let nobody else in
_NUMBERS = ("made", "expires", "uses")  # of a token
_KEPT = 256  # tokens that have ended and are still listed
MOST = 4096  # revocations in a run; a peer holds about a megabyte of them
REVOCATION = b"murmuration revocation\0"  # what a signature of one begins with

TRIAL = "trial:"  # before a name: of a peer that only asks whether it would be let in
_TRIAL_VALID_S = 300.0
_CHECK_S, _ASK_AGAIN_S = 10.0, 60.0
_WARNED = datetime.timedelta(days=30)  # before the end, that nobody has renewed it


@dataclass(frozen=True)
class TokenRecord:
    """The authority's record of a token: nothing that lets anybody in. Times are s since 1970."""

    id: str
    made: float
    expires: float
    uses: int  # how many peers it may let in
    admitted: tuple[str, ...]  # their names
    revoked: bool

    def state(self, now: float) -> str:
        if self.revoked:
            return "revoked"
        if now >= self.expires:
            return "expired"
        return "used" if len(self.admitted) >= self.uses else "valid"


class Authority:
    """The run's key and ledger in a worker's or coordinator's folder. any thread or process."""

    def __init__(self, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: bytes) -> None:
        self._folder, self._key, self.certificate = folder / FOLDER, key, certificate
        # By who has asked: since when, and how many certificates it was given.
        self._given: dict[str, tuple[float, int]] = {}

    @classmethod
    def load(cls, folder: Path) -> "Authority | None":
        """Raises IdentityError."""
        kept = folder / FOLDER
        if not (kept / _KEY).exists():
            return None
        try:
            certificates.check_private(kept / _KEY)
            certificates.check_private(kept / _LEDGER, writing=True)
            key = certificates.private_key(certificates.read_kept(kept / _KEY))
            return cls(folder, key, certificates.read_kept(kept / _CERTIFICATE))
        except (OSError, ValueError) as error:
            raise IdentityError(f"{kept}: the run's key cannot be read: {error}") from error

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        """Takes that of another process, if one makes it too. Raises OSError, IdentityError."""
        key, kept = certificates.new_key(), folder / FOLDER
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(kept / ".lock", timeout=_LOCK_S):
            if (held := cls.load(folder)) is not None:
                return held
            certificate = certificates.self_signed(key, _AUTHORITY_VALID_S)
            certificates.write_secret(kept / _CERTIFICATE, certificate)
            certificates.write_secret(kept / _KEY, certificates.key_to_pem(key))
        return cls(folder, key, certificate)

    def share(self, folder: Path) -> None:
        """Gives the key and the ledger to another worker's folder. Raises IdentityError: that is of
        another run, or holds a key, or cannot be written."""
        kept = folder / FOLDER
        try:
            if (kept / _KEY).exists():
                raise IdentityError(f"{kept} holds a run's key already")
            of = kept / _CERTIFICATE
            if of.exists() and of.read_bytes() != self.certificate:
                raise IdentityError(f"{kept} is of another run")
            certificates.write_secret(kept / _LEDGER, json.dumps(self._read(), indent=1).encode())
            certificates.write_secret(kept / _CERTIFICATE, self.certificate)
            certificates.write_secret(kept / _KEY, certificates.key_to_pem(self._key))
        except OSError as error:
            raise IdentityError(f"{kept} cannot be written: {error.strerror}") from error

    def new_identity(self, role: Role, name: str, valid_s: float = PEER_VALID_S) -> Identity:
        """For a process of this authority's own user, which has the name from now on."""
        check_name(name, IdentityError)
        key = certificates.new_key()
        with self._ledger() as ledger:
            ledger["names"][subject(role, name)] = certificates.fingerprint(key.public_key())
        certificate = self._sign(key.public_key(), role, name, valid_s)
        return Identity.of(certificates.key_to_pem(key), certificate, self.certificate)

    def create_token(self, uses: int = TOKEN_USES, valid_s: float = TOKEN_VALID_S) -> Token:
        """One that lets `uses` peers in, within `valid_s`. Raises OSError, IdentityError."""
        token_id, key, now = secrets.token_hex(4), certificates.new_key(), time.time()
        fresh = {"made": now, "expires": now + valid_s, "uses": uses, "admitted": {}}
        with self._ledger() as ledger:
            ledger["tokens"][token_id] = fresh | {"revoked": False}
            ended = [id_ for id_, each in ledger["tokens"].items() if now >= each["expires"]]
            for old in ended[:-_KEPT]:
                del ledger["tokens"][old]
        certificate = self._sign(key.public_key(), Role.TOKEN, token_id, valid_s)
        return Token(Identity.of(certificates.key_to_pem(key), certificate, self.certificate))

    def tokens(self) -> list[TokenRecord]:
        """Oldest first. Raises IdentityError."""
        return [
            TokenRecord(id_, **each | {"admitted": tuple(each["admitted"].values())})
            for id_, each in self._read()["tokens"].items()
        ]

    def revoke(self, token_id: str) -> None:
        """It lets no peer in any more; those that it has let in stay. Raises IdentityError."""
        with self._ledger() as ledger:
            if token_id not in ledger["tokens"]:
                known = ", ".join(ledger["tokens"]) or "none"
                raise IdentityError(f"there is no token {token_id} here; there are: {known}")
            ledger["tokens"][token_id]["revoked"] = True
            self._take_back(ledger, subject(Role.TOKEN, token_id))

    def expel(self, name: str) -> None:
        """Takes back a peer's certificate and name. Raises IdentityError."""
        about = subject(Role.PEER, name)
        with self._ledger() as ledger:
            if about not in ledger["names"]:
                known = ", ".join(each.partition("/")[2] for each in ledger["names"]) or "none"
                raise IdentityError(f"there is no peer {name!r} here; there are: {known}")
            self._take_back(ledger, about)

    def revocations(self) -> list[pb.Revocation]:
        """Raises IdentityError."""
        return [
            pb.Revocation(subject=about, signature=bytes.fromhex(signature))
            for about, signature in self._read()["revoked"].items()
        ]

    def _take_back(self, ledger: dict[str, Any], about: str) -> None:
        revoked = ledger["revoked"]
        if about not in revoked:
            if len(revoked) >= MOST:  # one more would be too many for peers to keep
                raise IdentityError(f"{MOST} are revoked: begin a run with a new key")
            revoked[about] = revocation(certificates.key_to_pem(self._key), about).signature.hex()

    def admit(self, token_id: str, name: str, request: bytes, holder: str | None = None) -> bytes:
        """Signs a certificate (PEM) for the key of a request; asked again for the same key and
        name, gives another: the first answer may have been lost.

        A name behind `TRIAL` asks whether the token would let such a peer in. That uses nothing up:
        the certificate is for a few minutes, in a name that each token has one of. Args: holder:
        fingerprint of the key that a member of that name has: another authority may have let it in.
        Raises IdentityError: the token does not let it in, or another key has the name."""
        check_name(name, IdentityError)
        key = certificates.requested_key(request)
        mark = certificates.fingerprint(key)
        if name.startswith(TRIAL):
            _admit(self._read(), token_id, name.removeprefix(TRIAL), mark, holder)
            self._check_pace(subject(Role.TOKEN, token_id), _MOST_AGAIN)
            return self._sign(key, Role.PEER, f"{TRIAL}{token_id}", _TRIAL_VALID_S)
        with self._ledger() as ledger:
            if not _admit(ledger, token_id, name, mark, holder):
                self._check_pace(subject(Role.TOKEN, token_id), _MOST_AGAIN)
        return self._sign(key, Role.PEER, name, PEER_VALID_S)

    def renew(
        self,
        name: str,
        certificate: bytes,
        request: bytes,
        role: Role = Role.PEER,
        *,
        paced: bool = False,
    ) -> bytes:
        """Signs a later certificate (PEM) for a member that has one (DER), for the same key. Args:
        role: a coordinator renews its own; others get a peer's only; paced: not again within 30 s.
        Raises IdentityError: what it has is not valid, or of another key or name."""
        if name.startswith(TRIAL):
            raise IdentityError(f"the certificate of {name} is for a trial: join with the token")
        held = certificates.Verifier(self.certificate).certified(certificate)
        key = certificates.requested_key(request)
        if (held.role, held.name) != (role, name):
            raise IdentityError(f"the certificate to be renewed is not that of {name}")
        if certificates.fingerprint(held.key) != certificates.fingerprint(key):
            raise IdentityError("a certificate is renewed for the key that it has; join again")
        if role is Role.PEER:
            _check_not_expelled(self._read(), name)
        if paced:
            self._check_pace(subject(role, name), 1)
        return self._sign(key, role, name, PEER_VALID_S)

    def _check_pace(self, who: str, most: int) -> None:
        """Raises IdentityError: certificates without end. An honest peer asks once a minute."""
        now = time.monotonic()
        since, given = self._given.get(who, (-math.inf, 0))
        if now >= since + _PACE_S:
            since, given = now, 0
        if given >= most:
            raise IdentityError(f"{who} was given a certificate in the last {_PACE_S:g} s")
        if len(self._given) >= _MOST_RENEWED:
            self._given.clear()
        self._given[who] = since, given + 1

    def _sign(self, key: ec.EllipticCurvePublicKey, role: Role, name: str, valid_s: float) -> bytes:
        issuer = self.certificate, self._key
        return certificates.signed_certificate(*issuer, key, role, name, valid_s)

    def _read(self) -> dict[str, Any]:
        path, parts = self._folder / _LEDGER, ("tokens", "names", "revoked")
        try:
            ledger: dict[str, Any] = read_json(path)
            if not all(isinstance(ledger[part], dict) for part in parts):
                raise ValueError("it is no ledger")
            texts = [*ledger["names"].values()]
            for each in ledger["tokens"].values():
                math.fsum(getattr(TokenRecord("", **each), key) for key in _NUMBERS)
                texts += each["admitted"].values()
            "".join(texts), [*map(bytes.fromhex, ledger["revoked"].values())]
            return ledger
        except FileNotFoundError:
            return {part: {} for part in parts}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise IdentityError(f"{path} cannot be read: {error}") from error

    @contextmanager
    def _ledger(self) -> Iterator[dict[str, Any]]:
        """The ledger to be changed; it is kept unless the block raises."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(self._folder / ".lock", timeout=_LOCK_S):
                ledger = self._read()
                yield ledger
                content = json.dumps(ledger, indent=1).encode()
                certificates.write_secret(self._folder / _LEDGER, content)
        except (OSError, Timeout) as error:
            raise IdentityError(f"{self._folder} cannot be written: {error}") from error


def subject(role: Role, name: str) -> str:
    return f"{role}/{name}"


def revocation(authority_key: bytes, about: str) -> pb.Revocation:
    """Signs one by the authority's key (PEM): peers pass it on, and none is withdrawn."""
    signature = certificates.signer(authority_key)(REVOCATION + about.encode())
    return pb.Revocation(subject=about, signature=signature)


def enrol(
    authority: Authority | None,
    asked: pb.EnrolRequest,
    role: str,
    name: str,
    *,
    holder: str | None = None,
    revoked: bool = False,
) -> pb.EnrolReply:
    """Answers a newcomer with a token, or a member that wants a later certificate. Reads and writes
    the authority's files. Args: authority: None without its key; role, name: of the caller, by its
    certificate; holder: as `admit` takes it; revoked: whether the caller counts no more."""
    try:
        if authority is None:
            raise IdentityError("it does not hold the run's key: join at the peer that does")
        if revoked:
            raise IdentityError(f"{role} {name} was revoked")
        if role == Role.TOKEN:
            certificate = authority.admit(name, asked.name, asked.request, holder)
        elif role == Role.PEER:
            certificate = authority.renew(name, asked.certificate, asked.request, paced=True)
        else:
            raise IdentityError(f"the certificate of a {role or 'stranger'} lets nobody in")
    except IdentityError as error:
        return pb.EnrolReply(refusal=str(error))
    return pb.EnrolReply(certificate=certificate)


def _admit(ledger: dict[str, Any], token_id: str, name: str, mark: str, holder: str | None) -> bool:
    """Returns whether the peer's key is new. Raises IdentityError."""
    _check_not_expelled(ledger, name)
    if (token := ledger["tokens"].get(token_id)) is None:
        raise IdentityError(f"token {token_id} is not known here")
    if token["revoked"]:
        raise IdentityError(f"token {token_id} was revoked")
    if time.time() >= token["expires"]:
        raise IdentityError(f"token {token_id} has expired")
    if (known := token["admitted"].get(mark)) == name:
        return False
    if known is not None:  # else it would let in any number by one key
        raise IdentityError(f"token {token_id} has let this key in as {known!r}: take that --name")
    if len(token["admitted"]) >= token["uses"]:
        raise IdentityError(
            f"token {token_id} has let in {len(token['admitted'])} of {token['uses']}: it is used "
            "up; ask for a new one: murmur token create"
        )
    taken = holder not in (None, mark)
    if taken or ledger["names"].setdefault(f"{Role.PEER}/{name}", mark) != mark:
        raise IdentityError(
            f"another key has the name {name!r} in this run; choose another with --name"
        )
    token["admitted"][mark] = name
    return True


def _check_not_expelled(ledger: dict[str, Any], name: str) -> None:
    if subject(Role.PEER, name) in ledger["revoked"]:
        raise IdentityError(f"peer {name!r} was expelled from this run")


@dataclass(frozen=True)
class Credentials:
    """A peer's key and certificate, without which nothing is encrypted; the run's authority, if it
    lets others in; and the folder with what it needs to come back."""

    identity: Identity | None = None
    authority: Authority | None = None
    folder: Path | None = None

    @classmethod
    def of(cls, identity: Identity | None, folder: Path | None) -> "Credentials":
        """Adds the authority of an encrypted run, if the folder has it. Raises IdentityError."""
        encrypted = identity is not None and folder is not None
        return cls(identity, Authority.load(folder) if encrypted and folder else None, folder)

    def keep(self, identity: Identity) -> None:
        if self.folder is not None:
            identity.save(self.folder)

    def keep_revoked(self, entries: Sequence[pb.Revocation]) -> None:
        """Puts what the authority has taken back in the folder. Raises OSError."""
        if self.folder is not None:
            document = {each.subject: each.signature.hex() for each in entries}
            path = self.folder / FOLDER / _REVOKED
            certificates.write_secret(path, json.dumps(document, indent=1).encode())

    def revoked(self) -> list[pb.Revocation]:
        path = (self.folder or Path()) / FOLDER / _REVOKED
        if self.folder is None or not path.exists():
            return []
        try:
            known = ((about, bytes.fromhex(signed)) for about, signed in read_json(path).items())
            return [pb.Revocation(subject=about, signature=signed) for about, signed in known]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise IdentityError(f"{path} cannot be read: {error}; remove it") from error


class Renewal:
    """Renews the certificate of one process when a third of its time is left, on its event loop, by
    a peer that holds the run's key. Its own key stays. Args: authority: if it holds the run's; ask:
    asks those that may hold it for a later certificate (PEM), None where none gives one; keep: puts
    the new identity where the process finds it (raises OSError); renewed: called with it."""

    def __init__(
        self,
        identity: Identity,
        authority: Authority | None,
        *,
        ask: Callable[[pb.EnrolRequest], Awaitable[bytes | None]] | None = None,
        keep: Callable[[Identity], None],
        renewed: Callable[[Identity], None],
        offload: "Offload",
        log: Log,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._identity, self._authority = identity, authority
        self._ask, self._offload, self._now = ask, offload, now
        self._keep, self._renewed, self._log = keep, renewed, log
        self._warnings = Warnings(log)

    async def run(self) -> None:
        while True:  # a clock may be set back
            if due := (now := self._now()) >= self._identity.renewed_from:
                await self._renew(now)
            await asyncio.sleep(_ASK_AGAIN_S if due else _CHECK_S)

    async def _renew(self, now: datetime.datetime) -> None:
        before, authority = self._identity, self._authority
        certificate: bytes | None = None
        try:
            name, der, request = before.name, before.der, before.request()
            if authority is not None:
                work = partial(authority.renew, name, der, request, before.role)
                certificate = await self._offload(work)
            elif self._ask is not None:
                wanted = pb.EnrolRequest(name=name, request=request, certificate=der)
                certificate = await self._ask(wanted)
            if certificate is None:
                if before.expires - now < _WARNED:
                    self._warnings.add(
                        f"the certificate ends on {before.expires:%Y-%m-%d}, and nobody "
                        "that answers holds the run's key to renew it"
                    )
                return
            identity = Identity.of(before.key, certificate, before.authority)
            same = (identity.role, identity.name) == (before.role, before.name)
            if not same or (identity.expires, identity.der != der) <= (before.expires, False):
                raise IdentityError("the renewed certificate is somebody else's, or no later one")
            await self._offload(partial(self._keep, identity))
        except (IdentityError, OSError) as error:
            self._warnings.add(f"the certificate is not renewed: {shown(str(error), 160)}")
            return
        self._identity = identity
        self._renewed(identity)
        self._log(new_event("renewed", expires=f"{identity.expires:%Y-%m-%d}"))
