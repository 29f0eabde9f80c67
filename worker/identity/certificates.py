"""Keys and certificates, and the files of a peer that has one.

In a certificate stand, as alternative names (docs/adr/0017),

    URI murmur:peer/NAME        the role, and whom it speaks for
    DNS HASH.peer.murmuration   the same for clients, which compare names of hosts
    DNS member.murmuration      of this run, any of its members

A token's certificate has the URI alone, so that nobody can serve with it.
"""

import datetime
import hashlib
import os
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from murmuration.protos.addresses import split_address
from murmuration.protos.exit_codes import ExitCode, MurmurError
from murmuration.protos.files import read_ordinary, sync_folder, write_atomically
from murmuration.protos.reach import HANDSHAKE_S, UnknownName, connected

FOLDER = "identity"  # in a worker's or coordinator's folder
_KEY, _CERTIFICATE, _AUTHORITY = "key.pem", "certificate.pem", "authority.pem"
_SCHEME = "murmur:"
_MEMBER = "member.murmuration"
_SCALAR_BYTES = 32  # of P-256
_UNUSED = dict.fromkeys((
    "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign",
    "encipher_only", "decipher_only",
), False)  # fmt: skip
# What the library raises for bytes that are no request or certificate, and for odd extensions.
_UNREADABLE = (
    *(ValueError, TypeError, KeyError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType),
)
_CLOCKS_APART = datetime.timedelta(days=30)  # that clocks may be behind the authority's
_certificate = x509.load_pem_x509_certificate


class IdentityError(MurmurError):
    """The run does not let this peer in."""

    exit_code = ExitCode.NOT_ADMITTED


class NotValidNow(IdentityError):
    """A certificate has not begun yet, or has ended, by this machine's clock."""


class Role(StrEnum):
    """The use of a certificate. A token's holder may ask for a certificate, and nothing else."""

    PEER = "peer"
    COORDINATOR = "coordinator"
    TOKEN = "token"


MEMBERS = frozenset({Role.PEER, Role.COORDINATOR})


@dataclass(frozen=True)
class Identity:
    """A key, its certificate, the authority that it is of (PEM); role and name as certified."""

    key: bytes = field(repr=False)
    certificate: bytes
    authority: bytes
    role: Role
    name: str

    @classmethod
    def of(cls, key: bytes, certificate: bytes, authority: bytes) -> "Identity":
        """Raises IdentityError: they are no certificates, or do not fit one another."""
        with _read("the", "a key or certificate"):
            mine, private = _certificate(certificate), serialization.load_pem_private_key(key, None)
            certified = _certified(mine, _certificate(authority))
        if private.public_key() != mine.public_key():
            raise IdentityError("the certificate is of another key")
        return cls(key, certificate, authority, *certified)

    @classmethod
    def load(cls, folder: Path) -> "Identity | None":
        """The one in a worker's folder; None if there is none. Raises IdentityError."""
        kept = folder / FOLDER
        if not (kept / _CERTIFICATE).exists():
            return None
        check_private(kept / _KEY)
        for name in (_CERTIFICATE, _AUTHORITY):
            check_private(kept / name, writing=True)
        try:
            parts = [read_kept(kept / name) for name in (_KEY, _CERTIFICATE, _AUTHORITY)]
            identity = cls.of(*parts)
        except (OSError, IdentityError) as error:
            raise IdentityError(f"{kept}: {error}; remove it, and join with a new token") from error
        identity.check_begun()
        if identity.expires < datetime.datetime.now(datetime.UTC):
            raise IdentityError(
                f"{kept}: its certificate has expired on {identity.expires:%Y-%m-%d}; remove it, "
                "and join with a new token"
            )
        return identity

    def save(self, folder: Path) -> None:
        """Raises OSError."""
        kept = folder / FOLDER
        write_secret(kept / _KEY, self.key)
        write_secret(kept / _AUTHORITY, self.authority)
        write_secret(kept / _CERTIFICATE, self.certificate)  # last: it says that all are there

    @property
    def expires(self) -> datetime.datetime:
        return _certificate(self.certificate).not_valid_after_utc

    def check_begun(self) -> None:
        """Raises IdentityError: this machine's clock is behind by months, maybe not yet set."""
        begins = _certificate(self.certificate).not_valid_before_utc
        if begins > datetime.datetime.now(datetime.UTC):
            text = f"the certificate of {self.name} begins on {begins:%Y-%m-%d}: this machine's"
            raise IdentityError(f"{text} clock is behind; set it", ExitCode.UNREACHABLE)

    @property
    def renewed_from(self) -> datetime.datetime:
        """When it is time for a later one: when a third of its time is left."""
        mine = _certificate(self.certificate)
        return mine.not_valid_after_utc - (mine.not_valid_after_utc - mine.not_valid_before_utc) / 3

    def request(self) -> bytes:
        """A request for a later certificate of the same key (PKCS #10, DER)."""
        return request_for(private_key(self.key))

    @property
    def der(self) -> bytes:
        return _certificate(self.certificate).public_bytes(serialization.Encoding.DER)

    def server_name(self, peer: str | None) -> str:
        return _MEMBER if peer is None else _host_of(peer)

    def certified(self, names: Iterable[str]) -> tuple[str, str]:
        """(role, name) that the alternative names of a caller's certificate stand for."""
        return certified_name(names) or ("unknown", "")


@dataclass(frozen=True)
class Certified:
    """A key, and what an authority says of it. The certificate is DER."""

    role: Role
    name: str
    key: ec.EllipticCurvePublicKey
    certificate: bytes
    issued: datetime.datetime


class Verifier:
    """Says what certificates are of one authority. Args: authority: its own, in PEM."""

    def __init__(self, authority: bytes) -> None:
        self._root = _certificate(authority)
        self.key = _on_curve(self._root.public_key())

    def certified(self, certificate: bytes) -> Certified:
        """Raises IdentityError: it is none of this authority, or is not valid now."""
        with _read("a", "a certificate"):
            found = x509.load_der_x509_certificate(certificate)
            key, (role, name) = _on_curve(found.public_key()), _certified(found, self._root)
        start, end = found.not_valid_before_utc, found.not_valid_after_utc
        if not start <= (now := datetime.datetime.now(datetime.UTC)) < end:
            raise NotValidNow(
                f"the certificate of {name} is not valid now: it is for "
                f"{start:%Y-%m-%d} to {end:%Y-%m-%d}, and this machine's clock says {now:%Y-%m-%d}"
            )
        return Certified(role, name, key, certificate, start)


def signer(key: bytes) -> Callable[[bytes], bytes]:
    """Signs content with a private key (PEM), as `has_signed` checks it."""
    private = private_key(key)

    def sign(content: bytes) -> bytes:
        pair = utils.decode_dss_signature(private.sign(content, ec.ECDSA(hashes.SHA256())))
        return b"".join(scalar.to_bytes(_SCALAR_BYTES, "big") for scalar in pair)

    return sign


def member_identity(folder: Path) -> Identity:
    """Finds that of a worker, a coordinator or a swarm's first worker. Raises IdentityError."""
    for each in (folder, *sorted(path.parent for path in folder.glob(f"*/{FOLDER}"))):
        if (identity := Identity.load(each)) is not None:
            return identity
    raise IdentityError(f"{folder} has no certificate of a run: name a worker's --out")


def certified_name(names: Iterable[str]) -> tuple[Role, str] | None:
    """Reads the alternative names of a certificate; None: of no role that is known."""
    for each in names:
        if each.startswith(_SCHEME):
            role, slash, name = each.removeprefix(_SCHEME).partition("/")
            if slash and name and role in set(Role):
                return Role(role), unquote(name)
    return None


def certified_key(certificate: bytes) -> str:
    return fingerprint(_certificate(certificate).public_key())


def is_encrypted_run(address: str, timeout_s: float = HANDSHAKE_S) -> bool:
    """Tells whether a member of an encrypted run answers at HOST:PORT. Its certificate is not
    verified. Blocks for at most three times `timeout_s`: the name, a connection, the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with suppress(OSError, UnknownName, *_UNREADABLE):
        with connected(*split_address(address), timeout_s) as raw, context.wrap_socket(raw) as tls:
            shown = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return _MEMBER in names.get_values_for_type(x509.DNSName)
    return False


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def kept_key(folder: Path | None) -> ec.EllipticCurvePrivateKey:
    """Returns the key to ask for a certificate with, kept before: where the answer was lost, that
    one is certified again. Raises OSError, IdentityError."""
    if folder is None:
        return new_key()
    check_private(path := folder / FOLDER / _KEY)
    with suppress(FileNotFoundError, *_UNREADABLE):
        return private_key(read_kept(path))
    write_secret(path, key_to_pem(key := new_key()))
    return key


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not ECDSA")
    return key


def fingerprint(key: object) -> str:
    """SHA-256 of a public key, in hex: what names the key. Raises IdentityError."""
    point = _on_curve(key).public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    return hashlib.sha256(point).hexdigest()


def request_for(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request for a certificate (PKCS #10, DER), which proves that the key is the sender's."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """Raises IdentityError: it is no request, or not signed by its key."""
    try:
        parsed = x509.load_der_x509_csr(request)
        if not parsed.is_signature_valid:
            raise IdentityError("a request for a certificate is not signed by its key")
        return _on_curve(parsed.public_key())
    except _UNREADABLE as error:
        raise IdentityError("a request for a certificate cannot be read") from error


def self_signed(key: ec.EllipticCurvePrivateKey, valid_s: float) -> bytes:
    name = _named(f"murmuration {fingerprint(key.public_key())[:16]}")
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage(signs=True), True)]
    return _signed(name, key, name, key.public_key(), valid_s, extensions)


def signed_certificate(
    issuer: bytes,
    issuer_key: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePublicKey,
    role: Role,
    name: str,
    valid_s: float,
) -> bytes:
    """A certificate (PEM) by the authority whose certificate is `issuer`."""
    uri = x509.UniformResourceIdentifier(f"{_SCHEME}{role}/{quote(name, safe='')}")
    hosts = {Role.COORDINATOR: [_MEMBER], Role.PEER: [_MEMBER, _host_of(name)]}.get(role, [])
    names: list[x509.GeneralName] = [uri, *map(x509.DNSName, hosts)]
    extensions = [
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs=False), True),
        (x509.ExtendedKeyUsage(_purposes(role)), False),
    ]
    return _signed(_certificate(issuer).subject, issuer_key, _named(role), key, valid_s, extensions)


def _purposes(role: Role) -> list[x509.ObjectIdentifier]:
    """The uses that a certificate is shown for; nobody serves with a token's."""
    client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    return [client] if role is Role.TOKEN else [client, server]


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Args: signs: other certificates, as an authority's key does; else what its holder says."""
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, **_UNUSED)


def read_kept(path: Path) -> bytes:
    """Reads a key, a certificate or a token. Raises OSError, as for a pipe."""
    return read_ordinary(path, 64 * 1024)


def write_secret(path: Path, content: bytes) -> None:
    """As a whole or not at all, readable for its user alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, content, mode=0o600)
    sync_folder(path.parent)


def check_private(path: Path, *, writing: bool = False) -> None:
    """Raises IdentityError: anybody on this machine can read (or, with `writing`, change) the file.
    A group may: some systems set one as they mount a volume."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0
    if os.name == "posix" and mode & (0o002 if writing else 0o007):
        can = "change" if writing else "have"
        raise IdentityError(f"{path} has mode {mode:o}, so that others {can} it: chmod 600 it")


@contextmanager
def _read(article: str, what: str) -> Iterator[None]:
    """Raises IdentityError: bytes are no key or certificate, or of another authority."""
    try:
        yield
    except InvalidSignature:
        raise IdentityError(f"{article} certificate is not of this authority") from None
    except _UNREADABLE as error:
        raise IdentityError(f"{what} cannot be read: {error}") from error


def _certified(found: x509.Certificate, root: x509.Certificate) -> tuple[Role, str]:
    """Role and name, if this authority has signed it. To be called within `_read`."""
    if found.issuer != root.subject:
        raise InvalidSignature
    found.verify_directly_issued_by(root)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    certified = certified_name(names.get_values_for_type(x509.UniformResourceIdentifier))
    if certified is None:
        raise IdentityError("a certificate names nobody")
    usages = {type(each.value): each.value for each in found.extensions}
    usage, purposes = usages.get(x509.KeyUsage), usages.get(x509.ExtendedKeyUsage)
    if (
        not isinstance(usage, x509.KeyUsage)
        or not usage.digital_signature
        or not isinstance(purposes, x509.ExtendedKeyUsage)
        or not set(_purposes(certified[0])) <= {*purposes}
    ):
        raise IdentityError(f"the certificate is not for the use of a {certified[0]}")
    return certified


def _host_of(peer: str) -> str:
    """Names of peers may hold anything, and hosts are compared without regard to case."""
    return f"{hashlib.sha256(peer.encode()).hexdigest()[:40]}.peer.murmuration"


def has_signed(key: ec.EllipticCurvePublicKey, signature: bytes, content: bytes) -> bool:
    """Tells whether the signature (r and s, 32 bytes each) over these bytes is by this key."""
    if len(signature) != 2 * _SCALAR_BYTES:
        return False
    halves = signature[:_SCALAR_BYTES], signature[_SCALAR_BYTES:]
    r, s = (int.from_bytes(half, "big") for half in halves)
    try:
        key.verify(utils.encode_dss_signature(r, s), content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _on_curve(key: object) -> ec.EllipticCurvePublicKey:
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("a key is not ECDSA P-256")
    return key


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    valid_s: float,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + datetime.timedelta(seconds=valid_s))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
