"""What an authority takes back: a peer's certificate, or a token.

Each entry is signed by itself, so that peers can pass it on. There are few, and none is withdrawn.
"""

from collections.abc import Iterable

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.identity.certificates import IdentityError, Role, Verifier, signer

MOST = 100
_DOMAIN = b"murmuration revocation\0"
_SEPARATOR = "/"


def subject(role: Role, name: str) -> str:
    """What an entry is about."""
    return f"{role}{_SEPARATOR}{name}"


def revocation(authority_key: bytes, about: str) -> pb.Revocation:
    """A new entry. Args: authority_key: PEM; about: as `subject`."""
    signature = signer(authority_key)(_DOMAIN + about.encode())
    return pb.Revocation(subject=about, signature=signature)


class Revocations:
    """All entries that one process knows. Args: authority: the run's, in PEM."""

    def __init__(self, authority: bytes) -> None:
        self._verifier = Verifier(authority)
        self._entries: dict[str, pb.Revocation] = {}

    def __contains__(self, about: str) -> bool:
        return about in self._entries

    @property
    def entries(self) -> list[pb.Revocation]:
        """In the order of their subjects."""
        return [self._entries[about] for about in sorted(self._entries)]

    def learn(self, entries: Iterable[pb.Revocation]) -> list[str]:
        """Takes those that the authority has signed. Returns the subjects that are new."""
        new = []
        for entry in entries:
            if entry.subject in self._entries or len(self._entries) >= MOST:
                continue
            if self._verifier.has_signed(entry.signature, _DOMAIN + entry.subject.encode()):
                kept = pb.Revocation()
                kept.CopyFrom(entry)
                self._entries[entry.subject] = kept
                new.append(entry.subject)
        return new


def revoked_peer(about: str) -> str | None:
    """The name, where the entry is about a peer."""
    role, _, name = about.partition(_SEPARATOR)
    return name if role == Role.PEER else None


def check_count(count: int) -> None:
    """Raises IdentityError: one more would be too many for a message."""
    if count >= MOST:
        raise IdentityError(f"{count} are revoked: begin a run with a new key")
