"""A certificate is renewed by a peer that holds the run's key, when a third of its time is left.

So the holder may be away for long. The key stays: only new connections use the new certificate.
"""

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import Log, Warnings, new_event
from murmuration.protos.figures import shown
from murmuration.worker.identity.authority import Authority
from murmuration.worker.identity.certificates import Identity, IdentityError

if TYPE_CHECKING:
    from murmuration.worker.background import Offload

_CHECK_S, _ASK_AGAIN_S = 10.0, 60.0
_WARNED = datetime.timedelta(days=30)  # before the end, that nobody has renewed it


class Renewal:
    """The renewal for one process, on its event loop. Args: authority: if it holds the run's key;
    ask: asks those that may hold it for a later certificate (PEM), None where none gives one; keep:
    puts the new identity where the process finds it (raises OSError); renewed: called with it."""

    def __init__(
        self,
        identity: Identity,
        authority: Authority | None,
        *,
        ask: Callable[[pb.EnrolRequest], Awaitable[bytes | None]] | None = None,
        keep: Callable[[Identity], None],
        renewed: Callable[[Identity], None],
        offload: "Offload",
        log: Log,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._identity, self._authority = identity, authority
        self._ask, self._offload, self._now = ask, offload, now
        self._keep, self._renewed, self._log = keep, renewed, log
        self._warnings = Warnings(log)

    async def run(self) -> None:
        while True:  # a clock may be set back
            if due := (now := self._now()) >= self._identity.renewed_from:
                await self._renew(now)
            await asyncio.sleep(_ASK_AGAIN_S if due else _CHECK_S)

    async def _renew(self, now: datetime.datetime) -> None:
        before, authority = self._identity, self._authority
        certificate: bytes | None = None
        try:
            name, der, request = before.name, before.der, before.request()
            if authority is not None:
                work = partial(authority.renew, name, der, request, before.role)
                certificate = await self._offload(work)
            elif self._ask is not None:
                wanted = pb.EnrolRequest(name=name, request=request, certificate=der)
                certificate = await self._ask(wanted)
            if certificate is None:
                if before.expires - now < _WARNED:
                    self._warnings.add(
                        f"the certificate ends on {before.expires:%Y-%m-%d}, and nobody "
                        "that answers holds the run's key to renew it"
                    )
                return
            identity = Identity.of(before.key, certificate, before.authority)
            same = (identity.role, identity.name) == (before.role, before.name)
            if not same or (identity.expires, identity.der != der) <= (before.expires, False):
                raise IdentityError("the renewed certificate is somebody else's, or no later one")
            await self._offload(partial(self._keep, identity))
        except (IdentityError, OSError) as error:
            self._warnings.add(f"the certificate is not renewed: {shown(str(error), 160)}")
            return
        self._identity = identity
        self._renewed(identity)
        self._log(new_event("renewed", expires=f"{identity.expires:%Y-%m-%d}"))
