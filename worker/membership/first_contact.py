"""First contact, both sides of it: what is asked before a peer is a member, and what is answered.

A peer of another run is refused. One that this swarm cannot dial is refused too: it is dialled
back, by two where there are two, since nobody's rounds may wait for a peer that none can reach. It
asks the one that has refused it to be its relay, and comes again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from protos import murmuration_pb2 as pb
from protos.addresses import (
    caller_host,
    is_loopback,
    is_wildcard,
    split_address,
    split_relayed,
)
from protos.identity import IdentityError
from protos.manifest import first_difference
from protos.reach import CHECK_ADDRESS, GIVE_TOKEN, is_encrypted_run
from protos.text import shown
from worker import wire
from worker.config import Config
from worker.errors import ManifestRefused, NotDialled, PeersUnreachable
from worker.manifest import PROTOCOL, Manifest
from worker.membership import Gossiped, Health, Member, Phase
from worker.membership.io import GossipService
from worker.transport import Caller, Security, Transport, TransportError, Untrusted
from worker.transport.grpc import GrpcTransport

_JOIN_S = 6.0  # both peers that dial back may need their time
_DIAL_S = 2.0
_DIALS = 8  # at once: a peer that asks to be dialled is a stranger
_DIALLED_WITHIN_S = 3.0  # with what it takes to begin, a joiner is told within ten
_TRY_S = 3.0
_GLANCE_S = 2.0
_PAUSE_S = 0.25
_SKEW_S = 60.0
_TURNED_AWAY = 3  # times in a row: it is there, and wants another certificate or none


class FirstContact:
    """Takes newcomers in, and asks to be taken in. I/O thread only.

    Args:
        gossip: of this peer; the newcomers become its members.
        manifest: of the run; a peer with another is refused.
        clock: monotonic seconds.
        relay: asks the peer at an address to relay this one, and says whether it does; None: this
            one may not be relayed.

    Attributes:
        introduced: whether a coordinator answers, which will name peers as they come.
    """

    introduced = False

    def __init__(
        self,
        gossip: GossipService,
        manifest: Manifest,
        transport: Transport,
        clock: Callable[[], float],
        relay: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        self.gossip, self._manifest, self._packed = gossip, manifest, manifest.pack()
        self._transport, self._clock, self._relay = transport, clock, relay
        self._dialling = asyncio.Semaphore(_DIALS)
        self._seconds_asked = 0
        self._undialled_since: float | None = None

    @property
    def undialled(self) -> bool:
        """Whether peers have refused to take this one in, since they cannot dial it, and nobody
        has taken it in."""
        alone = not any(member.live for member in self.gossip.others)
        return alone and self._undialled_since is not None

    async def serve(self, request: bytes, caller: Caller) -> bytes:
        """First contact: refuses another run, tells a peer without a manifest what the run is."""
        join = wire.parse(pb.JoinRequest, request)
        if not join.manifest:
            return pb.JoinReply(
                manifest=self._packed,
                seen_from=caller_host(caller.address),
                time_ms=time.time_ns() // 1_000_000,
            ).SerializeToString()
        theirs = Manifest.unpack(join.manifest)
        if theirs.run != self.gossip.run:
            difference = first_difference(theirs.agreed, self._manifest.agreed)
            refusal = f"the manifests differ in {difference}"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        member, refusal = self._newcomer(join)
        if member is None:
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        if member.peer == self.gossip.me.peer and member.address != self.gossip.me.address:
            refusal = f"its own name is {member.peer!r} too; choose another with --name"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        if (unfit := undialable(member.address, self.gossip.me.address)) is not None:
            return pb.JoinReply(refusal=unfit, manifest=self._packed).SerializeToString()
        if (address := await self._name_taken_at(member)) is not None:
            refusal = f"{member.peer!r} lives at {address}; choose another name with --name"
            return pb.JoinReply(refusal=refusal, manifest=self._packed).SerializeToString()
        unreached = await self._dial_back(member, alone=join.dial_only)
        if unreached is not None:
            seen_from = caller_host(caller.address)
            seen = f" (calls come from {seen_from})" if seen_from else ""
            refusal = f"{unreached} at {member.address}, which it advertises{seen}"
            reply = pb.JoinReply(refusal=refusal, undialled=True, manifest=self._packed)
            return reply.SerializeToString()
        if join.dial_only:
            return pb.JoinReply().SerializeToString()
        self.gossip.handle(Gossiped((member,)))
        known, certificates = self.gossip.introductions()
        return pb.JoinReply(members=known, certificates=certificates).SerializeToString()

    def _newcomer(self, join: pb.JoinRequest) -> tuple[Member | None, str]:
        """The one that asks, or is to be dialled; or why it is none. Raises WireError."""
        if join.dial_only:
            hints = self.gossip.read_hints([join.member])
            return (hints[0], "") if hints else (None, "it cannot be a member")
        certificates = [join.certificate] if join.certificate else []
        members, refused = self.gossip.read_members([join.member], certificates)
        for member in members:
            if member.peer == join.member.peer:
                return member, ""
        return None, refused[0] if refused else "its certificate is missing, or not of this run"

    async def _name_taken_at(self, member: Member) -> str | None:
        """Where another process answers by the newcomer's name; a former life of it does not."""
        known = next((each for each in self.gossip.others if each.peer == member.peer), None)
        if known is None or not known.live or known.address == member.address:
            return None
        moved = known.epoch == member.epoch and split_relayed(member.address) is not None
        if moved:  # this process, which has another relay now
            return None
        timeout_s = self.gossip.probe_timeout_s
        sender = await self.gossip.exchange(known.peer, known.address, timeout_s)
        return known.address if sender == member.peer else None

    async def _dial_back(self, member: Member, *, alone: bool) -> str | None:
        """The peer that cannot dial a newcomer: this one, or, unless it is to answer alone, another
        that it asks. None when the newcomer may become a member: no round would wait for a peer
        that cannot be reached."""
        if any(
            (known.epoch, known.address) == (member.epoch, member.address) and known.live
            for known in self.gossip.others
            if known.peer == member.peer
        ):
            return None
        async with self._dialling:
            second = None if alone else asyncio.ensure_future(self._second_dial(member))
            if not await self.gossip.answers(member.peer, member.address, _DIAL_S):
                if second is not None:
                    second.cancel()
                return f"{self.gossip.me.peer} does not reach {member.peer}"
            return None if second is None else await second

    async def _second_dial(self, member: Member) -> str | None:
        """As `_dial_back`, by another peer, if there is one; another one at each try."""
        able = [
            other
            for other in self.gossip.others
            if other.health is Health.ALIVE
            and other.peer not in (member.peer, *self.gossip.me.unreachable)
            and other.address != member.address
        ]
        if not able:
            return None
        self._seconds_asked += 1
        other = able[self._seconds_asked % len(able)]
        undialled = await ask_to_dial(self._transport, other.address, member, self._packed)
        return f"{other.peer} does not reach {member.peer}" if undialled else None

    async def contact(self, address: str) -> str | None:
        """First contact. Returns what is wrong where another try may help.

        Raises:
            ManifestRefused: it runs something else.
            NotDialled: peers have said for a while that they cannot dial this one, nobody else has
                taken it in, and its run has not begun.
        """
        try:
            try:
                await self.join(address)
            except NotDialled:
                if self._relay is None or not await self._relay(address):
                    raise
                await self.join(address)
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

    async def join(self, address: str) -> None:
        """First contact with a peer. Raises ManifestRefused, NotDialled, Unreachable."""
        member, certificate = self.gossip.introduction()
        member.peer = self.gossip.me.peer
        request = pb.JoinRequest(
            member=member, manifest=self._packed, certificate=b"".join(certificate)
        )
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
        members, refused = self.gossip.read_members(reply.members, reply.certificates)
        for reason in refused:
            self.gossip.warnings.add(f"does not believe {address}: {reason}")
        self.gossip.handle(Gossiped(members))


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
    if (through := split_relayed(theirs)) is not None:
        problems = (undialable(relay, mine) for relay in through[1])
        return next((problem for problem in problems if problem), None)
    if (through := split_relayed(mine)) is not None:
        return undialable(theirs, through[1][0])
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
            "listen on 0.0.0.0:7700"
        )
    if is_loopback(here) and not is_loopback(there):
        return (
            f"this swarm is on one machine only; listen on 127.0.0.1 too, or start the peer at "
            f"{mine} with --listen 0.0.0.0:7700"
        )
    return None


@dataclass(frozen=True)
class FirstAnswer:
    """What a peer or a coordinator says before this process knows anything of the run.

    Args:
        coordinated: whether it is a coordinator.
        seen_from: the host that it has seen this process at; empty where it does not say.
        ahead_s: by how much the clock here is ahead of its own; None where it does not say.
    """

    manifest: Manifest
    coordinated: bool
    seen_from: str
    ahead_s: float | None


def fetch_manifest(
    address: str, timeout_s: float, proxy: str | None = None, security: Security | None = None
) -> FirstAnswer:
    """Asks a peer or a coordinator what its run is.

    Raises:
        PeersUnreachable: no answer within `timeout_s`; says what was tried.
        IdentityError: the run is encrypted and there is no certificate, or the other way round, or
            it is of another run.
    """
    transport = GrpcTransport("127.0.0.1:0", proxy, security)
    looks = security is None and proxy is None
    return asyncio.run(_fetch_manifest(transport, address, timeout_s, looks))


def check_run(
    addresses: Sequence[str],
    config: Config,
    proxy: str | None = None,
    security: Security | None = None,
) -> str:
    """Asks those that answer at once whether they run what `config` says, before a model is built.

    Returns:
        The host that the first of `addresses` has seen this process at; empty where it has not.

    Raises:
        ManifestRefused: one runs something else, names the first difference; or another version.
        IdentityError: one is of an encrypted run, and there is no certificate.
    """
    transport = GrpcTransport("127.0.0.1:0", proxy, security)
    looks = security is None and proxy is None
    answers = asyncio.run(_first_answers(transport, addresses, looks))
    mine = Manifest.of(config, ()).agreed
    for address, answer in answers.items():
        check_version(answer.manifest, address)
        theirs = {**answer.manifest.agreed, "tensors": mine["tensors"]}  # known with the model
        if difference := first_difference(mine, theirs):
            raise ManifestRefused(
                f"{address} runs something else: {difference}; leave it out, or join another run"
            )
    first = answers.get(addresses[0]) if addresses else None
    return first.seen_from if first else ""


def check_version(manifest: Manifest, address: str) -> None:
    """Raises ManifestRefused: the peer there speaks another protocol."""
    theirs = manifest.document["protocol"]
    if theirs != PROTOCOL:
        raise ManifestRefused(
            f"{address} speaks protocol {theirs}, and this version speaks {PROTOCOL}; install the "
            "version that they run"
        )


def clock_warning(answer: "FirstAnswer", address: str) -> str | None:
    """What is to be said where the clocks here and there are more than a minute apart."""
    if answer.ahead_s is None or abs(answer.ahead_s) <= _SKEW_S:
        return None
    side = "ahead of" if answer.ahead_s > 0 else "behind"
    return (
        f"the clock here is {abs(answer.ahead_s):.0f} s {side} that of {address}; set it, by NTP: "
        "training goes on, but certificates and tokens may not be taken, and logs do not fit"
    )


async def _first_answers(
    transport: Transport, addresses: Sequence[str], looks: bool
) -> dict[str, FirstAnswer]:
    """By address, of those that answer one call. Closes the transport. Raises IdentityError."""

    async def ask(address: str) -> FirstAnswer | None:
        with suppress(TransportError, wire.WireError):
            try:
                return await _ask_run(transport, address, _GLANCE_S)
            except Untrusted:
                if looks:
                    await _check_encrypted(address)
        return None

    try:
        answers = await asyncio.gather(*map(ask, addresses))
    finally:
        await transport.close()
    found = zip(addresses, answers, strict=True)
    return {address: answer for address, answer in found if answer is not None}


async def _ask_run(transport: Transport, address: str, timeout_s: float) -> FirstAnswer:
    """Raises TransportError, WireError."""
    request = pb.JoinRequest().SerializeToString()
    raw = await transport.call(address, "Control/Join", request, timeout_s)
    reply = wire.parse(pb.JoinReply, raw)
    manifest = Manifest.unpack(reply.manifest)
    ahead_s = time.time() - reply.time_ms / 1000 if reply.time_ms else None
    return FirstAnswer(manifest, reply.coordinator, reply.seen_from, ahead_s)


async def _check_encrypted(address: str) -> None:
    """Raises IdentityError: a member of an encrypted run answers there."""
    if await asyncio.to_thread(is_encrypted_run, address):
        raise IdentityError(f"{address}: {GIVE_TOKEN}")


async def _fetch_manifest(
    transport: Transport, address: str, timeout_s: float, looks: bool
) -> FirstAnswer:
    """Args: looks: whether to find out that the run is encrypted, where it seems so."""
    began = time.monotonic()
    tries, turned_away, problem = 0, 0, ""
    try:
        while (left_s := began + timeout_s - time.monotonic()) > 0 and turned_away < _TURNED_AWAY:
            tries += 1
            try:
                return await _ask_run(transport, address, min(_TRY_S, left_s))
            except (TransportError, wire.WireError) as error:
                problem = str(error)
                if not isinstance(error, Untrusted):
                    turned_away = 0
                else:
                    turned_away += 1
                    if looks:
                        await _check_encrypted(address)
                    if turned_away == _TURNED_AWAY and not error.closed:
                        raise IdentityError(f"not let in: {problem}") from error
            await asyncio.sleep(_PAUSE_S)
    finally:
        await transport.close()
    tried_s = time.monotonic() - began
    raise PeersUnreachable(
        f"no peer answers at {address}: {tries} tries in {tried_s:.1f} s, the last: {problem}; "
        f"{CHECK_ADDRESS}"
    )
