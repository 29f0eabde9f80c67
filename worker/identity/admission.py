"""How a worker comes to its certificate: it has one, is given one for a token, or begins the run.

The files are in the worker's folder, for its user alone (`protos.identity`).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protos import murmuration_pb2 as pb
from protos.identity import Authority, Identity, IdentityError, Role, Token
from protos.identity.authority import TRIAL
from protos.identity.certificates import check_name, key_to_pem, new_key, request_for
from protos.reach import CHECK_ADDRESS, cannot_listen, listening_problem
from protos.text import shown
from worker import wire
from worker.errors import ConfigError, PeersUnreachable, UsageError
from worker.transport import AddressInUse, TransportError, Untrusted
from worker.transport.grpc import GrpcTransport

ENROL_S = 8.0
_TRY_S, _PAUSE_S = 3.0, 0.25


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a worker has to be let in by.

    Args:
        folder: the worker's own; None keeps the certificate in memory.
        name: of the peer, as typed; default_name: where none was, nor is in a certificate.
        token: that the user has given.
        insecure: whether the user has asked for none of it.
        public: whether other machines can reach this peer.
        proxy: HOST:PORT of an HTTP CONNECT proxy to reach others by.
        listen: HOST:PORT that the peer is to serve at: a token is not spent where that is taken.
        within_s: for how long others are asked.
        trial: the token is tried, and not used up; nothing is kept in the folder.
    """

    folder: Path | None
    default_name: str
    name: str | None = None
    token: Token | None = None
    insecure: bool = False
    public: bool = False
    proxy: str | None = None
    listen: str | None = None
    within_s: float = ENROL_S
    trial: bool = False

    def identity(self, contacts: Sequence[str]) -> Identity | None:
        """The peer's key and certificate; None: nothing is encrypted, as asked, or since only this
        machine can reach the peer.

        Args:
            contacts: peers that it calls first; one that calls none begins the run, and has the
                authority.

        Raises:
            IdentityError: it is not let in.
            ConfigError: other machines can reach it, and it has no token.
            UsageError: a token for nothing.
            AddressInUse: the peer could not serve, once it were let in.
        """
        if self.name is not None:
            check_name(self.name)
        if self.insecure:
            if self.token is not None:
                raise UsageError("--insecure and a token: one or the other")
            return None
        if self.folder is not None and (held := Identity.load(self.folder)) is not None:
            self._check_held(held)
            return held
        name = self.name or self.default_name
        if self.token is not None:
            if not contacts:
                raise UsageError("a token is for joining a run: say whom to join")
            check_free(self.listen)
            wanted = f"{TRIAL}{name}" if self.trial else name
            identity = enrol(self.token, wanted, contacts, self.proxy, self.within_s)
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
        """The run's, which is made where the run begins; None: without encryption. Raises
        ConfigError."""
        held = Authority.load(self.folder) if self.folder is not None else None
        if held is not None or not self.public:
            return held
        if self.folder is None and not contacts:
            raise ConfigError(
                "other machines can reach this peer, so its run has a key: name a folder to keep "
                "it in with --out (or say --insecure: nothing is encrypted then, and anybody may "
                "join)"
            )
        if contacts or self.folder is None:
            raise ConfigError(
                "other machines can reach this peer, so it needs a token: make one where the run "
                "was begun, with `murmur token create RUN`, and give it as --token (or say "
                "--insecure: nothing is encrypted then, and anybody may join)"
            )
        try:
            return Authority.make(self.folder)
        except OSError as error:
            raise ConfigError(f"{self.folder}: {error}; choose another folder") from error

    def _check_held(self, held: Identity) -> None:
        if self.name not in (None, held.name) or held.role is not Role.PEER:
            raise ConfigError(
                f"{self.folder} has the certificate of {held.role} {held.name}, not of peer "
                f"{self.name or self.default_name}: leave --name out, or choose another --out"
            )
        if self.token is not None and self.token.identity.authority != held.authority:
            raise IdentityError(
                f"{self.folder} has a certificate of another run than the token: choose another "
                "--out, or leave the token out"
            )


def check_free(listen: str | None) -> None:
    """Raises AddressInUse: nothing can listen there, such as where another process does."""
    if listen and (problem := listening_problem(listen)) is not None:
        raise AddressInUse(cannot_listen("--listen", listen, problem))


@dataclass(frozen=True)
class Credentials:
    """What a peer has been admitted with.

    Args:
        identity: its key and certificate; None: nothing is encrypted.
        authority: of its run, if that key is here.
        folder: where the identity is kept; None: nowhere.
    """

    identity: Identity | None = None
    authority: Authority | None = None
    folder: Path | None = None

    @classmethod
    def of(cls, identity: Identity | None, folder: Path | None) -> "Credentials":
        """With the authority of an encrypted run, if its key is in the folder. Raises
        IdentityError."""
        if identity is None or folder is None:
            return cls(identity)
        return cls(identity, Authority.load(folder), folder)

    def keep(self, identity: Identity) -> None:
        """Puts a renewed one in the folder. Raises OSError."""
        if self.folder is not None:
            identity.save(self.folder)


def enrol(
    token: Token,
    name: str,
    addresses: Sequence[str],
    proxy: str | None = None,
    within_s: float = ENROL_S,
) -> Identity:
    """Asks the peers at these addresses for a certificate, until one gives it.

    Raises:
        IdentityError: they refuse, or are of another run, or the token has expired.
        PeersUnreachable: none of them answers within `within_s`.
    """
    token.check_date()
    transport = GrpcTransport("127.0.0.1:0", proxy, token.identity)
    return asyncio.run(_enrol(transport, token, name, addresses, within_s))


async def _enrol(
    transport: GrpcTransport, token: Token, name: str, addresses: Sequence[str], within_s: float
) -> Identity:
    key = new_key()
    request = pb.EnrolRequest(name=name, request=request_for(key)).SerializeToString()
    deadline = time.monotonic() + within_s
    problems: dict[str, str] = {}
    refused: set[str] = set()
    try:
        while (left_s := deadline - time.monotonic()) > 0 and len(refused) < len(addresses):
            for address in [each for each in addresses if each not in refused]:
                try:
                    raw = await transport.call(
                        address, "Control/Enrol", request, min(_TRY_S, left_s)
                    )
                    reply = wire.parse(pb.EnrolReply, raw)
                except (TransportError, wire.WireError) as error:
                    problems[address] = str(error)
                    if isinstance(error, Untrusted):
                        refused.add(address)
                    continue
                if not reply.refusal:
                    return _own(key_to_pem(key), reply.certificate, token, name, address)
                problems[address] = f"{address} refuses: {shown(reply.refusal, 200)}"
                refused.add(address)
            if len(refused) < len(addresses):
                await asyncio.sleep(_PAUSE_S)
    finally:
        await transport.close()
    if not refused:
        raise PeersUnreachable(f"nobody answers: {'; '.join(problems.values())}; {CHECK_ADDRESS}")
    raise IdentityError(f"not let in by token {token.id}: {'; '.join(problems.values())}")


def _own(key: bytes, certificate: bytes, token: Token, name: str, address: str) -> Identity:
    """Raises IdentityError: what a peer has signed is not what it was asked for."""
    identity = Identity.of(key, certificate, token.identity.authority)
    if name.startswith(TRIAL):
        name = f"{TRIAL}{token.id}"
    if (identity.role, identity.name) != (Role.PEER, name):
        raise IdentityError(f"{address} gives the certificate of {shown(identity.name)}")
    return identity
