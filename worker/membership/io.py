"""Carries out membership over the transport: gossip, probes, first contact, leaving."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from protos import murmuration_pb2 as pb
from protos.addresses import caller_host, is_loopback, is_wildcard, split_address
from protos.events import new_event
from protos.manifest import first_difference
from protos.text import shown
from worker import wire
from worker.errors import ManifestRefused, NotDialled
from worker.exchange.types import View
from worker.manifest import Manifest
from worker.membership import (
    Dissemination,
    Event,
    Gossiped,
    GossipMessage,
    Health,
    IndirectlyProbed,
    IndirectProbe,
    Leaving,
    Member,
    MemberLimits,
    MemberProgress,
    Membership,
    Phase,
    Probe,
    Probed,
    ProbeTick,
    Suspected,
    Updated,
    ViewChanged,
    with_progress,
)
from worker.transport import Stream, Transport, TransportError

_JOIN_S = 6.0  # both peers that dial back may need their time
_DIAL_S = 2.0
_DIALS = 8  # at once: who asks to be dialled is a stranger
_DIALLED_WITHIN_S = 3.0  # with what it takes to begin, a joiner is told within ten
_LEAVE_S = 1.0
_MAX_PROBE_S = 10.0
_MOST_PROBES = 16  # for others at once
_MAX_TOLD = 8  # refusals in one answer
_MAX_WARNINGS = 32


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

    def on_refused(self, count: int) -> None:
        """So many members that a peer has sent are not believed."""
        ...

    def log(self, event: dict[str, object]) -> None: ...


class GossipService:
    """One peer's membership, live. io thread only.

    Args:
        membership: the state machine.
        manifest: of the run; a peer with another is refused.
        limits: of what is believed of a member.
        host: carries out what concerns the whole node.
    """

    def __init__(
        self, membership: Membership, manifest: Manifest, limits: MemberLimits, host: Host
    ) -> None:
        self._membership, self._manifest, self._host = membership, manifest, host
        self.limits = limits
        self._told: set[str] = set()
        self._probing_for = 0
        self._now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self._news = Dissemination(membership.me.peer, membership.config.full_s)
        self._packed, self.run = manifest.pack(), manifest.run
        self._transport, self._clock = host.transport, host.clock
        self._logged: dict[str, str] = {}
        self._unreachable: tuple[str, ...] = ()
        self._dialling = asyncio.Semaphore(_DIALS)
        self._seconds_asked = 0
        self._undialled_since: float | None = None

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

    @property
    def undialled(self) -> bool:
        """Whether peers have refused to take this one in, since they cannot dial it, and nobody
        has taken it in."""
        alone = not any(member.live for member in self.others)
        return alone and self._undialled_since is not None

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
        asked, refused = self._read(gossip)
        self._hear(gossip.sender, asked)
        answer = self._news.answer(gossip.sender, asked, self.members)
        return self._message(answer, refused[:_MAX_TOLD])

    async def on_join(self, request: bytes, caller: str) -> bytes:
        """First contact: refuses another run, tells a peer without a manifest what the run is."""
        join = wire.parse(pb.JoinRequest, request)
        if not join.manifest:
            return pb.JoinReply(
                manifest=self._packed,
                seen_from=caller_host(caller),
                time_ms=time.time_ns() // 1_000_000,
            ).SerializeToString()
        theirs = Manifest.unpack(join.manifest)
        if theirs.run != self.run:
            difference = first_difference(theirs.agreed, self._manifest.agreed)
            refusal = f"the manifests differ in {difference}"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        members, refused = self.read_members([join.member])
        if refused:
            return pb.JoinReply(refusal=refused[0], manifest=self._packed).SerializeToString()
        (member,) = members
        if member.peer == self.me.peer and member.address != self.me.address:
            refusal = f"its own name is {member.peer!r} too; choose another with --name"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        if (unfit := undialable(member.address, self.me.address)) is not None:
            return pb.JoinReply(refusal=unfit, manifest=self._packed).SerializeToString()
        if (address := await self._name_taken_at(member)) is not None:
            refusal = f"{member.peer!r} lives at {address}; choose another name with --name"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        unreached = await self._dial_back(member, alone=join.dial_only)
        if unreached is not None:
            seen_from = caller_host(caller)
            seen = f" (calls come from {seen_from})" if seen_from else ""
            refusal = f"{unreached} at {member.address}, which it advertises{seen}"
            reply = pb.JoinReply(refusal=refusal, undialled=True, manifest=self._packed)
            return reply.SerializeToString()
        if join.dial_only:
            return pb.JoinReply().SerializeToString()
        self.handle(Gossiped((member,)))
        known = [wire.member_to_message(member) for member in self._news.part(self.members)]
        return pb.JoinReply(members=known).SerializeToString()

    async def _name_taken_at(self, member: Member) -> str | None:
        """Where another process answers by the newcomer's name; a former life of it does not."""
        known = next((each for each in self.others if each.peer == member.peer), None)
        if known is None or not known.live or known.address == member.address:
            return None
        timeout_s = self._membership.config.probe_timeout_s
        sender = await self._exchange(known.peer, known.address, timeout_s)
        return known.address if sender == member.peer else None

    async def _dial_back(self, member: Member, *, alone: bool) -> str | None:
        """Who cannot dial a newcomer: this peer, or, unless it is to answer alone, another that it
        asks. None when it may become a member: nobody's rounds would wait for one that cannot be
        reached."""
        if any(
            (known.epoch, known.address) == (member.epoch, member.address) and known.live
            for known in self.others
            if known.peer == member.peer
        ):
            return None
        async with self._dialling:
            second = None if alone else asyncio.ensure_future(self._second_dial(member))
            if not await self._dial(member.peer, member.address):
                if second is not None:
                    second.cancel()
                return f"{self.me.peer} does not reach {member.peer}"
            return None if second is None else await second

    async def _second_dial(self, member: Member) -> str | None:
        """As `_dial_back`, by another peer, if there is one; another one at each try."""
        able = [
            other
            for other in self.others
            if other.health is Health.ALIVE
            and other.peer not in (member.peer, *self.me.unreachable)
            and other.address != member.address
        ]
        if not able:
            return None
        self._seconds_asked += 1
        other = able[self._seconds_asked % len(able)]
        undialled = await ask_to_dial(self._transport, other.address, member, self._packed)
        return f"{other.peer} does not reach {member.peer}" if undialled else None

    async def on_indirect_probe(self, request: bytes) -> bytes:
        """Probes another peer in the asking one's place: a member, at the address that this peer
        knows of it, and a few at once. Raises WireError."""
        asked = wire.parse(pb.ProbeRequest, request)
        if (address := self.address_of(asked.peer)) is None:
            raise wire.WireError(f"{shown(asked.peer)} is not a member")
        if self._probing_for >= _MOST_PROBES:
            raise wire.WireError(f"{self._probing_for} probes are under way; ask another peer")
        usual_s = self._membership.config.probe_timeout_s
        timeout_s = asked.timeout_s if 0 < asked.timeout_s <= _MAX_PROBE_S else usual_s
        self._probing_for += 1
        try:
            sender = await self._exchange(asked.peer, address, timeout_s)
        finally:
            self._probing_for -= 1
        return pb.ProbeReply(alive=sender is not None).SerializeToString()

    # ---------------------------------------------------------------------------------- calling

    async def contact(self, address: str) -> str | None:
        """First contact. Returns what is wrong where another try may help.

        Raises:
            ManifestRefused: it runs something else.
            NotDialled: peers have said for a while that they cannot dial this one, nobody else has
                taken it in, and its run has not begun.
        """
        try:
            await self.join(address)
        except (TransportError, wire.WireError) as error:
            return str(error)
        except NotDialled as error:
            now = self._clock()
            self._undialled_since = self._undialled_since or now
            waits = self.me.phase in (Phase.STARTING, Phase.READY)
            if self.undialled and waits and now - self._undialled_since >= _DIALLED_WITHIN_S:
                raise
            return str(error)
        self._undialled_since = None
        return None

    async def join(self, address: str) -> None:
        """First contact with a peer. Raises ManifestRefused, NotDialled, Unreachable."""
        request = pb.JoinRequest(member=wire.member_to_message(self.me), manifest=self._packed)
        raw = await self._transport.call(
            address, "Control/Join", request.SerializeToString(), _JOIN_S
        )
        reply = wire.parse(pb.JoinReply, raw)
        if reply.undialled:
            raise NotDialled(
                f"{shown(reply.refusal, 300)}; open that port, or say with --advertise HOST:PORT "
                "where others reach this peer"
            )
        if reply.refusal:
            raise ManifestRefused(f"{address} refuses this run: {shown(reply.refusal, 200)}")
        members, refused = self.read_members(reply.members)
        self._warn(f"does not believe {address}: {reason}" for reason in refused)
        self.handle(Gossiped(members))

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

    async def _dial(self, peer: str, address: str) -> bool:
        """Whether the peer of this run answers there. Nothing is told or learned of members."""
        with suppress(TransportError, wire.WireError):
            request = self._message(GossipMessage())
            raw = await self._transport.call(address, "Control/Gossip", request, _DIAL_S)
            answer = wire.parse(pb.GossipMessage, raw)
            return bool(answer.run == self.run and answer.sender == peer)
        return False

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
                said, _ = self._read(answer)
                self._host.on_round_trip(sender, self._clock() - began)
                self._hear(sender, said)
                self._tell(sender, answer.refused)
        except (TransportError, wire.WireError):
            sender = None
        if sender != peer:
            self._news.failed(peer)
        return sender

    def _hear(self, sender: str, message: GossipMessage) -> None:
        self.handle(Gossiped(with_progress(message, sender, self.members), sender))
        self._news.heard(sender, message, self.members)

    def _message(self, message: GossipMessage, refused: Sequence[str] = ()) -> bytes:
        said = to_gossip_message(message, self.me.peer, self.run)
        said.refused.extend(refused)
        return said.SerializeToString()

    def read_members(self, messages: Sequence[pb.Member]) -> tuple[tuple[Member, ...], list[str]]:
        """Those that may be believed, and what is wrong with each of the others.

        Raises WireError: too many.
        """
        now_ms = self._now_ms()
        members: list[Member] = []
        refused: list[str] = []
        for message in wire.counted_members(messages):
            try:
                member = wire.member_from_message(message)
                problem = self.limits.problem(member, now_ms)
            except wire.WireError as error:
                problem = str(error)
            if problem is None:
                members.append(member)
            else:
                refused.append(f"member {shown(message.peer)}: {shown(problem, 160)}")
        self._host.on_refused(len(refused))
        return tuple(members), refused

    def _read(self, message: pb.GossipMessage) -> tuple[GossipMessage, list[str]]:
        """What may be believed of it, and what is wrong with the rest. Raises WireError."""
        wire.check_name(message.sender)
        members, refused = self.read_members(message.members)
        said = from_gossip_message(message, members)
        if said.progress is not None:
            heartbeat, step = said.progress.heartbeat, said.progress.step
            if problem := self.limits.progress_problem(heartbeat, step):
                self._host.on_refused(1)
                refused.append(f"progress of {message.sender}: {problem}")
                said = replace(said, progress=None)
        return said, refused

    def _tell(self, peer: str, refused: Sequence[str]) -> None:
        """Warns of what another does not believe."""
        self._warn(f"{peer} refuses {shown(reason, 200)}" for reason in refused[:_MAX_TOLD])

    def _warn(self, texts: Iterable[str]) -> None:
        """Once each, and not without end."""
        for text in texts:
            if text not in self._told and len(self._told) < _MAX_WARNINGS:
                self._told.add(text)
                self._host.log(new_event("warning", text=text))

    def _log_members(self) -> None:
        for member in self.others:
            health = member.health.name.lower()
            if self._logged.get(member.peer) != health:
                self._logged[member.peer] = health
                self._host.log(new_event("member", peer_changed=member.peer, health=health))
        if self.me.unreachable != self._unreachable:
            self._unreachable = self.me.unreachable
            self._host.log(new_event("unreachable", peers=list(self._unreachable)))


async def ask_to_dial(
    transport: Transport, asked: str, member: Member, manifest: bytes
) -> bool | None:
    """Whether the peer at `asked` cannot dial a member of its run; None when it does not say."""
    message = wire.member_to_message(member)
    request = pb.JoinRequest(member=message, manifest=manifest, dial_only=True)
    with suppress(TransportError, wire.WireError):
        raw = await transport.call(asked, "Control/Join", request.SerializeToString(), 2 * _DIAL_S)
        reply = wire.parse(pb.JoinReply, raw)
        return None if reply.refusal and not reply.undialled else reply.undialled
    return None


def undialable(theirs: str, mine: str) -> str | None:
    """Why the address that a newcomer advertises is none for this swarm, in which `mine` is one."""
    if ":" in theirs:
        try:
            split_address(theirs)
        except ValueError as error:
            return shown(str(error))
    if "/" in theirs:
        return f"{shown(theirs)} is no HOST:PORT"
    there, here = (address.rpartition(":")[0].strip("[]") for address in (theirs, mine))
    if is_wildcard(there):
        return f"nobody can dial {theirs}; say with --advertise at which HOST:PORT others reach you"
    if is_loopback(there) and not is_loopback(here):
        return (
            f"{theirs} is reachable from its own machine only, and this swarm is on several; "
            "listen on 0.0.0.0:7700 with --insecure"
        )
    if is_loopback(here) and not is_loopback(there):
        return (
            f"this swarm is on one machine only; listen on 127.0.0.1 too, or start the peer at "
            f"{mine} with --listen 0.0.0.0:7700 --insecure"
        )
    return None


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


def from_gossip_message(message: pb.GossipMessage, members: tuple[Member, ...]) -> GossipMessage:
    """The inverse, with those of its members that may be believed."""
    theirs = message.progress
    return GossipMessage(
        members=members,
        progress=MemberProgress(theirs.epoch, theirs.heartbeat, theirs.step)
        if message.HasField("progress")
        else None,
        number=message.number,
        acknowledged=message.acknowledged,
        reset=message.reset,
        full=message.full,
    )
