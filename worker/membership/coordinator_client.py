"""Tells the optional coordinator of this peer, and learns of others there."""

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.events import new_event
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.errors import ManifestRefused, MurmurError, NotDialled
from murmuration.worker.membership import Member
from murmuration.worker.membership.first_contact import FirstContact
from murmuration.worker.transport import TransportError

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_PERIOD_S = 1.0
_EAGER_S = 0.25
_CALL_S = 2.0
_MEET_AGAIN_S = 5.0


class CoordinatorClient:
    """Introduces this peer again and again; the coordinator may come and go. io thread only."""

    def __init__(
        self, address: str, manifest: bytes, first_contact: FirstContact, node: "Node"
    ) -> None:
        self._address, self._manifest = address, manifest
        self._first_contact, self._gossip = first_contact, first_contact.gossip
        self._node = node
        self._silent = False
        self._met_at: dict[str, float] = {}  # by address
        self._refusal: MurmurError | None = None

    async def run(self) -> None:
        """Until cancelled. A refusal ends the run only before it has begun.

        Raises:
            ManifestRefused: the coordinator's run is another one, or that of a peer that it names.
            NotDialled: as `GossipService.contact`.
        """
        while True:
            if self._refusal is not None:
                raise self._refusal
            try:
                await self._introduce()
                self._silent, self._first_contact.introduced = False, True
            except (TransportError, wire.WireError, ManifestRefused) as error:
                self._first_contact.introduced = False
                if isinstance(error, ManifestRefused) and not self._started:
                    raise
                if self._started and not self._silent:
                    self._silent = True
                    self._node.log(
                        new_event("warning", text=f"coordinator: {error}; going on without")
                    )
            settled = self._started and not self._silent
            await asyncio.sleep(_PERIOD_S if settled else _EAGER_S)

    @property
    def _started(self) -> bool:
        return self._node.published is not None

    async def leave(self) -> None:
        """Says a last time how this peer is."""
        with suppress(TransportError, wire.WireError, ManifestRefused):
            await self._introduce()

    async def _introduce(self) -> None:
        request = pb.IntroduceRequest(
            member=wire.member_to_message(self._gossip.me), manifest=self._manifest
        )
        raw = await self._node.transport.call(
            self._address, "Coordinator/Introduce", request.SerializeToString(), _CALL_S
        )
        reply = wire.parse(pb.IntroduceReply, raw)
        if reply.refusal:
            raise ManifestRefused(
                f"coordinator {self._address} refuses: {shown(reply.refusal, 200)}"
            )
        self._gossip.learn_revoked(reply.revocations)
        for member in self._gossip.read_hints(reply.members):
            self._meet(member)

    def _meet(self, member: Member) -> None:
        """First contact with a peer that the coordinator names: it is no member on that word."""
        if member.peer == self._gossip.me.peer:  # of an earlier process, by a clock that was ahead
            self._gossip.hear((member,))
            return
        known = self._gossip.address_of(member.peer)
        due_s = self._met_at.get(member.address, -math.inf) + _MEET_AGAIN_S
        now = self._node.clock()
        if known == member.address or now < due_s:
            return
        if member.live:
            self._met_at[member.address] = now
            self._node.spawn(self._contact(member))

    async def _contact(self, member: Member) -> None:
        """A refusal ends the run before it has begun, in `run`."""
        try:
            await self._first_contact.contact(member.address, member.peer)
        except (ManifestRefused, NotDialled) as error:
            if not self._started or isinstance(error, NotDialled):
                self._refusal = error
            else:
                self._node.log(new_event("warning", text=str(error)))
