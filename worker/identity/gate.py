"""Says what a caller may ask by its certificate, and gives newcomers and members certificates."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import Log, Warnings, new_event
from murmuration.protos.figures import MAX_REASON, shown
from murmuration.worker import transport, wire
from murmuration.worker.background import Offload
from murmuration.worker.identity import certificates
from murmuration.worker.identity.authority import MOST, REVOCATION, TRIAL, Authority, enrol
from murmuration.worker.identity.certificates import MEMBERS, Role, Verifier
from murmuration.worker.membership.gossip import MOST_REVOCATIONS
from murmuration.worker.transport import Caller, Method, Refused, Transport, TransportError

_RENEW_S = 5.0
_CHECK_S = 2.0
_MOST_ASKED = 16  # for a later certificate, at one time


class Gate:
    """Guards what a caller may ask. io thread only. Args: authority: if this peer holds the run's
    key; `offload` reads and writes its files; refused: called for each refusal; revoked: whether a
    caller's certificate counts no more; key_of: fingerprint of a member's key, by its name."""

    def __init__(
        self,
        authority: Authority | None,
        *,
        offload: Offload,
        refused: Callable[[], None],
        revoked: Callable[[Caller], bool] = lambda caller: False,
        key_of: Callable[[str], str | None] = lambda peer: None,
        log: Log,
    ) -> None:
        self._authority, self._offload = authority, offload
        self._refused, self._revoked, self._log = refused, revoked, log
        self._key_of, self._warnings = key_of, Warnings(log)

    def admit(self, method: str, caller: Caller) -> None:
        """Raises Refused: the caller was expelled, or its certificate is not for the method."""
        if not caller.role:
            return
        enrols = method == Method.ENROL  # a caller that wants to be let in is told there
        if not enrols and self._revoked(caller):
            self._refuse(f"{caller.role} {caller.name} was expelled")
        if caller.role not in ((Role.TOKEN, Role.PEER) if enrols else MEMBERS):
            self._refuse(f"{method} is not for the certificate of a {caller.role}")
        if caller.name.startswith(TRIAL) and method not in (Method.JOIN, *transport.PROBE_METHODS):
            self._refuse(f"{method} is not for a token that is tried: join with it")

    def check(self, method: str, raw: bytes, caller: Caller) -> None:
        """Raises Refused: as `admit`, or the caller speaks for another peer."""
        self.admit(method, caller)
        if not caller.role:
            return
        try:
            claimed = wire.claimed_sender(method, raw)
        except wire.WireError as error:
            self._refuse(str(error))
        tries = caller.name.startswith(TRIAL)
        if claimed is not None and (tries or (caller.role, caller.name) != (Role.PEER, claimed)):
            self._refuse(f"the certificate of {caller.name} does not speak for {claimed}")

    def _refuse(self, problem: str) -> NoReturn:
        self._refused()
        raise Refused(shown(problem, MAX_REASON))

    async def enrol(self, request: bytes, caller: Caller) -> bytes:
        """Raises WireError."""
        asked, revoked = wire.parse(pb.EnrolRequest, request), self._revoked(caller)
        who, holder = (caller.role, caller.name), self._key_of(asked.name)
        work = partial(enrol, self._authority, asked, *who, holder=holder, revoked=revoked)
        reply = await self._offload(work)
        if caller.role == Role.TOKEN and self._authority is not None:
            if reply.refusal:
                text = f"{shown(asked.name, 64)} was not let in"
                self._warnings.add(text, reply.refusal, caller.name)
            else:
                self._log(new_event("enrolled", name=asked.name, token=caller.name))
        return reply.SerializeToString()


class KeyHolders:
    """Asks those that may hold the run's key, in turn: one may answer falsely. io thread only."""

    def __init__(self, transport: Transport, holders: Callable[[], Iterable[str]]) -> None:
        self._transport, self._holders = transport, holders
        self._asked = 0

    async def ask(self, request: pb.EnrolRequest) -> bytes | None:
        """A later certificate (PEM), if one gives it."""
        addresses, raw = list(self._holders()), request.SerializeToString()
        for _ in range(min(_MOST_ASKED, len(addresses))):
            address, self._asked = addresses[self._asked % len(addresses)], self._asked + 1
            with suppress(TransportError, wire.WireError):
                answer = await self._transport.call(address, Method.ENROL, raw, _RENEW_S)
                if not (reply := wire.parse(pb.EnrolReply, answer)).refusal:
                    return bytes(reply.certificate)
        return None


class Expulsions:
    """The certificates and tokens that count no more. Peers pass the authority's entries on.

    The one that holds the run's key reads them from its folder, where `murmur token` writes them.
    Every peer keeps what it has heard of, for its next start. A message has a part of the entries.
    io thread only. Args: authority: if this peer holds the run's key; expelled: called once for
    each peer that is; keep: puts all where `Credentials.revoked` finds them (raises OSError)."""

    def __init__(
        self,
        identity: certificates.Identity,
        authority: Authority | None,
        *,
        expelled: Callable[[str], None],
        keep: Callable[[Sequence[pb.Revocation]], None],
        offload: Offload,
        log: Log,
    ) -> None:
        self._key, self._authority = Verifier(identity.authority).key, authority
        self._entries: dict[str, pb.Revocation] = {}  # by subject, the newest here last
        self._turn = 0
        self._expelled, self._offload, self._log = expelled, offload, log
        self._keep, self._kept = keep, 0
        self._warnings = Warnings(log)
        self.hash = self._hashed = 0  # of so many entries

    def begin(self, kept: Iterable[pb.Revocation]) -> None:
        try:
            self.learn(kept)
        except wire.WireError as error:
            self._warnings.add(f"expulsions: this peer's file has {error}")
        self._kept = self.hash

    def part(self) -> list[pb.Revocation]:
        """As many as go into one message, others each time."""
        entries = list(self._entries.values())
        if len(entries) <= MOST_REVOCATIONS:
            return entries
        newest, older = entries[-MOST_REVOCATIONS // 2 :], entries[: -MOST_REVOCATIONS // 2]
        self._turn %= len(older)
        in_turn = [*older[self._turn :], *older[: self._turn]][: MOST_REVOCATIONS // 2]
        self._turn += len(in_turn)
        return newest + in_turn

    def includes(self, caller: Caller) -> bool:
        return f"{caller.role}/{caller.name}" in self._entries

    def learn(self, entries: Iterable[pb.Revocation]) -> None:
        """Takes entries, up to the first that is not the authority's. Raises WireError then."""
        try:
            for entry in entries:
                about = entry.subject
                if about in self._entries or len(self._entries) >= MOST:
                    continue
                signed = REVOCATION + about.encode()
                if not certificates.has_signed(self._key, entry.signature, signed):
                    raise wire.WireError("a revocation that this run's authority has not signed")
                kept = self._entries[about] = pb.Revocation()
                kept.CopyFrom(entry)
                text = f"{shown(about)} was revoked: it counts no more"
                self._log(new_event("warning", text=text))
                role, _, peer = about.partition("/")
                if role == Role.PEER:
                    self._expelled(peer)
        finally:
            if len(self._entries) > self._hashed:
                self._hashed = len(self._entries)
                self.hash = wire.hash64("\n".join(sorted(self._entries)).encode())

    async def run(self) -> None:
        while True:
            try:
                if self._authority is not None:
                    self.learn(await self._offload(self._authority.revocations))
                if self._kept != self.hash:
                    now = self.hash
                    entries = [self._entries[about] for about in sorted(self._entries)]
                    await self._offload(partial(self._keep, entries))
                    self._kept = now
            except (certificates.IdentityError, wire.WireError, OSError) as error:
                self._warnings.add(f"expulsions: {error}")
            await asyncio.sleep(_CHECK_S)
