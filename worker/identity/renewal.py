"""A member's certificate is renewed before it ends, by whoever holds the run's key.

It is due when a third of its time is left, so that the holder may be away for long. Those that may
hold the key are asked in turn. The key stays, so connections and signatures go on as they are: only
new connections are made with the new certificate.
"""

import asyncio
import datetime
from collections.abc import Callable, Iterable

from protos import murmuration_pb2 as pb
from protos.events import Warnings, new_event
from protos.identity import Authority, Identity, IdentityError
from protos.text import shown
from worker import wire
from worker.exchange.context import Offload
from worker.transport import Transport, TransportError

_CHECK_S = 10.0
_TRY_S = 5.0
_ASK_AGAIN = datetime.timedelta(minutes=1)
_MOST_ASKED = 16  # at one check
_WARNED = datetime.timedelta(days=30)  # before the end, that nobody has renewed it


class Renewal:
    """io thread only.

    Args:
        identity: that this peer has.
        authority: of the run, if this peer holds its key.
        transport: to the others; gets the new certificate.
        holders: addresses of those that may hold the key, the likeliest first.
        keep: puts the new identity where the peer will find it. Raises OSError.
        renewed: called with it.
        offload: where files are written.
        log: takes events.
    """

    def __init__(
        self,
        identity: Identity,
        authority: Authority | None,
        *,
        transport: Transport,
        holders: Callable[[], Iterable[str]],
        keep: Callable[[Identity], None],
        renewed: Callable[[Identity], None],
        offload: Offload,
        log: Callable[[dict[str, object]], None],
    ) -> None:
        self._identity, self._authority = identity, authority
        self._due = identity.renewed_from
        self._transport, self._holders, self._offload = transport, holders, offload
        self._keep, self._renewed, self._log = keep, renewed, log
        self._warnings = Warnings(log)
        self._asked = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = datetime.datetime.now(datetime.UTC)
            if now >= self._due:
                self._due = now + _ASK_AGAIN
                await self._renew(now)
            await asyncio.sleep(_CHECK_S)

    async def _renew(self, now: datetime.datetime) -> None:
        try:
            certificate = await self._certificate()
            if certificate is None:
                if self._identity.expires - now < _WARNED:
                    self._warnings.add(
                        f"the certificate ends on {self._identity.expires:%Y-%m-%d}, and nobody "
                        "that answers holds the run's key to renew it"
                    )
                return
            before = self._identity
            identity = Identity.of(before.key, certificate, before.authority)
            if (identity.role, identity.name) != (before.role, before.name):
                raise IdentityError("the renewed certificate is somebody else's")
            await self._offload(lambda: self._keep(identity))
        except (IdentityError, OSError) as error:
            self._warnings.add(f"the certificate is not renewed: {shown(str(error), 160)}")
            return
        self._identity, self._due = identity, identity.renewed_from
        self._transport.renew(identity)
        self._renewed(identity)
        self._log(new_event("renewed", expires=f"{identity.expires:%Y-%m-%d}"))

    async def _certificate(self) -> bytes | None:
        """A later one (PEM); None: nobody has given it. Raises IdentityError."""
        mine, authority = self._identity, self._authority
        if authority is not None:
            return await self._offload(lambda: authority.renew(mine.name, mine.der, mine.request()))
        asked = pb.EnrolRequest(name=mine.name, request=mine.request(), certificate=mine.der)
        addresses = list(self._holders())
        for index in range(min(_MOST_ASKED, len(addresses))):
            address = addresses[(self._asked + index) % len(addresses)]
            try:
                raw = await self._transport.call(
                    address, "Control/Enrol", asked.SerializeToString(), _TRY_S
                )
                reply = wire.parse(pb.EnrolReply, raw)
            except (TransportError, wire.WireError):
                continue
            if not reply.refusal:
                return bytes(reply.certificate)
        self._asked += _MOST_ASKED
        return None
