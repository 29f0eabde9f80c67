"""What an authority takes back: a peer's certificate, or a token.

Each entry is signed by itself, so that peers can pass it on. None is withdrawn. A message has a
part of them: the newest, and of the others some in turn.
"""

from collections.abc import Iterable, Iterator

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.identity.certificates import IdentityError, Role, Verifier, signer

MOST = 4096  # in a run; a peer holds about a megabyte of them
MOST_AT_ONCE = 100  # in a message of gossip
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
        self._entries: dict[str, pb.Revocation] = {}  # the newest here last
        self._turn = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, about: str) -> bool:
        return about in self._entries

    @property
    def entries(self) -> list[pb.Revocation]:
        """In the order of their subjects."""
        return [self._entries[about] for about in sorted(self._entries)]

    def part(self) -> list[pb.Revocation]:
        """As many as go into one message, others each time."""
        entries = list(self._entries.values())
        if len(entries) <= MOST_AT_ONCE:
            return entries
        newest, older = entries[-MOST_AT_ONCE // 2 :], entries[: -MOST_AT_ONCE // 2]
        self._turn %= len(older)
        in_turn = [*older[self._turn :], *older[: self._turn]][: MOST_AT_ONCE // 2]
        self._turn += len(in_turn)
        return newest + in_turn

    def learn(self, entries: Iterable[pb.Revocation]) -> Iterator[str]:
        """Takes entries, up to the first that the authority has not signed. Gives the subjects that
        are new. Raises IdentityError: there is such a one; the sender has not checked it either."""
        for entry in entries:
            if entry.subject in self._entries or len(self._entries) >= MOST:
                continue
            if not self._verifier.has_signed(entry.signature, _DOMAIN + entry.subject.encode()):
                raise IdentityError("a revocation that this run's authority has not signed")
            kept = pb.Revocation()
            kept.CopyFrom(entry)
            self._entries[entry.subject] = kept
            yield entry.subject


def revoked_peer(about: str) -> str | None:
    """The name, where the entry is about a peer."""
    role, _, name = about.partition(_SEPARATOR)
    return name if role == Role.PEER else None


def check_count(count: int) -> None:
    """Raises IdentityError: one more would be too many for peers to keep."""
    if count >= MOST:
        raise IdentityError(f"{count} are revoked: begin a run with a new key")
