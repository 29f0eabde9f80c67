"""A token: what one pastes to let a peer in. It holds the authority's certificate, so that the
joiner knows the run, and a key with a certificate that may ask for the joiner's own."""

import base64
import binascii
import datetime
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from murmuration.worker.identity import certificates
from murmuration.worker.identity.certificates import Identity, IdentityError, Role

_PREFIX = "murmur1."
_KEY_BYTES, _LENGTH_BYTES = 32, 2
_MAX_BYTES = 8192
VARIABLE = "MURMUR_TOKEN"


@dataclass(frozen=True)
class Token:
    identity: Identity  # that the joiner asks for its own with; its name is the token's

    @property
    def id(self) -> str:
        return self.identity.name

    def check_date(self) -> None:
        """Raises IdentityError: it has expired, or has not begun, by this machine's clock."""
        self.identity.check_begun()
        if self.identity.expires < datetime.datetime.now(datetime.UTC):
            raise IdentityError(
                f"token {self.id} has expired on {self.identity.expires:%Y-%m-%d at %H:%M} UTC; "
                "ask for a new one: murmur token create"
            )

    def __str__(self) -> str:
        numbers = certificates.private_key(self.identity.key).private_numbers()
        secret = numbers.private_value.to_bytes(_KEY_BYTES, "big")
        authority, own = (
            x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)
            for pem in (self.identity.authority, self.identity.certificate)
        )
        length = len(authority).to_bytes(_LENGTH_BYTES, "big")
        packed = zlib.compress(secret + length + authority + own, 9)
        return _PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Raises IdentityError."""
        text = "".join(text.split())
        try:
            if not text.startswith(_PREFIX):
                raise ValueError("no prefix")
            encoded = text.removeprefix(_PREFIX)
            packed = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(packed, _MAX_BYTES)
            if not unpacking.eof:
                raise ValueError("its end is missing")
            secret, rest = content[:_KEY_BYTES], content[_KEY_BYTES:]
            length, both = int.from_bytes(rest[:_LENGTH_BYTES], "big"), rest[_LENGTH_BYTES:]
            key = ec.derive_private_key(int.from_bytes(secret, "big"), ec.SECP256R1())
            own, authority = (
                x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
                for der in (both[length:], both[:length])
            )
            identity = Identity.of(certificates.key_to_pem(key), own, authority)
        except (ValueError, binascii.Error, zlib.error, IdentityError):
            raise IdentityError(
                "this is no token: paste the whole of what `murmur token create` has printed"
            ) from None
        if identity.role is not Role.TOKEN:
            raise IdentityError("this is no token, but a peer's certificate")
        return cls(identity)


def token_from(
    typed: str | None,
    file: Path | None,
    environment: Mapping[str, str] = os.environ,
    tell: Callable[[str], None] = lambda line: None,
) -> Token | None:
    """The token that a user gives, by one of three ways; `tell` warns. Raises IdentityError."""
    if typed and file:
        raise IdentityError("--token and --token-file: one or the other")
    if file is not None:
        try:
            typed = file.read_text(encoding="utf-8")
            if file.is_file():  # what mounts secrets may have let others read them
                certificates.check_private(file)
        except IdentityError as error:
            tell(f"warning: {error}")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise IdentityError(f"--token-file {file}: {reason}") from error
    typed = typed or environment.get(VARIABLE)
    return Token.parse(typed) if typed else None
