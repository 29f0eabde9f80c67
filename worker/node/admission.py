"""How a worker comes to its certificate: it has one, is given one for a token, or begins the run.

The files are in the worker's folder, for its user alone (`murmuration.worker.identity`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.files import read_json
from murmuration.protos.reach import cannot_listen, listening_problem
from murmuration.worker.errors import ConfigError, UsageError
from murmuration.worker.identity import certificates
from murmuration.worker.identity.authority import TRIAL, Authority
from murmuration.worker.identity.certificates import Identity, IdentityError, Role
from murmuration.worker.identity.tokens import Token
from murmuration.worker.node.newcomer import Newcomer
from murmuration.worker.transport import AddressInUse

_REVOKED = "revoked.json"  # that the authority has taken back, beside the identity


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a worker has to be let in by."""

    folder: Path | None  # the worker's own; None keeps the certificate in memory
    default_name: str
    name: str | None = None  # as typed
    token: Token | None = None
    insecure: bool = False
    public: bool = False  # whether other machines can reach the peer
    listen: str | None = None  # a token is not spent where that is taken
    trial: bool = False  # the token is tried, and not used up

    def identity(self, newcomer: Newcomer) -> Identity | None:
        """Returns the peer's key and certificate; None: nothing is encrypted, as asked, or since
        only this machine can reach the peer. Args: newcomer: asks its contacts; where it has none,
        the run begins here.

        Raises IdentityError: it is not let in; PeersUnreachable: nobody answers; ConfigError: other
        machines can reach it, and it has no token; UsageError: a token for nothing; AddressInUse:
        the peer could not serve, once it were let in.
        """
        if self.name is not None:
            certificates.check_name(self.name)
        if self.insecure:
            if self.token is not None:
                raise UsageError("--insecure and a token: one or the other")
            return None
        if self.folder is not None and (held := Identity.load(self.folder)) is not None:
            if self.name not in (None, held.name) or held.role is not Role.PEER:
                raise ConfigError(
                    f"{self.folder} has the certificate of {held.role} {held.name}, not of peer "
                    f"{self.name or self.default_name}: leave --name out, or choose another --out"
                )
            if self.token is not None and self.token.identity.authority != held.authority:
                raise IdentityError(
                    f"{self.folder} has a certificate of another run than the token: choose "
                    "another --out, or leave the token out"
                )
            return held
        name, contacts = self.name or self.default_name, newcomer.contacts
        if self.token is not None:
            if not contacts:
                raise UsageError("a token is for joining a run: say whom to join")
            check_free(self.listen)
            wanted = f"{TRIAL}{name}" if self.trial else name
            identity = newcomer.enrol(self.token, wanted)
        elif (authority := self._authority(contacts)) is not None:
            identity = authority.new_identity(Role.PEER, name)
        else:
            return None
        if self.folder is not None and not self.trial:
            try:
                identity.save(self.folder)
            except OSError as error:
                raise ConfigError(f"{self.folder}: {error}; choose another folder") from error
        return identity

    def _authority(self, contacts: Sequence[str]) -> Authority | None:
        """The run's, made where the run begins; None: without encryption. Raises ConfigError."""
        held = Authority.load(self.folder) if self.folder is not None else None
        if held is not None or not self.public:
            return held
        if contacts or self.folder is None:
            wanted = "its run has a key: name a folder to keep it in with --out"
            if contacts:
                wanted = (
                    "it needs a token: make one where the run was begun, with `murmur token create "
                    "RUN`, and give it as --token"
                )
            raise ConfigError(
                f"other machines can reach this peer, so {wanted} (or say --insecure: nothing is "
                "encrypted then, and anybody may join)"
            )
        try:
            return Authority.make(self.folder)
        except OSError as error:
            raise ConfigError(f"{self.folder}: {error}; choose another folder") from error


def check_free(listen: str | None) -> None:
    """Raises AddressInUse."""
    if listen and (problem := listening_problem(listen)) is not None:
        raise AddressInUse(cannot_listen("--listen", listen, problem))


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
            path = self.folder / certificates.FOLDER / _REVOKED
            certificates.write_secret(path, json.dumps(document, indent=1).encode())

    def revoked(self) -> list[pb.Revocation]:
        path = (self.folder or Path()) / certificates.FOLDER / _REVOKED
        if self.folder is None or not path.exists():
            return []
        try:
            known = ((about, bytes.fromhex(signed)) for about, signed in read_json(path).items())
            return [pb.Revocation(subject=about, signature=signed) for about, signed in known]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise IdentityError(f"{path} cannot be read: {error}; remove it") from error
