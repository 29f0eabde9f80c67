"""Which certificates and tokens count no more. Peers pass the authority's entries on with gossip.

The one that holds the run's key reads them from its folder, where `murmur token` writes them.
"""

import asyncio
from collections.abc import Callable, Iterable

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import new_event
from murmuration.protos.identity import (
    Authority,
    Identity,
    IdentityError,
    Revocations,
    revoked_peer,
)
from murmuration.protos.text import shown
from murmuration.worker import wire
from murmuration.worker.exchange.context import Offload
from murmuration.worker.transport import Caller

_CHECK_S = 2.0


class Expulsions:
    """io thread only.

    Args:
        identity: of this peer.
        authority: of the run, if this peer holds its key.
        expelled: called once for each peer that is.
        offload: where files are read.
        log: takes events.
    """

    def __init__(
        self,
        identity: Identity,
        authority: Authority | None,
        *,
        expelled: Callable[[str], None],
        offload: Offload,
        log: Callable[[dict[str, object]], None],
    ) -> None:
        self._known, self._authority = Revocations(identity.authority), authority
        self._expelled, self._offload, self._log = expelled, offload, log
        self.hash = 0

    @property
    def entries(self) -> list[pb.Revocation]:
        return self._known.entries

    def includes(self, caller: Caller) -> bool:
        """Whether what the caller proves itself by counts no more."""
        return f"{caller.role}/{caller.name}" in self._known

    def learn(self, entries: Iterable[pb.Revocation]) -> None:
        """Takes those that the authority has signed."""
        new = self._known.learn(entries)
        if new:
            self.hash = wire.hash64("\n".join(e.subject for e in self.entries).encode())
        for about in new:
            self._log(new_event("warning", text=f"{shown(about)} was revoked: it counts no more"))
            if (peer := revoked_peer(about)) is not None:
                self._expelled(peer)

    async def run(self) -> None:
        """Reads what the user has revoked, until cancelled; at once without the run's key."""
        while (authority := self._authority) is not None:
            try:
                self.learn(await self._offload(authority.revocations))
            except IdentityError as error:
                self._log(new_event("warning", text=str(error)))
            await asyncio.sleep(_CHECK_S)
