"""Many rounds of small groups on one heap, without payloads: machines, and what goes wrong.

A `MeetingWorld` plays what surrounds the machines of a pair round in up to nine peers.
A stream carries the round and the group of who opened it. The other side admits it in that very
round and group, holds it while it has not come so far, answers it again from what it keeps of a
round that it has applied, and declines all else. The rounds are due at a common rhythm; a peer that
is still in an older one skips those due meanwhile. One seed gives one schedule.
"""

import math
import random

from tests.protocol.meeting_agenda import Agenda
from tests.protocol.meeting_faults import Cut, Fault, FaultPlan, Freeze, Kill, Seen, Thaw, Told
from tests.protocol.meeting_parts import (
    CONFIG,
    FAULTY_ROUNDS,
    INTERVALS_S,
    JITTER_S,
    KEPT_ROUNDS,
    LATENCY_S,
    ROUND_S,
    TICK_S,
    TRANSFER_S,
    Attendance,
    Faults,
    Message,
    SimPeer,
    Stream,
    Touch,
    Value,
    group_at,
    random_faults,
    seen,
)
from worker.exchange.pairwise import round as m
from worker.exchange.pairwise.round import PairRound
from worker.membership import Health

NOTICED_S = (0.05, 1.0)  # from the break of a stream to the end that hears of it

# By whom and at what place in the order: header, met, values, staged; met, values, staged.
MESSAGES = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2))


class MeetingWorld(Agenda):
    """One schedule. `play` runs it; `attendances` say how each round ended for each peer.

    Args:
        peers: how many, 2 to 9.
        size: of the groups.
        machine: what each peer runs, `PairRound` or a spoiled one.
    """

    def __init__(
        self, peers: int, size: int, seed: int, faults: Faults, machine: type[PairRound] = PairRound
    ) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.run, self.size, self.machine = seed % 2**32, size, machine
        self.attendances: list[Attendance] = []
        self.unheard: set[tuple[str, str, int]] = set()  # (from, to, round) of a lost `staged`
        self.cut_until: dict[frozenset[str], float] = {}
        self.interval_s = self.rng.choice(INTERVALS_S)
        names = "abcdefghi"[:peers]
        self._at_work = set(names)
        self.peers = {
            name: SimPeer(name, {each: seen(each, Health.ALIVE, 0) for each in names})
            for name in names
        }
        leads = random.Random(f"leads {seed}")  # of half of the peers none
        self.leads_s = {name: max(0.0, leads.uniform(-1, 1)) * CONFIG.patience_s for name in names}
        self.faults = faults
        plan = FaultPlan(faults, sorted(names), self.interval_s, self.rng)
        self.touches, self.late_s = plan.touches, plan.late_s
        for name, start in plan.joining.items():
            self._put_off(name, start)
        for time_s, fault in plan.timed:
            self.at(time_s, lambda f=fault: self._strike(f))
        self.first_quiet = math.ceil((plan.settled_at + ROUND_S + 1) / self.interval_s)
        self.last_round = self.first_quiet + 1

    def play(self) -> None:
        """Until everyone that lives is done. Raises AssertionError when that takes too long."""
        for peer in self.peers.values():
            self._come(peer)
        limit_s = self.last_round * self.interval_s + 4 * ROUND_S
        while self._at_work:
            act = self.next()
            assert self.now < limit_s, "the rounds never end"
            act()

    # --------------------------------------------------------------------------------- faults

    def _put_off(self, name: str, start: float) -> None:
        """A peer that nobody knows before `start`."""
        self.peers[name].next_round = math.ceil(start / self.interval_s)
        for observer in self.peers.keys() - {name}:
            del self.peers[observer].members[name]

    def _strike(self, fault: Fault) -> None:
        match fault:
            case Cut(link, end):
                self._cut(link, end)
            case Kill(name):
                self._kill(self.peers[name])
            case Freeze(name, end):
                self._freeze(self.peers[name], end)
            case Thaw(name):
                self._thaw(self.peers[name])
            case Seen(name):
                observer = self.peers[name]
                self._do(observer, lambda: self._see(observer, fault))
            case Told(name):
                observer = self.peers[name]
                self._do(observer, lambda: self._be_told(observer, fault))

    def _cut(self, link: frozenset[str], until: float) -> None:
        self.cut_until[link] = max(until, self.cut_until.get(link, 0.0))
        for stream in [s for name in link for s in self.peers[name].streams if s.link == link]:
            self._break(stream)

    def _kill(self, peer: SimPeer) -> None:
        peer.dead = True
        self._at_work.discard(peer.name)
        for stream in list(peer.streams):  # what it has sent may still arrive
            self.at(self.now + self.rng.choice((0.0, 0.5)), lambda s=stream: self._break(s))

    def _freeze(self, peer: SimPeer, until: float) -> None:
        peer.frozen = not peer.dead
        for stream in list(peer.streams):
            self._break_unless_back(stream, until)

    def _break_unless_back(self, stream: Stream, until: float) -> None:
        break_at = self.now + self.rng.uniform(0.5, 15.0)
        if break_at < until:
            self.at(break_at, lambda: self._break(stream))

    def _thaw(self, peer: SimPeer) -> None:
        """What has piled up, in order; the clock may be looked at before it or after it."""
        peer.frozen = False
        acts, peer.piled_up = peer.piled_up, []
        if self.rng.random() < 0.5 and not peer.dead:
            self._step(peer.current, m.RoundTick())
        for act in acts:
            self._do(peer, act)

    def _see(self, observer: SimPeer, fault: Seen) -> None:
        """Who is not known yet, or is dead in truth and known to be, stays that."""
        member, peer = observer.members.get(fault.peer), self.peers[fault.peer]
        known_dead = member is not None and not member.live
        unchanged = peer.dead and (known_dead or fault.health is Health.ALIVE)
        if unchanged or (member is None and not fault.new):
            return
        next_round = member.digests[0].version if member else peer.round
        observer.members[fault.peer] = seen(fault.peer, fault.health, next_round)
        self._viewed(observer)

    def _be_told(self, observer: SimPeer, fault: Told) -> None:
        observer.unreachable = observer.unreachable - {fault.link} | (
            {fault.link} if fault.unreachable else set()
        )
        self._viewed(observer)

    def _gossip(self, peer: SimPeer) -> None:
        """The others hear which round this peer will hold next."""
        others = [other for other in self.peers.values() if other is not peer]
        next_round = peer.next_round

        def tell() -> None:
            for other in others:
                self._do(other, lambda o=other: self._hear(o, peer.name, next_round))

        self.at(self.now + self.rng.uniform(0.05, 1.0), tell)

    def _hear(self, peer: SimPeer, other: str, next_round: int) -> None:
        member = peer.members.get(other)
        if member is not None and member.digests[0].version < next_round:
            peer.members[other] = seen(other, member.health, next_round)
            self._viewed(peer)

    def _viewed(self, peer: SimPeer) -> None:
        self._step(peer.current, m.ViewUpdated(peer.view))

    # ---------------------------------------------------------------------------- the train side

    def _come(self, peer: SimPeer) -> None:
        """The peer trains until its next round is due."""
        if peer.next_round > self.last_round:
            self._at_work.discard(peer.name)
            return
        late_s = self.late_s.get((peer.name, peer.next_round), 0.0)
        due = peer.next_round * self.interval_s + self.rng.uniform(0.0, JITTER_S) + late_s
        self.after(max(0.0, due - self.now), peer, lambda: self._begin(peer))

    def _begin(self, peer: SimPeer) -> None:
        view, round_ = peer.view, peer.next_round
        members = tuple(sorted(view.in_draw(0) | {peer.name}))
        peer.next_round += 1
        group = group_at(peer.name, self.run, round_, members, self.size, view.unreachable)
        value = Value(peer.name, round_, peer.version)
        machine = self.machine(
            peer.name,
            group,
            view,
            CONFIG,
            fragment=0,
            round_=round_,
            began_at=self.now,
            payload_bytes=0,
            lead_s=self.leads_s[peer.name],
        )
        part = Attendance(peer.name, round_, group, value, machine, self.now)
        part.values[peer.name] = value
        self.attendances.append(part)
        peer.current = part
        self._tick(peer, part)
        self._decide_held(peer)

    def _tick(self, peer: SimPeer, part: Attendance) -> None:
        self._step(part, m.RoundTick())
        if part.ended_at is None:
            self.after(TICK_S, peer, lambda: self._tick(peer, part))

    def _end(self, peer: SimPeer, part: Attendance) -> None:
        part.ended_at = self.now
        peer.current = None
        peer.next_round = max(part.round + 1, math.ceil(self.now / self.interval_s))
        self._gossip(peer)
        self._decide_held(peer)
        self._come(peer)

    # ------------------------------------------------------------------------------- the machine

    def _step(self, part: Attendance | None, event: m.Event) -> None:
        if part is None:
            return
        peer = self.peers[part.peer]
        for action in part.machine.step(event, self.now):
            match action:
                case m.Open(partner, attempt):
                    self._open(peer, part, self.peers[partner], attempt)
                case m.Stage():
                    part.staged_at = self.now
                    for partner in sorted({*part.group} - {peer.name}):
                        self._tell_staged(part, partner)
                case m.Succeeded():
                    self._apply(peer, part)
                case m.Failed(reason, waiting_for):
                    part.failed, part.waiting_for = reason, waiting_for
                    declined = Message(m.Declined(peer.name, reason))
                    for stream in list(part.streams):
                        self._send(stream, stream.side(peer.name), declined)
                    self._end(peer, part)

    def _apply(self, peer: SimPeer, part: Attendance) -> None:
        peer.applied.append(part.round)
        peer.version += 1
        peer.kept[part.round] = part
        peer.kept = {r: peer.kept[r] for r in sorted(peer.kept)[-KEPT_ROUNDS:]}
        if part.ended_at is None:
            self._end(peer, part)

    def _tell_staged(self, part: Attendance, partner: str) -> None:
        """On the streams that are open as far as this peer knows."""
        link = {part.peer, partner}
        streams = [s for s in part.streams if s.link == link and not s.closed[s.side(part.peer)]]
        for stream in streams:
            self._send(stream, stream.side(part.peer), Message(m.PartnerStaged(part.peer)))
        if not streams:
            self.unheard.add((part.peer, partner, part.round))

    # ------------------------------------------------------------------------------- the streams

    def _open(self, peer: SimPeer, part: Attendance, other: SimPeer, attempt: int) -> None:
        faulty = self.now < FAULTY_ROUNDS * self.interval_s
        breaks = faulty and self.rng.random() < self.faults.breaks
        break_at = self.rng.choice(MESSAGES) if breaks else None
        stream = Stream((peer, other), part.round, part.group, attempt, [part, None], break_at)
        part.streams.append(stream)
        peer.streams.append(stream)
        other.streams.append(stream)
        if other.dead or self.cut_until.get(stream.link, 0.0) > self.now:
            self._break(stream)
            return
        if other.frozen:
            self._break_unless_back(stream, math.inf)
        self._send(stream, 0, Message())
        self._contribute(stream, 0, part)

    def _contribute(self, stream: Stream, side: int, part: Attendance) -> None:
        self._send(stream, side, Message(m.Met(part.peer)))
        self._send(stream, side, Message(m.Received(part.peer), part.value))
        if part.staged_at is not None:
            self._send(stream, side, Message(m.PartnerStaged(part.peer)))

    def _send(self, stream: Stream, side: int, message: Message) -> None:
        index = stream.sent[side]
        stream.sent[side] += 1
        if stream.up and stream.break_at == (side, index):
            self.touches.append(Touch("break", stream.link, self.now, self.now + 1))
            self._break(stream)
        if not stream.up:
            self._lose(stream, side, message)
            return
        delay_s = self.rng.uniform(*TRANSFER_S if message.value else LATENCY_S)
        stream.last_at[side] = max(stream.last_at[side], self.now + delay_s)
        self.at(stream.last_at[side], lambda: self._deliver(stream, side, message))

    def _lose(self, stream: Stream, side: int, message: Message) -> None:
        if isinstance(message.event, m.PartnerStaged):
            self.unheard.add((stream.ends[side].name, stream.ends[1 - side].name, stream.round))

    def _deliver(self, stream: Stream, side: int, message: Message) -> None:
        if stream.up:
            self._do(stream.ends[1 - side], lambda: self._receive(stream, 1 - side, message))
        else:
            self._lose(stream, side, message)

    def _break(self, stream: Stream) -> None:
        if stream.up:
            stream.up = False
            for side, peer in enumerate(stream.ends):
                peer.streams.remove(stream)
                delay_s = self.rng.uniform(*NOTICED_S)
                self.after(delay_s, peer, lambda s=side: self._notice(stream, s))

    def _notice(self, stream: Stream, side: int) -> None:
        """The break has come to one of the ends."""
        peer, other, part = stream.ends[side], stream.ends[1 - side], stream.parts[side]
        stream.closed[side] = True
        if stream.held and side == 1:
            stream.held = False
            peer.held.remove(stream)
        if part is not None:
            attempt = stream.attempt if side == 0 else 0
            self._step(part, m.Broken(other.name, attempt, f"{other.name}: the stream broke"))
            if side == 0 and part.succeeded:
                self.after(CONFIG.retry_s, peer, lambda: self._call_again(stream, part))

    def _call_again(self, stream: Stream, part: Attendance) -> None:
        """Who has applied a round calls until the partner that it called knows it as well."""
        peer, other = stream.ends
        if part.round not in peer.kept:
            return
        if peer.view.live(other.name):
            self._open(peer, part, other, stream.attempt)
        else:
            self.after(CONFIG.retry_s, peer, lambda: self._call_again(stream, part))

    def _receive(self, stream: Stream, side: int, message: Message) -> None:
        part = stream.parts[side]
        if stream.closed[side]:
            self._lose(stream, 1 - side, message)
        elif message.event is None:
            self._decide(stream.ends[1], stream)
        elif stream.held and side == 1:
            stream.stash.append(message)
        elif part is not None:
            if message.value is not None:
                part.values[stream.ends[1 - side].name] = message.value
            self._step(part, message.event)

    # ------------------------------------------------------------------- the side that was called

    def admits(self, part: Attendance, stream: Stream) -> bool:
        """Whether the stream is of this very round."""
        return part.round == stream.round and part.group == stream.group

    def _decide_held(self, peer: SimPeer) -> None:
        held, peer.held = peer.held, []
        for stream in held:
            stream.held = False
            self._decide(peer, stream)
            stash, stream.stash = stream.stash, []
            for message in stash:
                self._receive(stream, 1, message)

    def _decide(self, peer: SimPeer, stream: Stream) -> None:
        if (part := peer.current) is not None and self.admits(part, stream):
            self._step(part, m.Heard(stream.ends[0].name))  # before it says anything
        part, kept = peer.current, peer.kept.get(stream.round)
        if part is not None and self.admits(part, stream):
            stream.parts[1] = part
            part.streams.append(stream)
            self._contribute(stream, 1, part)
        elif kept is not None and kept.group == stream.group:
            self._contribute(stream, 1, kept)
        elif stream.round >= peer.next_round and (part is None or part.round < stream.round):
            stream.held = True
            peer.held.append(stream)
        else:
            self._send(stream, 1, Message(m.Declined(peer.name, "over, or of another group")))


def random_world(seed: int, machine: type[PairRound] = PairRound) -> MeetingWorld:
    """2 to 9 peers, groups of 2 to 4, and faults of all kinds."""
    return MeetingWorld(2 + seed % 8, 2 + seed // 8 % 3, seed, random_faults(seed), machine)
