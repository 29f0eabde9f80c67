"""Carries out membership over the transport: gossip, probes, first contact, leaving."""

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Protocol

from protos import murmuration_pb2 as pb
from protos.events import new_event
from protos.manifest import first_difference
from worker import wire
from worker.errors import ManifestRefused
from worker.exchange.types import View
from worker.manifest import Manifest
from worker.membership import (
    Dissemination,
    Event,
    Gossiped,
    GossipMessage,
    IndirectlyProbed,
    IndirectProbe,
    Leaving,
    Member,
    MemberProgress,
    Membership,
    Probe,
    Probed,
    ProbeTick,
    Suspected,
    Updated,
    ViewChanged,
    with_progress,
)
from worker.transport import Stream, Transport, TransportError

_JOIN_S = 2.0
_LEAVE_S = 1.0
_MAX_PROBE_S = 10.0


class Host(Protocol):
    """What membership asks of the node that it runs in."""

    transport: Transport

    def clock(self) -> float:
        """Monotonic seconds."""
        ...

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Runs a coroutine in the background."""
        ...

    def on_view(self, view: View) -> None: ...

    def on_round_trip(self, peer: str, seconds: float) -> None:
        """A small call was answered."""
        ...

    def log(self, event: dict[str, object]) -> None: ...


class GossipService:
    """One peer's membership, live. io thread only.

    Args:
        membership: the state machine.
        manifest: of the run; a peer with another is refused.
        host: carries out what concerns the whole node.
    """

    def __init__(self, membership: Membership, manifest: Manifest, host: Host) -> None:
        self._membership, self._manifest, self._host = membership, manifest, host
        self._news = Dissemination(membership.me.peer, membership.config.full_s)
        self._packed, self.run = manifest.pack(), manifest.run
        self._transport, self._clock = host.transport, host.clock
        self._logged: dict[str, str] = {}
        self._unreachable: tuple[str, ...] = ()

    @property
    def me(self) -> Member:
        return self._membership.me

    @property
    def members(self) -> tuple[Member, ...]:
        return self._membership.members

    @property
    def others(self) -> list[Member]:
        return [member for member in self.members if member.peer != self.me.peer]

    @property
    def replicas(self) -> list[Member]:
        """Of the others, those that serve this peer's stage: all of them where there is but one."""
        return [member for member in self.others if member.stage == self.me.stage]

    @property
    def view(self) -> View:
        """This peer and its replicas: whom its rounds are made with."""
        stage = self.me.stage
        return View({member.peer: member for member in self.members if member.stage == stage})

    @property
    def swarm(self) -> View:
        """Everyone, whatever they serve."""
        return View({member.peer: member for member in self.members})

    def address_of(self, peer: str) -> str | None:
        return self._membership.address(peer)

    def open(self, peer: str, method: str) -> Stream:
        """A stream to a peer. Raises TransportError: no address is known."""
        if (address := self.address_of(peer)) is None:
            raise TransportError("no address known")
        return self._transport.open(address, method)

    def suspect(self, peer: str) -> None:
        """A stream to the peer broke: it is probed now."""
        self.handle(Suspected(peer))

    def connect(self, peers: Iterable[str]) -> None:
        """Begins to open the data connections to these peers, without waiting."""
        for address in map(self.address_of, peers):
            if address is not None and address != self.me.address:
                self._transport.connect(address)

    def tick(self) -> None:
        """Time passes."""
        self.handle(ProbeTick())

    def handle(self, event: Event) -> None:
        """Feeds the state machine and does what it says."""
        changed = isinstance(event, Gossiped | Updated)
        for action in self._membership.handle(event, self._clock()):
            match action:
                case Probe(peer, address, timeout_s):
                    self._host.spawn(self._probe(peer, address, timeout_s))
                case IndirectProbe(via, peer, address, timeout_s):
                    self._host.spawn(self._ask_probe(via, peer, address, timeout_s))
                case ViewChanged():
                    changed = True
                    self._log_members()
        if changed:
            self._host.on_view(self.view)

    # ---------------------------------------------------------------------------------- serving

    async def on_gossip(self, request: bytes) -> bytes:
        """Takes a peer's news and gives ours; another run gets none."""
        gossip = wire.parse(pb.GossipMessage, request)
        if gossip.run != self.run:
            return self._message(GossipMessage())
        asked = from_gossip_message(gossip)
        self._hear(gossip.sender, asked)
        return self._message(self._news.answer(gossip.sender, asked, self.members))

    async def on_join(self, request: bytes) -> bytes:
        """First contact: refuses another run, tells a peer without a manifest what the run is."""
        join = wire.parse(pb.JoinRequest, request)
        if not join.manifest:
            return pb.JoinReply(manifest=self._packed).SerializeToString()
        theirs = Manifest.unpack(join.manifest)
        if theirs.run != self.run:
            difference = first_difference(theirs.agreed, self._manifest.agreed)
            refusal = f"the manifests differ in {difference}"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        member = wire.member_from_message(join.member)
        if member.peer == self.me.peer and member.address != self.me.address:
            refusal = f"its own name is {member.peer!r} too; choose another with --name"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        if (address := await self._name_taken_at(member)) is not None:
            refusal = f"{member.peer!r} lives at {address}; choose another name with --name"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        self.handle(Gossiped((member,)))
        members = [wire.member_to_message(member) for member in self._news.part(self.members)]
        return pb.JoinReply(members=members).SerializeToString()

    async def _name_taken_at(self, member: Member) -> str | None:
        """Where another process answers by the newcomer's name; a former life of it does not."""
        known = next((each for each in self.others if each.peer == member.peer), None)
        if known is None or not known.live or known.address == member.address:
            return None
        timeout_s = self._membership.config.probe_timeout_s
        sender = await self._exchange(known.peer, known.address, timeout_s)
        return known.address if sender == member.peer else None

    async def on_indirect_probe(self, request: bytes) -> bytes:
        """Probes another peer in the asking one's place."""
        asked = wire.parse(pb.ProbeRequest, request)
        timeout_s = min(asked.timeout_s, _MAX_PROBE_S)
        sender = await self._exchange(asked.peer, asked.address, timeout_s)
        return pb.ProbeReply(alive=sender is not None).SerializeToString()

    # ---------------------------------------------------------------------------------- calling

    async def join(self, address: str) -> None:
        """First contact with a peer. Raises ManifestRefused, Unreachable."""
        request = pb.JoinRequest(member=wire.member_to_message(self.me), manifest=self._packed)
        raw = await self._transport.call(
            address, "Control/Join", request.SerializeToString(), _JOIN_S
        )
        reply = wire.parse(pb.JoinReply, raw)
        if reply.refusal:
            raise ManifestRefused(f"{address} refuses this run: {reply.refusal}")
        self.handle(Gossiped(wire.members_from_messages(reply.members)))

    async def leave(self) -> None:
        """Tells every live peer; waits a moment at most, for gossip will do the rest."""
        self.handle(Leaving())
        targets = [member for member in self.others if member.live]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(
                    *(self._exchange(member.peer, member.address, _LEAVE_S) for member in targets)
                )

    async def _probe(self, peer: str, address: str, timeout_s: float) -> None:
        sender = await self._exchange(peer, address, timeout_s)
        self.handle(Probed(peer, answered=sender is not None))

    async def _ask_probe(self, via: str, peer: str, address: str, timeout_s: float) -> None:
        request = pb.ProbeRequest(peer=peer, address=address, timeout_s=timeout_s)
        alive = False
        with suppress(TransportError, wire.WireError):
            raw = await self._transport.call(
                via, "Control/IndirectProbe", request.SerializeToString(), 2 * timeout_s
            )
            alive = wire.parse(pb.ProbeReply, raw).alive
        self.handle(IndirectlyProbed(peer, alive))

    async def _exchange(self, peer: str, address: str, timeout_s: float) -> str | None:
        """Push-pull with one peer. Returns who has answered: somebody else may have the address by
        now; None when nobody does, or who runs something else."""
        began = self._clock()
        request = self._message(self._news.request(peer, self.members, began))
        try:
            raw = await self._transport.call(address, "Control/Gossip", request, timeout_s)
            answer = wire.parse(pb.GossipMessage, raw)
            sender = answer.sender if answer.run == self.run else None
            if sender is not None:
                self._host.on_round_trip(sender, self._clock() - began)
                self._hear(sender, from_gossip_message(answer))
        except (TransportError, wire.WireError):
            sender = None
        if sender != peer:
            self._news.failed(peer)
        return sender

    def _hear(self, sender: str, message: GossipMessage) -> None:
        self.handle(Gossiped(with_progress(message, sender, self.members), sender))
        self._news.heard(sender, message, self.members)

    def _message(self, message: GossipMessage) -> bytes:
        return to_gossip_message(message, self.me.peer, self.run).SerializeToString()

    def _log_members(self) -> None:
        for member in self.others:
            health = member.health.name.lower()
            if self._logged.get(member.peer) != health:
                self._logged[member.peer] = health
                self._host.log(new_event("member", peer_changed=member.peer, health=health))
        if self.me.unreachable != self._unreachable:
            self._unreachable = self.me.unreachable
            self._host.log(new_event("unreachable", peers=list(self._unreachable)))


def to_gossip_message(message: GossipMessage, sender: str, run: int) -> pb.GossipMessage:
    progress = None
    if (mine := message.progress) is not None:
        progress = pb.MemberProgress(epoch=mine.epoch, heartbeat=mine.heartbeat, step=mine.step)
    return pb.GossipMessage(
        sender=sender,
        run=run,
        members=[wire.member_to_message(member) for member in message.members],
        progress=progress,
        number=message.number,
        acknowledged=message.acknowledged,
        reset=message.reset,
        full=message.full,
    )


def from_gossip_message(message: pb.GossipMessage) -> GossipMessage:
    """The inverse. Raises WireError when a member is not valid."""
    theirs = message.progress
    return GossipMessage(
        members=wire.members_from_messages(message.members),
        progress=MemberProgress(theirs.epoch, theirs.heartbeat, theirs.step)
        if message.HasField("progress")
        else None,
        number=message.number,
        acknowledged=message.acknowledged,
        reset=message.reset,
        full=message.full,
    )
