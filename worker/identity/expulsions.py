"""Which certificates and tokens count no more. Peers pass the authority's entries on with gossip.

The one that holds the run's key reads them from its folder, where `murmur token` writes them. Every
peer keeps what it has heard of, for when it is started again without that one.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import Warnings, new_event
from murmuration.protos.identity import (
    Authority,
    Identity,
    IdentityError,
    Revocations,
    revoked_peer,
)
from murmuration.protos.text import shown
from murmuration.worker import wire
from murmuration.worker.exchange.round_context import Offload
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
        self._known, self._authority = Revocations(identity.authority), authority
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
        """As many as go into one message."""
        return self._known.part()

    def includes(self, caller: Caller) -> bool:
        """Whether what the caller proves itself by counts no more."""
        return f"{caller.role}/{caller.name}" in self._known

    def learn(self, entries: Iterable[pb.Revocation]) -> None:
        """Takes those that the authority has signed. Raises WireError: one is not."""
        try:
            for about in self._known.learn(entries):
                self._log(
                    new_event("warning", text=f"{shown(about)} was revoked: it counts no more")
                )
                if (peer := revoked_peer(about)) is not None:
                    self._expelled(peer)
        except IdentityError as error:
            raise wire.WireError(str(error)) from None
        finally:
            if len(self._known) > self._hashed:
                self._hashed = len(self._known)
                subjects = "\n".join(each.subject for each in self._known.entries)
                self.hash = wire.hash64(subjects.encode())

    async def run(self) -> None:
        """Reads what the user has revoked, and keeps what is new, until cancelled."""
        while True:
            try:
                if self._authority is not None:
                    self.learn(await self._offload(self._authority.revocations))
                if self._kept != self.hash:
                    entries, now = self._known.entries, self.hash
                    await self._offload(partial(self._keep, entries))
                    self._kept = now
            except (IdentityError, wire.WireError, OSError) as error:
                self._warnings.add(f"expulsions: {error}")
            await asyncio.sleep(_CHECK_S)
