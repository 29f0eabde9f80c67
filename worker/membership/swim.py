"""Membership as pure rules: what happens is a method, which returns whom to probe.

Every `gossip_s` a peer exchanges news of members with others (push-pull, `dissemination`); the
answer is evidence of life. A peer that does not answer is probed through others. If they fail as
well it is suspected, and declared dead after `suspicion_s` unless it answers, or refutes by raising
its incarnation. A suspicion is enough to route around a peer; only a death removes it from a group.

Ref: SWIM (Das et al. 2002) and Lifeguard (arXiv:1707.00788). Differences: each peer probes all
others within about `probe_s` where there are few; messages are acknowledged; own starvation shifts
all timers; rumours of an end are looked into (`evidence`).
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from murmuration.worker.membership import MAX_UNREACHABLE, Health, Member, newest
from murmuration.worker.membership.evidence import IdlePeers, Reachability, Suspicions

MAX_MEMBERS = 4096
_MAX_JUMP = 1000
_PROBE_ALL_OF = 12
_PROBE_OF_MORE = 8
_MOST_PROBES = 32  # under way, before accused peers have to wait for theirs


@dataclass(frozen=True)
class Probe:
    """Exchange news: `hear` the answer, then `probed`. `via` another: then `probed_for`."""

    peer: str
    address: str
    via: str = ""


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """Timing of the failure detector.

    A crash is noticed after about gossip_s + 2 probe_timeout_s + suspicion. The suspicion is
    suspicion_factor * max(1, log10(peers)) * probe_s where one peer alone has it, and goes down to
    suspicion_factor * probe_s where four have."""

    gossip_s: float = 0.25  # between two exchanges with a random peer
    full_s: float = 30.0  # between two of all that is known, more in swarms above 32
    probe_s: float = 1.0  # the longest that a live peer goes without being probed, roughly
    probe_timeout_s: float = 1.0  # for a direct probe, and again for the indirect ones
    indirect_probes: int = 3  # peers asked to probe in our place
    suspicion_factor: float = 5.0
    reconnect_s: float = 5.0  # between two tries to reach a peer that is gone or out of reach

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "indirect_probes" and value <= 0:
                raise ValueError(f"{field.name} is {value}; it must be above 0")
        if self.indirect_probes < 0:
            raise ValueError(f"indirect_probes is {self.indirect_probes}; it must be at least 0")

    def suspicion_s(self, peers: int) -> float:
        """How long a peer has to refute, that one other suspects."""
        return self.least_suspicion_s * max(1.0, math.log10(max(1, peers)))

    @property
    def least_suspicion_s(self) -> float:
        return self.suspicion_factor * self.probe_s

    def detection_s(self, peers: int) -> float:
        """At most, about, from a crash to the peer being declared dead."""
        return self.probe_s + 2 * self.probe_timeout_s + self.suspicion_s(peers)


class Membership:
    """One peer's knowledge of the swarm. Args: rng: chooses the peers to gossip with; seeded."""

    def __init__(self, me: Member, config: MembershipConfig, rng: random.Random) -> None:
        self.config, self._rng = config, rng
        self._me = me.peer
        self._members: dict[str, Member] = {me.peer: me}
        self._probing: set[str] = set()
        self._asking: dict[str, int] = {}
        self._asked_at: dict[str, float] = {}
        self._reach = Reachability(2 * config.probe_timeout_s)
        self._idle = IdlePeers(me.peer)
        self.liars: frozenset[str] = frozenset()
        self._suspicions = Suspicions(config.probe_s)
        self._cases = self._suspicions.cases
        self._expelled: set[str] = set()
        self._proven: dict[str, int] = {}  # who has answered this peer, by its start
        self._forgettable: dict[str, None] = {}  # that have ended, and never answered it
        self._ticked_at: float | None = None
        self._gossip_at = self._reconnect_at = -math.inf
        self._order: list[str] = []
        self._sorted: tuple[Member, ...] | None = None
        self._outline_changed = False

    @property
    def me(self) -> Member:
        return self._members[self._me]

    @property
    def members(self) -> tuple[Member, ...]:
        if self._sorted is None:
            self._sorted = tuple(self._members[peer] for peer in sorted(self._members))
        return self._sorted

    @property
    def unmet(self) -> frozenset[str]:
        """The live peers that nobody has seen to answer since they began: they may not exist."""
        live = (member for member in self._others() if member.live)
        return frozenset(m.peer for m in live if self._proven.get(m.peer) != m.start_ms)

    def address(self, peer: str) -> str | None:
        member = self._members.get(peer)
        return member.address if member else None

    def said_against(self, peer: str) -> Member | None:
        """The peer as a suspect, where others alone speak of its end, for it to refute."""
        member = self._members.get(peer)
        heard = member is not None and member.health is Health.ALIVE and peer in self._cases
        return replace(member, health=Health.SUSPECT) if member and heard else None

    def accusers(self, peer: str) -> dict[str, int]:
        """Who has said of the peer that it has ended, and how often; of a live peer it is wrong."""
        return dict(self._suspicions.words.get(peer, ()))

    def tick(self, now: float) -> list[Probe]:
        """Called a few times per `gossip_s`. Args: now: monotonic seconds, here and below."""
        config = self.config
        asleep_s = 0.0 if self._ticked_at is None else now - self._ticked_at - config.gossip_s
        for case in self._cases.values() if asleep_s > 0 else ():
            case.since += asleep_s  # this process was starved or frozen, and could hear nobody
        self._ticked_at = now
        self._idle.tick(now)
        most_s = config.suspicion_s(len(self._members))
        for peer in self._suspicions.end_due(now, config.least_suspicion_s, most_s):
            self._suspicions.words.pop(peer, None)  # they were true
            self._put(replace(self._members[peer], health=Health.DEAD))
        actions: list[Probe] = []
        if now >= self._gossip_at:
            self._gossip_at = now + config.gossip_s
            actions += self._probe([*self._reach.in_question, *self._next_targets()])
            actions += self._look_into(peer for peer, c in self._cases.items() if not c.ended)
        if now >= self._reconnect_at:
            self._reconnect_at = now + config.reconnect_s
            ended = (member.peer for member in self._others() if not member.live)
            gone = [peer for peer in ended if peer not in self._expelled]
            chosen = self._rng.sample(gone, min(1, len(gone)))
            actions += self._probe([*chosen, *self.me.unreachable])
        return actions

    def hear(self, members: Iterable[Member], sender: str | None, now: float) -> list[Probe]:
        """Members arrived with gossip or a join, from `sender` if that is known."""
        actions = self._merge(members, sender, now)
        if sender is not None and (case := self._cases.get(sender)) is not None:
            # It speaks, and its refutation takes another message: its time starts again.
            case.since = now
        return actions

    def probed(self, peer: str, now: float, *, answered: bool) -> list[Probe]:
        self._probing.discard(peer)
        if answered:
            self._reach.answered(peer, now)
            self._lives(peer, now)
        member = self._members.get(peer)
        if answered or member is None or not member.live or peer in self._asking:
            return []
        alive = (other for other in self._others() if other.health is Health.ALIVE)
        helpers = [other for other in alive if other.peer != peer]
        chosen = self._rng.sample(helpers, min(self.config.indirect_probes, len(helpers)))
        self._asking[peer], self._asked_at[peer] = len(chosen), now
        # Where there is nobody else to ask this peer tries once more itself.
        return [Probe(peer, member.address, helper.address) for helper in chosen or [self.me]]

    def probed_for(self, peer: str, now: float, *, alive: bool) -> None:
        """A `Probe` by another has ended; not `alive` too when the asked peer did not answer."""
        if peer not in self._asking:
            return
        if alive:
            # By another peer, not by this one's second try; and where that took longer than a probe
            # of one's own may, the fault is this peer's link.
            swift = now - self._asked_at[peer] <= self.config.probe_timeout_s
            if self._asking.pop(peer) > 0 and swift:
                self._reach.missed(peer, 1, now)
            self._lives(peer, now)
            return
        self._asking[peer] -= 1
        if self._asking[peer] > 0:
            return
        del self._asking[peer]
        member = self._members[peer]
        if member.live:
            case = self._suspicions.accuse(peer, _life(member), self._me, now)
            case.failed = True
            self._put(replace(member, health=Health.LEFT if case.left else Health.SUSPECT))
            if case.left:
                del self._cases[peer]

    def suspect(self, peer: str) -> list[Probe]:
        member = self._members.get(peer)
        return self._probe([peer]) if member and member.live else []

    def waited_in_vain(self, peer: str, now: float) -> None:
        if (member := self._members.get(peer)) and member.live:
            self._idle.waited_for(peer, now)

    def round_ended(self, series: int | str, late: Sequence[str], now: float) -> None:
        known = [p for p in late if (m := self._members.get(p)) and m.health is not Health.DEAD]
        self._idle.round_ended(series, known, now)

    def update(self, **changes: Any) -> None:
        self._put(replace(self.me, **changes, heartbeat=self.me.heartbeat + 1))

    def expel(self, peer: str) -> None:
        self._expelled.add(peer)
        if member := self._members.get(peer):
            self._cases.pop(peer, None)
            self._put(replace(member, health=Health.LEFT))

    def leave(self) -> list[Probe]:
        self._put(replace(self.me, health=Health.LEFT))
        return self._probe([member.peer for member in self._others() if member.live])

    def view_changed(self) -> bool:
        """Tells whether peers, or fields of their `_gist`, are others than at the last call."""
        idle = tuple(sorted({*self._idle.peers, *self.liars}))[:MAX_UNREACHABLE]
        unreachable = self._reach.unreachable
        if (unreachable, idle) != (self.me.unreachable, self.me.idle):
            self.update(unreachable=unreachable, idle=idle)
        changed, self._outline_changed = self._outline_changed, False
        return changed

    def _others(self) -> Iterable[Member]:
        return (member for member in self.members if member.peer != self._me)

    def _put(self, member: Member) -> None:
        known = self._members.get(member.peer)
        if known is not member:
            self._members[member.peer], self._sorted = member, None
        if known is None or _gist(known) != _gist(member):
            self._outline_changed = True
        if not member.live:  # a word stands, whatever else it says of itself
            self._reach.links.pop(member.peer, None)
            if known is not None and known.live:
                self._idle.gone(member.peer)
        if member.live or member.peer in self._proven:
            self._forgettable.pop(member.peer, None)
        else:
            self._forgettable[member.peer] = None

    def _has_room(self) -> bool:
        """One that has ended gives way where need be, best one that has never answered here."""
        if len(self._members) < MAX_MEMBERS:
            return True
        ended = (*self._forgettable, *(m.peer for m in self._others() if not m.live))
        idle = (p for p in ended if p not in self._probing and p not in self._asking)
        if (peer := next(idle, None)) is None:
            return False
        told = self._suspicions
        for of in (told.cases, told.words, told.answered_at, self._forgettable, self._proven):
            of.pop(peer, None)
        del self._members[peer]
        self._sorted, self._outline_changed = None, True
        return True

    def _next_targets(self) -> list[str]:
        """Round robin over a shuffled list: all in each `probe_s`, of many `_PROBE_OF_MORE`."""
        live = [member.peer for member in self._others() if member.live]
        reached = len(live) if len(live) <= _PROBE_ALL_OF else _PROBE_OF_MORE
        count = math.ceil(reached * min(1.0, self.config.gossip_s / self.config.probe_s))
        targets: list[str] = []
        while live and len(targets) < count:
            if not self._order:
                self._order = self._rng.sample(live, len(live))
            peer = self._order.pop()
            if peer in live and peer not in targets:
                targets.append(peer)
        return targets

    def _probe(self, peers: list[str]) -> list[Probe]:
        known = (peer for peer in dict.fromkeys(peers) if peer in self._members)
        probed = [peer for peer in known if peer not in self._probing and peer != self._me]
        self._probing.update(probed)
        return [Probe(peer, self._members[peer].address) for peer in probed]

    def _look_into(self, accused: Iterable[str]) -> list[Probe]:
        room = max(0, _MOST_PROBES - len(self._probing))
        return self._probe([peer for peer in accused if peer not in self._asking][:room])

    def _lives(self, peer: str, now: float) -> None:
        self._suspicions.answered(peer, now)
        if member := self._members.get(peer):
            self._proven[peer] = member.start_ms
            if member.health is Health.SUSPECT:
                self._put(replace(member, health=Health.ALIVE))

    def _merge(self, members: Iterable[Member], sender: str | None, now: float) -> list[Probe]:
        accused: list[str] = []
        for heard in members:
            peer = heard.peer
            if peer == self._me:
                self._defend(heard)
                continue
            if peer in self._expelled:
                continue
            if (known := self._members.get(peer)) is None:
                if self._has_room():
                    self._put(heard)
                    if heard.health is Health.SUSPECT:
                        self._suspicions.accuse(peer, _life(heard), sender, now)
                continue
            merged = newest(known, heard)
            hearsay = self._is_hearsay(heard, known, merged, sender)
            if hearsay:
                same = _life(merged) == _life(known)
                merged = replace(merged, health=known.health if same else Health.ALIVE)
            self._put(merged)
            self._idle.hear(known, merged, now)
            if _life(merged) > _life(known) or merged.health is Health.LEFT:
                # It has refuted what is said against it, or has begun again, or has left.
                case, again = self._cases.pop(peer, None), merged.start_ms != known.start_ms
                if again or not merged.live:
                    self._suspicions.words.pop(peer, None)
                if case and case.failed and merged.health is Health.ALIVE and not again:
                    self._reach.missed(peer, 2, now)  # the probes in this peer's place too
            if not hearsay or _life(heard) < _life(known):
                continue
            if sender is not None:
                self._suspicions.count(peer, sender)
            if not self._suspicions.rests(peer, now):
                case = self._suspicions.accuse(peer, _life(heard), sender, now)
                case.left |= heard.health is Health.LEFT
                accused.append(peer)
        return self._look_into(accused)

    def _is_hearsay(self, heard: Member, known: Member, merged: Member, sender: str | None) -> bool:
        """Tells whether it is others' word of the end of a peer that is not known to be gone."""
        case = self._cases.get(heard.peer)
        itself = heard.peer == sender or heard.signed or (case is not None and case.failed)
        if heard.health is Health.ALIVE or (heard.health is Health.LEFT and itself):
            return False
        return known.live or merged.health is Health.SUSPECT

    def _defend(self, heard: Member) -> None:
        """Refutes what others say of this peer and it has not said itself, unless it is leaving."""
        me = self.me
        if heard.start_ms > me.start_ms:
            # An earlier process of this peer, with a clock that was ahead of today's.
            self._put(replace(me, start_ms=heard.start_ms + 1))
            return
        if heard.start_ms != me.start_ms or me.health is Health.LEFT:
            return
        rumoured = heard.health is not Health.ALIVE and heard.incarnation >= me.incarnation
        if heard.health is Health.LEFT or (
            max(heard.incarnation - me.incarnation, heard.heartbeat - me.heartbeat) > _MAX_JUMP
        ):
            # Somebody else's words, which this process cannot take back.
            self._put(replace(me, start_ms=me.start_ms + 1, incarnation=0, heartbeat=0))
        elif rumoured or heard.heartbeat > me.heartbeat:
            incarnation = heard.incarnation + 1 if rumoured else me.incarnation
            beat = max(me.heartbeat, heard.heartbeat) + 1
            self._put(replace(me, incarnation=incarnation, heartbeat=beat))


_life = attrgetter("start_ms", "incarnation")
_gist = attrgetter("start_ms", "health", "phase", "unreachable", "idle", "waited_for", "waited_at")
