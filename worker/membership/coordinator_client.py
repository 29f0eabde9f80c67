"""Tells the optional coordinator of this peer and its progress, and learns of others there."""

import asyncio
import math
from typing import TYPE_CHECKING

from murmuration.protos import documents
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
_EVENTS_PER_CALL = 64
_MAX_EVENTS = 1024
_MAX_CALL_BYTES = 48 * 1024


class CoordinatorClient:
    """Introduces this peer again and again; the coordinator may come and go. io thread only."""

    def __init__(
        self, address: str, manifest: bytes, first_contact: FirstContact, node: "Node"
    ) -> None:
        self._address, self._manifest = address, manifest
        self._first_contact, self._gossip = first_contact, first_contact.gossip
        self._node = node
        self._events: list[dict[str, object]] = []
        self._silent = False
        self._met_at: dict[str, float] = {}  # by address
        self._refusal: MurmurError | None = None

    def add(self, event: dict[str, object]) -> None:
        """Queues an event; of progress only the newest is kept, of all the newest thousand."""
        last = self._events[-1]["event"] if self._events else None
        if last == event["event"] == "progress":
            self._events.pop()
        self._events.append(event)
        del self._events[:-_MAX_EVENTS]

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
                await self._call()
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

    async def flush(self) -> None:
        """Hands over what is queued, as far as a call or a few can."""
        try:
            while self._events:
                await self._call()
        except (TransportError, wire.WireError, ManifestRefused):
            return

    async def _call(self) -> None:
        sending, size = 0, 0
        packed: list[bytes] = []
        for event in self._events[:_EVENTS_PER_CALL]:
            document = documents.pack(event)
            size += len(document)
            if packed and size > _MAX_CALL_BYTES:
                break
            packed.append(document)
            sending += 1
        taken = self._events[:sending]
        request = pb.IntroduceRequest(
            member=wire.member_to_message(self._gossip.me), manifest=self._manifest, events=packed
        )
        raw = await self._node.transport.call(
            self._address, "Coordinator/Introduce", request.SerializeToString(), _CALL_S
        )
        reply = wire.parse(pb.IntroduceReply, raw)
        if reply.refusal:
            raise ManifestRefused(
                f"coordinator {self._address} refuses: {shown(reply.refusal, 200)}"
            )
        self._events = [event for event in self._events if not any(event is e for e in taken)]
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
