"""Which certificates and tokens count no more. Peers pass the authority's entries on with gossip.

The one that holds the run's key reads them from its folder, where `murmur token` writes them. Every
peer keeps what it has heard of, for when it is started again without that one. A message has a part
of the entries: the newest, and of the others some in turn.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import Warnings, new_event
from murmuration.protos.text import shown
from murmuration.worker import wire
from murmuration.worker.exchange.round_context import Offload
from murmuration.worker.identity.authority import MOST, REVOCATION, Authority, revoked_peer
from murmuration.worker.identity.certificates import Identity, IdentityError, Verifier
from murmuration.worker.membership.gossip import MOST_REVOCATIONS
from murmuration.worker.transport import Caller

_CHECK_S = 2.0


class Expulsions:
    """io thread only.

    Args:
        identity: of this peer.
        authority: of the run, if this peer holds its key.
        expelled: called once for each peer that is.
        keep: puts all entries where `Credentials.revoked` finds them. Raises OSError.
        offload: where files are read and written.
        log: takes events.
    """

    def __init__(
        self,
        identity: Identity,
        authority: Authority | None,
        *,
        expelled: Callable[[str], None],
        keep: Callable[[Sequence[pb.Revocation]], None],
        offload: Offload,
        log: Callable[[dict[str, object]], None],
    ) -> None:
        self._verifier, self._authority = Verifier(identity.authority), authority
        self._entries: dict[str, pb.Revocation] = {}  # by subject, the newest here last
        self._turn = 0
        self._expelled, self._offload, self._log = expelled, offload, log
        self._keep, self._kept = keep, 0
        self._warnings = Warnings(log)
        self.hash = self._hashed = 0  # of so many entries

    def begin(self, kept: Iterable[pb.Revocation]) -> None:
        """Takes what an earlier process of this peer has kept."""
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
        """Whether what the caller proves itself by counts no more."""
        return f"{caller.role}/{caller.name}" in self._entries

    def learn(self, entries: Iterable[pb.Revocation]) -> None:
        """Takes entries, up to the first that the authority has not signed. Raises WireError: there
        is such a one; the sender has not checked it either."""
        try:
            for entry in entries:
                self._learn(entry)
        finally:
            if len(self._entries) > self._hashed:
                self._hashed = len(self._entries)
                self.hash = wire.hash64("\n".join(sorted(self._entries)).encode())

    def _learn(self, entry: pb.Revocation) -> None:
        """Raises WireError: the authority has not signed it."""
        about = entry.subject
        if about in self._entries or len(self._entries) >= MOST:
            return
        if not self._verifier.has_signed(entry.signature, REVOCATION + about.encode()):
            raise wire.WireError("a revocation that this run's authority has not signed")
        kept = self._entries[about] = pb.Revocation()
        kept.CopyFrom(entry)
        self._log(new_event("warning", text=f"{shown(about)} was revoked: it counts no more"))
        if (peer := revoked_peer(about)) is not None:
            self._expelled(peer)

    async def run(self) -> None:
        """Reads what the user has revoked, and keeps what is new, until cancelled."""
        while True:
            try:
                if self._authority is not None:
                    self.learn(await self._offload(self._authority.revocations))
                if self._kept != self.hash:
                    now = self.hash
                    entries = [self._entries[about] for about in sorted(self._entries)]
                    await self._offload(partial(self._keep, entries))
                    self._kept = now
            except (IdentityError, wire.WireError, OSError) as error:
                self._warnings.add(f"expulsions: {error}")
            await asyncio.sleep(_CHECK_S)
