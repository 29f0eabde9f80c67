"""First contact, both sides of it: what is asked before a peer is a member, and what is answered.

A peer of another run is refused. So is one that this swarm cannot dial: it is dialled back, by two
where there are two, since nobody's rounds may wait for a peer that none can reach. It asks the one
that has refused it to be its relay, and comes again.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from murmuration.protos import addresses, murmuration_pb2 as pb
from murmuration.protos.documents import first_difference
from murmuration.protos.events import Log, Warnings, new_event
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.errors import ManifestRefused, MurmurError, NotDialled
from murmuration.worker.manifest import Manifest
from murmuration.worker.membership import Health, Member, Phase
from murmuration.worker.membership.gossip import GossipService
from murmuration.worker.transport import Caller, Method, Transport, TransportError

if TYPE_CHECKING:
    from murmuration.worker.node.node import Node

_JOIN_S = 6.0  # both peers that dial back may need their time
_DIAL_S = 2.0
_DIALS = 8  # at once: a peer that asks to be dialled is a stranger
_DIALLED_WITHIN_S = 3.0  # with what it takes to begin, a joiner is told within ten
_PERIOD_S, _EAGER_S = 1.0, 0.25  # between two words to the coordinator
_CALL_S = 2.0
_MEET_AGAIN_S = 5.0


class FirstContact:
    """Takes newcomers in, and asks to be taken in. io thread only. Args: ways: what may make this
    peer one that others can dial, in this order, where the peer at an address cannot: each says
    whether there is something new to dial."""

    introduced = False  # a coordinator answers, which will name peers as they come

    def __init__(
        self,
        gossip: GossipService,
        manifest: Manifest,
        transport: Transport,
        clock: Callable[[], float],
        log: Log,
        ways: Sequence[Callable[[str], Awaitable[bool]]] = (),
    ) -> None:
        self.gossip, self._manifest, self._packed = gossip, manifest, manifest.pack()
        self._transport, self._clock, self._ways = transport, clock, ways
        self._dialling: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_DIALS)
        )  # by the caller's certificate: what one asks for delays nobody else
        self._seconds_asked, self._refusals = 0, Warnings(log)
        self._undialled_since: float | None = None

    @property
    def undialled(self) -> bool:
        """Says whether peers, and nobody else, have refused this one, as they cannot dial it."""
        alone = not any(member.live for member in self.gossip.others)
        return alone and self._undialled_since is not None

    async def serve(self, request: bytes, caller: Caller) -> bytes:
        join = wire.parse(pb.JoinRequest, request)
        reply = await self._reply(join, caller)
        if reply.refusal:
            reply.manifest = self._packed
            if not (join.dial_only or reply.undialled):
                who = shown(caller.name or join.member.peer or "a peer", 60)
                where = addresses.caller_host(caller.address) or "an unknown address"
                self._refusals.add(f"{who} at {where} was not let in", shown(reply.refusal, 200))
        return reply.SerializeToString()

    async def _reply(self, join: pb.JoinRequest, caller: Caller) -> pb.JoinReply:
        seen_from = addresses.caller_host(caller.address)
        if not join.manifest:
            now_ms = time.time_ns() // 1_000_000
            return pb.JoinReply(manifest=self._packed, seen_from=seen_from, time_ms=now_ms)
        if join.manifest != self._packed:
            theirs, difference = Manifest.unpack(join.manifest), None
            if theirs.run != self.gossip.run:
                pair = theirs.agreed, self._manifest.agreed
                sides = "in the joiner's", "in this run's"
                difference = first_difference(*pair, *sides) or "the run"
            if difference := difference or theirs.other_order(self._manifest):
                return pb.JoinReply(refusal=f"the manifests differ in {difference}")
        member, refusal = self._newcomer(join)
        if member is None:
            return pb.JoinReply(refusal=refusal)
        joins, me = not join.dial_only, self.gossip.me
        if joins and member.peer == me.peer and member.address != me.address:
            own = f"its own name is {member.peer!r} too; choose another with --name"
            return pb.JoinReply(refusal=own)
        if (unfit := undialable(member.address, me.address)) is not None:
            return pb.JoinReply(refusal=unfit)
        known = self._known(member.peer) if joins else None
        if known is not None and await self._lives_elsewhere(known, member):
            taken = f"{member.peer!r} lives at {known.address}; choose another name with --name"
            return pb.JoinReply(refusal=taken)
        known = self._known(member.peer) if joins else None  # as it is by now
        if known is not None and known.start_ms > member.start_ms:
            # Of a process that was later by its clock of then: it takes a later start now.
            return pb.JoinReply(members=[self.gossip.to_message(known)])
        unreached = await self._dial_back(member, caller.name, alone=join.dial_only)
        if unreached is not None:
            seen = f" (calls come from {seen_from})" if seen_from else ""
            refusal = f"{unreached} at {member.address}, which it advertises{seen}"
            return pb.JoinReply(refusal=refusal, undialled=True)
        if join.dial_only:
            return pb.JoinReply()
        self.gossip.hear((member,))
        members, certificates = self.gossip.introductions()
        return pb.JoinReply(members=members, certificates=certificates)

    def _newcomer(self, join: pb.JoinRequest) -> tuple[Member | None, str]:
        if join.dial_only:
            hints = self.gossip.read_hints([join.member])
            return (hints[0], "") if hints else (None, "it cannot be a member")
        certificates = [join.certificate] if join.certificate else []
        members, refused = self.gossip.read_members([asked := join.member], certificates)
        for member in members:
            if member.peer == asked.peer:
                words = wire.parse(pb.Member, asked.signed) if asked.signed else asked
                said = wire.member_from_message(words)
                return (said if said.start_ms < member.start_ms else member), ""
        return None, refused[0] if refused else "its certificate is missing, or not of this run"

    def _known(self, peer: str) -> Member | None:
        return next((each for each in self.gossip.others if each.peer == peer), None)

    async def _lives_elsewhere(self, known: Member, member: Member) -> bool:
        """A former life of the peer does not."""
        if not known.live or known.address == member.address:
            return False
        if known.start_ms == member.start_ms and addresses.split_relayed(member.address):
            return False  # it is this process, which has another relay now
        timeout_s = self.gossip.rules.config.probe_timeout_s
        return await self.gossip.exchange(known.peer, known.address, timeout_s) == member.peer

    async def _dial_back(self, member: Member, caller: str, *, alone: bool) -> str | None:
        """Names the peer that cannot dial a newcomer: this one or, unless `alone`, another."""
        known, at = self._known(member.peer), (member.start_ms, member.address)
        if known is not None and known.live and (known.start_ms, known.address) == at:
            return None
        async with self._dialling[caller]:
            second = None if alone else asyncio.ensure_future(self._second_dial(member))
            # At one that is for all: neighbours may reach it elsewhere.
            at_all = addresses.public_address(member.address)
            if await self.gossip.answers(member.peer, at_all, _DIAL_S):
                return None if second is None else await second
            if second is not None:
                second.cancel()
            return f"{self.gossip.me.peer} does not reach {member.peer}"

    async def _second_dial(self, member: Member) -> str | None:
        out = {member.peer, *self.gossip.me.unreachable}
        alive = (other for other in self.gossip.others if other.health is Health.ALIVE)
        able = [each for each in alive if each.peer not in out and each.address != member.address]
        if not able:
            return None
        self._seconds_asked += 1
        other = able[self._seconds_asked % len(able)]
        asked = (self._transport, other.address, member, self._packed, other.peer)
        return f"{other.peer} does not reach {member.peer}" if await ask_to_dial(*asked) else None

    async def contact(self, address: str, peer: str | None = None) -> str | None:
        """Returns what is wrong where another try may help. Args: peer: that is to be there. Raises
        ManifestRefused; NotDialled: nobody can dial this peer, and its run has not begun."""
        ways = iter(self._ways)
        try:
            while True:
                try:
                    await self.join(address, peer)
                    break
                except NotDialled:
                    for way in ways:
                        if await way(address):
                            break
                    else:
                        raise
        except (TransportError, wire.WireError) as error:
            return str(error)
        except NotDialled as error:
            now = self._clock()
            self._undialled_since = self._undialled_since or now
            waits = self.gossip.me.phase in (Phase.STARTING, Phase.READY)
            if self.undialled and waits and now - self._undialled_since >= _DIALLED_WITHIN_S:
                raise
            return str(error)
        self._undialled_since = None
        return None

    async def join(self, address: str, peer: str | None = None, *, again: bool = True) -> None:
        """One try, and a second where this peer has a later start by the answer. Raises
        ManifestRefused, NotDialled, Unreachable."""
        member, certificate = self.gossip.to_message(self.gossip.me), self.gossip.certificate
        member.peer = self.gossip.me.peer
        request = pb.JoinRequest(member=member, manifest=self._packed, certificate=certificate)
        asked = request.SerializeToString()
        raw = await self._transport.call(address, Method.JOIN, asked, _JOIN_S, peer)
        reply = wire.parse(pb.JoinReply, raw)
        if reply.undialled:
            raise NotDialled(
                f"{shown(reply.refusal, 300)}; open that port, or say with --advertise HOST:PORT "
                "where others reach this peer"
            )
        if reply.refusal:
            raise ManifestRefused(f"{address} refuses this peer: {shown(reply.refusal, 200)}")
        members, refused = self.gossip.read_members(reply.members, reply.certificates)
        for reason in refused:
            self.gossip.warnings.add(f"does not believe {address}: {reason}", by=address)
        start_ms = self.gossip.me.start_ms
        self.gossip.hear(members)
        if again and self.gossip.me.start_ms != start_ms:
            await self.join(address, peer, again=False)


async def ask_to_dial(
    transport: Transport, asked: str, member: Member, manifest: bytes, peer: str | None = None
) -> bool | None:
    """Asks the peer at `asked` to dial a member. True: it cannot; None: it does not say."""
    message = wire.member_to_message(member)
    request = pb.JoinRequest(member=message, manifest=manifest, dial_only=True).SerializeToString()
    with suppress(TransportError, wire.WireError):
        raw = await transport.call(asked, Method.JOIN, request, 2 * _DIAL_S, peer)
        reply = wire.parse(pb.JoinReply, raw)
        return None if reply.refusal and not reply.undialled else reply.undialled
    return None


def undialable(theirs: str, mine: str) -> str | None:
    """Why the address that a newcomer advertises is none for this swarm, in which `mine` is one."""
    mine = addresses.dialled(mine)[0]
    for each in addresses.dialled(theirs):
        there, here = (address.rpartition(":")[0].strip("[]") for address in (each, mine))
        if addresses.is_wildcard(there):
            return f"nobody can dial {each}; say with --advertise HOST:PORT where others reach you"
        if addresses.is_loopback(there) and not addresses.is_loopback(here):
            return (
                f"{each} is reachable from its own machine only, and this swarm is on several; "
                "listen on 0.0.0.0:7700"
            )
        if addresses.is_loopback(here) and not addresses.is_loopback(there):
            return (
                "this swarm is on one machine only; listen on 127.0.0.1 too, or start the peer at "
                f"{mine} with --listen 0.0.0.0:7700"
            )
    return None


class CoordinatorClient:
    """Tells the optional coordinator of this peer, and learns of others there. io thread only."""

    def __init__(self, address: str, manifest: bytes, contact: FirstContact, node: "Node") -> None:
        self._address, self._manifest = address, manifest
        self._first_contact, self._gossip = contact, contact.gossip
        self._node, self._silent = node, False
        self._met_at: dict[str, float] = {}  # by address
        self._contacting = 0
        self._refusal: MurmurError | None = None

    async def run(self) -> None:
        """Until cancelled. Raises ManifestRefused and NotDialled, only before the run has begun."""
        while True:
            if self._refusal is not None and not self._contacting:
                error, self._refusal = self._refusal, None
                begins = not self._started or isinstance(error, NotDialled)
                let_in = any(member.live for member in self._gossip.others)
                if begins and not let_in:  # else one of several may lie
                    raise error
                self._node.log(new_event("warning", text=f"{error}; going on without it"))
            try:
                await self._introduce()
                self._silent, self._first_contact.introduced = False, True
            except (TransportError, wire.WireError, ManifestRefused) as error:
                self._first_contact.introduced = False
                if isinstance(error, ManifestRefused) and not self._started:
                    raise
                if self._started and not self._silent:
                    self._silent = True
                    text = f"coordinator: {error}; going on without"
                    self._node.log(new_event("warning", text=text))
            await asyncio.sleep(_PERIOD_S if self._started and not self._silent else _EAGER_S)

    @property
    def _started(self) -> bool:  # maybe while the coordinator is asked
        return self._node.published is not None

    async def leave(self) -> None:
        with suppress(TransportError, wire.WireError, ManifestRefused):
            await self._introduce()

    async def _introduce(self) -> None:
        me = wire.member_to_message(self._gossip.me)
        request = pb.IntroduceRequest(member=me, manifest=self._manifest)
        raw = await self._node.transport.call(
            self._address, "Coordinator/Introduce", request.SerializeToString(), _CALL_S
        )
        reply = wire.parse(pb.IntroduceReply, raw)
        if reply.refusal:
            why = shown(reply.refusal, 200)
            raise ManifestRefused(f"coordinator {self._address} refuses: {why}")
        self._gossip.learn_revoked(reply.revocations)
        for member in self._gossip.read_hints(reply.members):
            self._meet(member)

    def _meet(self, member: Member) -> None:
        """First contact with a peer that the coordinator names: it is no member on that word."""
        if member.peer == self._gossip.me.peer:  # of an earlier process, by a clock that was ahead
            self._gossip.hear((member,))
            return
        known, now = self._gossip.address_of(member.peer), self._node.clock()
        due = now >= self._met_at.get(member.address, -math.inf) + _MEET_AGAIN_S
        if member.live and known != member.address and due and self._refusal is None:
            self._met_at[member.address] = now
            self._node.spawn(self._contact(member))

    async def _contact(self, member: Member) -> None:
        self._contacting += 1
        try:
            await self._first_contact.contact(member.address, member.peer)
        except (ManifestRefused, NotDialled) as error:
            self._refusal = error
        finally:
            self._contacting -= 1
