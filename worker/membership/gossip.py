"""Carries out membership over the transport: gossip, probes, leaving."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.addresses import check_name, split_relayed
from murmuration.protos.events import Warnings, new_event
from murmuration.protos.figures import shown
from murmuration.worker import wire
from murmuration.worker.exchange.view import View
from murmuration.worker.membership import Member, MemberLimits
from murmuration.worker.membership.dissemination import Dissemination, Said, with_progress
from murmuration.worker.membership.swim import Membership, Probe
from murmuration.worker.transport import Method, Stream, TransportError

if TYPE_CHECKING:
    from murmuration.worker.identity.gate import Expulsions
    from murmuration.worker.identity.words import SignedWords
    from murmuration.worker.node.node import Node

_LEAVE_S = 1.0
_MAX_PROBE_S = 10.0
_MOST_PROBES = 16  # for others at once
_MOST_MET = 4  # newcomers that are probed at once
_MAX_TOLD = 8  # refusals in one answer
_EXPELLED = "was expelled"  # as a peer says it whose calls are refused
_MAX_REFUSED = 64  # members of one message, before the rest is not read
_MOST_OF_ONE = 8  # words of one peer in a message, likewise: an honest sender has two
MOST_CERTIFICATES = 32  # in one message
MOST_REVOCATIONS = 100  # likewise


class GossipService:
    """One peer's membership, live. io thread only. Args: limits: of what is believed of a member;
    words, revoked: None where peers have no certificates: then nothing is signed."""

    def __init__(
        self,
        rules: Membership,
        run: int,
        limits: MemberLimits,
        node: "Node",
        words: "SignedWords | None" = None,
        revoked: "Expulsions | None" = None,
    ) -> None:
        self.rules, self._node, self._words = rules, node, words
        self.limits, self.warnings = limits, Warnings(node.log)
        self._probing_for = 0
        self._met_soon: frozenset[str] = frozenset()  # have been probed since they began
        self._revoked = revoked
        self._revoked_at: dict[str, int] = {}  # by peer, the hash of what it knows of
        self._lacked: dict[str, Sequence[str]] = {}  # by peer, whose certificates it asks for
        self._news = Dissemination(rules.me.peer, rules.config.full_s)
        self.run, self.address_of = run, rules.address
        self._transport, self._clock = node.transport, node.clock
        self._logged: dict[str, str] = {}
        self._unreachable: tuple[str, ...] = ()

    @property
    def me(self) -> Member:
        return self.rules.me

    @property
    def members(self) -> tuple[Member, ...]:
        return self.rules.members

    @property
    def others(self) -> list[Member]:
        return [member for member in self.members if member.peer != self.me.peer]

    @property
    def replicas(self) -> list[Member]:
        return [member for member in self.others if member.stage == self.me.stage]

    @property
    def view(self) -> View:
        """This peer and its replicas: whom its rounds are made with."""
        stage = self.me.stage
        members = {member.peer: member for member in self.members if member.stage == stage}
        contributors = self._node.held.contributors
        return View(members, self.rules.unmet, self.limits.steps, contributors=contributors)

    @property
    def swarm(self) -> View:
        return View({member.peer: member for member in self.members})

    @property
    def certificate(self) -> bytes:
        """This peer's, for somebody that does not know it yet; empty where peers have none."""
        return b"" if self._words is None else self._words.certificate

    def introductions(self) -> tuple[list[pb.Member], list[bytes]]:
        """As many members as one message takes, others each time, and certificates."""
        members = self._news.part(self.members)  # others each time
        names = [member.peer for member in members]
        certificates = [] if self._words is None else self._words.certificates_of(names)
        return [self.to_message(member) for member in members], certificates

    def open(self, peer: str, method: str) -> Stream:
        """Raises TransportError: no address is known."""
        if (address := self.address_of(peer)) is None:
            raise TransportError("no address known")
        return self._transport.open(address, method, peer)

    def suspect(self, peer: str) -> None:
        self._do(self.rules.suspect(peer))

    def round_ended(self, series: int | str, late: Sequence[str], silent: Iterable[str]) -> None:
        """Args: late: as `IdlePeers` takes them; silent: for whose answer it was given up."""
        before = {*self.me.idle, *self._node.context.quarantine.liars}  # they are told of already
        self.rules.round_ended(series, late, self._clock())
        self._do()
        for peer in set(silent).difference(self.me.unreachable):  # else it is the link's fault
            self.leave_out(peer)
        self._tell_idle(before, "says that it trains, and rounds have waited for it in vain")

    def _tell_idle(self, before: Collection[str], why: str) -> None:
        for peer in sorted({*self.me.idle}.difference(before)):
            text = f"{peer} {why}"
            if peer == self.me.peer:
                text = "rounds close before this peer has contributed: what it learns comes later"
            self.warnings.add(f"{text}: none waits for it for a while")

    def leave_out(self, peer: str) -> None:
        self.rules.waited_in_vain(peer, self._clock())
        self._do()

    def connect(self, peers: Iterable[str]) -> None:
        for peer in peers:
            if (address := self.address_of(peer)) is not None and address != self.me.address:
                self._transport.connect(address, peer)

    def tick(self) -> None:
        self._do(self.rules.tick(self._clock()))

    def update(self, **changes: Any) -> None:
        self.rules.update(**changes)
        self._carry_out()
        self._node.on_view(self.view)

    def expel(self, peer: str) -> None:
        self.rules.expel(peer)
        self._do()

    def hear(self, members: Iterable[Member], sender: str | None = None) -> None:
        before = self.me.idle
        self._carry_out(self.rules.hear(members, sender, self._clock()))
        self._tell_idle(before, "begins again, or takes its words back, again and again")
        self._meet()
        self._node.on_view(self.view)

    def _do(self, probes: Sequence[Probe] = ()) -> None:
        if self._carry_out(probes):
            self._node.on_view(self.view)

    def _carry_out(self, probes: Sequence[Probe] = ()) -> bool:
        """Returns whether the view has changed."""
        for probe in probes:
            self._node.spawn(self._ask_probe(probe) if probe.via else self._probe(probe))
        for peer in (liars := self._node.context.quarantine.liars) - self.rules.liars:
            self.rules.waited_in_vain(peer, self._clock())  # what it says so stands for a while
        self.rules.liars = liars
        if not self.rules.view_changed():
            return False
        for kept in (self._logged, self._revoked_at, self._lacked):
            for gone in kept.keys() - {member.peer for member in self.others}:
                kept.pop(gone)
        for member in self.others:
            health = member.health.name.lower()
            flips = health in ("alive", "left") and member.peer in self.me.idle  # told later
            if self._logged.get(member.peer) != health and not flips:
                self._logged[member.peer] = health
                self._node.log(new_event("member", peer_changed=member.peer, health=health))
        if self.me.unreachable != self._unreachable:
            self._unreachable = self.me.unreachable
            self._node.log(new_event("unreachable", peers=list(self._unreachable)))
        return True

    def _meet(self) -> None:
        """Probes peers that have just begun: they are in rounds once they have answered."""
        unmet = self.rules.unmet
        new = sorted(unmet - self._met_soon)[:_MOST_MET]
        self._met_soon = (self._met_soon & unmet).union(new)
        for peer in new:
            self.suspect(peer)

    async def on_gossip(self, request: bytes) -> bytes:
        """Takes a peer's news and gives ours; another run gets none."""
        asked = wire.parse(pb.GossipMessage, request)
        if asked.run != self.run:
            return self._message(((), pb.GossipMessage()))
        members, refused = self._read(asked)
        self._hear(asked.sender, (members, asked))
        answer = self._news.say(asked.sender, self.members, full=asked.full)
        return self._message(answer, asked.sender, refused[:_MAX_TOLD], asked.lacks)

    async def on_indirect_probe(self, request: bytes) -> bytes:
        """Probes a member at the address that is known here, a few at once. Raises WireError."""
        asked = wire.parse(pb.ProbeRequest, request)
        if (address := self.address_of(asked.peer)) is None:
            raise wire.WireError(f"{shown(asked.peer)} is not a member")
        if self._probing_for >= _MOST_PROBES:
            raise wire.WireError(f"{self._probing_for} probes are under way; ask another peer")
        in_range = 0 < asked.timeout_s <= _MAX_PROBE_S
        timeout_s = asked.timeout_s if in_range else self.rules.config.probe_timeout_s
        self._probing_for += 1
        try:
            sender = await self.exchange(asked.peer, address, timeout_s)
        finally:
            self._probing_for -= 1
        return pb.ProbeReply(alive=sender == asked.peer).SerializeToString()

    async def retire(self) -> None:
        """This peer is about to leave: none waits for it any more, and it reduces nothing."""
        if self.me.peer not in self.me.idle:
            self.leave_out(self.me.peer)
            await self._tell_all()

    async def leave(self) -> None:
        self._do(self.rules.leave())
        await self._tell_all()

    async def _tell_all(self) -> None:
        """Waits a moment at most, for gossip will do the rest."""
        told = (self.exchange(m.peer, m.address, _LEAVE_S) for m in self.others if m.live)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(*told)

    async def _probe(self, probe: Probe) -> None:
        timeout_s = self.rules.config.probe_timeout_s
        answered = await self.exchange(probe.peer, probe.address, timeout_s) == probe.peer
        self._do(self.rules.probed(probe.peer, self._clock(), answered=answered))

    async def _ask_probe(self, probe: Probe) -> None:
        timeout_s, alive = self.rules.config.probe_timeout_s, False
        asked = pb.ProbeRequest(peer=probe.peer, address=probe.address, timeout_s=timeout_s)
        there = next((m.peer for m in self.members if m.address == probe.via), None)
        with suppress(TransportError, wire.WireError):
            raw = await self._transport.call(
                probe.via, Method.INDIRECT_PROBE, asked.SerializeToString(), 2 * timeout_s, there
            )
            alive = wire.parse(pb.ProbeReply, raw).alive
        self.rules.probed_for(probe.peer, self._clock(), alive=alive)
        self._do()

    async def answers(self, peer: str, address: str, timeout_s: float) -> bool:
        """Tells whether the peer of this run answers there. No members are told or learned."""
        with suppress(TransportError, wire.WireError):
            request = self._message(((), pb.GossipMessage()))
            raw = await self._transport.call(address, Method.GOSSIP, request, timeout_s, peer)
            answer = wire.parse(pb.GossipMessage, raw)
            return bool(answer.run == self.run and answer.sender == peer)
        return False

    async def exchange(self, peer: str, address: str, timeout_s: float) -> str | None:
        """Push-pull with one peer. Returns the peer of this run that has answered: another may have
        the address by now. Args: timeout_s: of a direct call; twice that through a relay."""
        timeout_s *= 1 if split_relayed(address) is None else 2
        began = self._clock()
        said = self._news.request(peer, self.members, began)
        request = self._message(said, peer, lacked=self._lacked.pop(peer, ()))
        try:
            raw = await self._transport.call(address, Method.GOSSIP, request, timeout_s, peer)
            answer = wire.parse(pb.GossipMessage, raw)
            itself = answer.sender == peer or self._words is None
            sender = answer.sender if itself and answer.run == self.run else None
            if sender is not None:
                members, _ = self._read(answer)
                # A newcomer's certificate, say, that only this peer can give.
                if answer.lacks and self._words is not None:
                    self._lacked[sender] = answer.lacks[:MOST_CERTIFICATES]
                self._node.on_round_trip(sender, self._clock() - began)
                self._hear(sender, (members, answer))
                for reason in answer.refused[:_MAX_TOLD]:
                    self.warnings.add(f"{sender} refuses {shown(reason, 200)}", by=sender)
        except (TransportError, wire.WireError) as error:
            sender = None
            if _EXPELLED in str(error):
                self.warnings.add(f"{peer} says: {shown(str(error), 160)}", by=peer)
        if sender != peer:
            self._news.failed(peer)
        return sender

    def _hear(self, sender: str, came: Said) -> None:
        self.hear(with_progress(came, sender, self.members), sender)
        self._news.heard(sender, came, self.members)

    def _message(
        self,
        message: Said,
        peer: str | None = None,
        refused: Sequence[str] = (),
        lacked: Sequence[str] = (),
    ) -> bytes:
        told, said = message
        word = None if peer is None else self.rules.said_against(peer)  # for it to refute
        said.sender, said.run = self.me.peer, self.run
        said.members.extend(map(self.to_message, told if word is None else (*told, word)))
        said.refused.extend(refused)
        if self._words is not None:
            said.lacks.extend(self._words.lacking())
            said.certificates.extend(self._words.certificates_of(lacked))
        if self._revoked is not None and self._revoked.hash:
            said.revoked = self._revoked.hash
            if peer is not None and self._revoked_at.get(peer) != said.revoked:
                said.revocations.extend(self._revoked.part())
        return said.SerializeToString()

    def to_message(self, member: Member) -> pb.Member:
        if self._words is None:
            return wire.member_to_message(member)
        if member.peer == self.me.peer:
            member = self._words.signed(member)
        return wire.signed_member_to_message(member)

    def learn_revoked(self, entries: Iterable[pb.Revocation]) -> None:
        """Raises WireError: the run's authority has not signed one."""
        if self._revoked is not None:
            self._revoked.learn(entries)

    def read_hints(self, messages: Sequence[pb.Member]) -> list[Member]:
        """Peers to be called at their addresses; nothing else is believed. Raises WireError."""
        members = [wire.member_from_message(each) for each in wire.counted_members(messages)]
        return [member for member in members if self.limits.problem(member) is None]

    def read_members(
        self, messages: Sequence[pb.Member], certificates: Sequence[bytes] = ()
    ) -> tuple[tuple[Member, ...], list[str]]:
        """Those to believe, and what is wrong with the others. Raises WireError: too many."""
        members: list[Member] = []
        refused: list[str] = []
        messages = wire.counted_members(messages)
        if self._words is not None and certificates:
            messages = [*self._words.learn(certificates[:MOST_CERTIFICATES]), *messages]
        said, most = Counter[str](), 0
        for message in messages:
            if len(refused) >= _MAX_REFUSED or most > _MOST_OF_ONE:
                break  # whoever sends so many wants this peer to be busy
            try:
                if self._words is not None:
                    member = self._words.read(message, self.limits.problem)
                else:
                    member = wire.member_from_message(message)
                    if (wrong := self.limits.problem(member)) is not None:
                        raise wire.WireError(wrong)
                if member is not None:  # else its peer's certificate is not here yet
                    members.append(member)
                    said[member.peer] += 1
                    most = max(most, said[member.peer])
            except wire.WireError as error:
                refused.append(f"member {shown(_name(message))}: {shown(str(error), 160)}")
        self._node.on_refused(len(refused))
        return tuple(members), refused

    def _read(self, message: pb.GossipMessage) -> tuple[tuple[Member, ...], list[str]]:
        """As `read_members`; takes out a progress that cannot be. Raises WireError."""
        check_name(message.sender, wire.WireError)
        if self._revoked is not None:
            if len(message.revocations) > MOST_REVOCATIONS:
                raise wire.WireError(f"{len(message.revocations)} revocations in one message")
            self.learn_revoked(message.revocations)
            if self.address_of(message.sender) is not None:
                self._revoked_at[message.sender] = message.revoked
        members, refused = self.read_members(message.members, message.certificates)
        heartbeat, step = message.progress.heartbeat, message.progress.step
        if problem := self.limits.progress_problem(heartbeat, step):
            self._node.on_refused(1)
            refused.append(f"progress of {message.sender}: {problem}")
            message.ClearField("progress")
        return members, refused


def _name(message: pb.Member) -> str:
    with suppress(wire.WireError):
        return message.peer or wire.parse(pb.Member, message.signed).peer
    return ""
