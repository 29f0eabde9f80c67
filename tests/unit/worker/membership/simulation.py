"""Many Membership machines on one heap and one virtual clock: a failing seed is the reproduction.

Mirrors how a worker carries out the machine's actions, on links with latency and
loss, with processes that crash, pause and are cut off. No I/O, no real time.
"""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from murmuration.protos import murmuration_pb2 as pb
from murmuration.worker import wire
from murmuration.worker.membership import (
    Action,
    Digest,
    Dissemination,
    GossipMessage,
    Health,
    IndirectProbe,
    Member,
    Membership,
    MembershipConfig,
    Phase,
    Probe,
    Signed,
    with_progress,
)
from murmuration.worker.membership.gossip import to_gossip_message

TICK_S = 0.1
LATENCY_S = (0.005, 0.05)
HTTP_BYTES = 30  # of HTTP/2 headers and frames, for each of a call's two messages
RUN = 2**63


@dataclass
class Process:
    """One peer: its machine, and what the world does to it."""

    machine: Membership
    running: bool = True
    wakes_at: float = 0.0


@dataclass(frozen=True)
class Change:
    """At `at`, `observer` came to think `peer` to be `health`."""

    at: float
    observer: str
    peer: str
    health: Health


@dataclass
class Simulation:
    """Args: peers: how many, all known to each other at the start; loss: of a message one way;
    signed: whether members are also counted with a signature, though none is made."""

    peers: int
    seed: int
    loss: float = 0.0
    signed: bool = False
    config: MembershipConfig = field(default_factory=MembershipConfig)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.deltas: dict[str, Dissemination] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.signed_bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.changes: list[Change] = []
        self.processes: dict[str, Process] = {}
        self.cut: set[frozenset[str]] = set()
        self._rng = random.Random(self.seed)
        self._agenda: list[tuple[float, int, str, Callable[[], None]]] = []
        self._number = itertools.count()
        self._seen: dict[tuple[str, str], Health] = {}
        members = tuple(Member(f"w{i}", f"w{i}", epoch=1) for i in range(self.peers))
        for member in members:
            self.start(member, members)

    @property
    def names(self) -> list[str]:
        return list(self.processes)

    # ------------------------------------------------------------------ what a test does to them

    def start(self, member: Member, known: tuple[Member, ...]) -> None:
        """A process begins (again), having heard of `known`."""
        machine = Membership(member, self.config, random.Random(self._rng.random()))
        self.deltas[member.peer] = Dissemination(member.peer, self.config.full_s)
        self.processes[member.peer] = Process(machine)
        self._done(member.peer, machine.hear(known, None, self.now))
        self._at(
            self._rng.uniform(0, TICK_S), member.peer, lambda: self._tick(member.peer, machine)
        )

    def restart(self, name: str, epoch: int, via: str) -> None:
        """A new life of a crashed peer, which knows one other."""
        self.start(Member(name, name, epoch), (Member(via, via, epoch=1),))

    def update(self, name: str, step: int, digests: tuple[Digest, ...]) -> None:
        """The peer has trained to `step`."""
        if self.processes[name].running:
            machine = self.processes[name].machine
            changes = {"phase": Phase.TRAINING, "step": step, "digests": digests}
            machine.update(**changes)
            self._done(name)

    def say(self, name: str, word: Member, sender: str) -> None:
        """The peer hears this from the sender, true or not."""
        self._done(name, self.processes[name].machine.hear((word,), sender, self.now))

    def crash(self, name: str) -> None:
        self.processes[name].running = False

    def leave(self, name: str) -> None:
        """Says so, and is gone a second later."""
        self._done(name, self.processes[name].machine.leave())
        self._at(1.0, name, lambda: self.crash(name))

    def pause(self, name: str, seconds: float) -> None:
        """Nothing runs in this process for a while: the GIL is held, or it was stopped."""
        process = self.processes[name]
        process.wakes_at = max(process.wakes_at, self.now + seconds)

    def partition(self, *sides: set[str]) -> None:
        """Cuts every link between the sides; without sides, heals all."""
        self.cut = {
            frozenset((a, b))
            for one, other in itertools.combinations(sides, 2)
            for a in one
            for b in other
        }

    def run(self, seconds: float) -> None:
        """Lets virtual time pass."""
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, name, work = heapq.heappop(self._agenda)
            process = self.processes.get(name)
            if process is None or not process.running:
                continue
            if process.wakes_at > self.now:
                self._push(process.wakes_at, name, work)
                continue
            work()
        self.now = end

    # -------------------------------------------------------------------------- what a test asks

    def health(self, observer: str, peer: str) -> Health:
        return self._seen[observer, peer]

    def member(self, observer: str, peer: str) -> Member:
        """As the observer knows it."""
        return next(each for each in self.members(observer) if each.peer == peer)

    def members(self, observer: str) -> tuple[Member, ...]:
        return self.processes[observer].machine.members

    def views(self) -> set[tuple[tuple[str, Health], ...]]:
        """The different views that running peers have; one when all agree."""
        return {
            tuple((member.peer, member.health) for member in process.machine.members)
            for process in self.processes.values()
            if process.running
        }

    def deaths(self) -> list[Change]:
        return [change for change in self.changes if change.health is Health.DEAD]

    # ------------------------------------------------------------------------------------ inside

    def _push(self, at: float, name: str, work: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at, next(self._number), name, work))

    def _at(self, delay_s: float, name: str, work: Callable[[], None]) -> None:
        """Work in a process; dropped when it has crashed, postponed while it is paused."""
        self._push(self.now + delay_s, name, work)

    def _tick(self, name: str, machine: Membership) -> None:
        if self.processes[name].machine is machine:
            self._done(name, machine.tick(self.now))
            self._at(TICK_S, name, lambda: self._tick(name, machine))

    def _done(self, name: str, actions: Sequence[Action] = ()) -> None:
        """Does what the peer's rules ask for."""
        for action in actions:
            match action:
                case Probe(peer, address, timeout_s):
                    self._exchange(name, address, timeout_s, partial(self._probed, name, peer))
                case IndirectProbe(via, peer, address, timeout_s):
                    self._ask(name, via, peer, address, timeout_s)
        machine = self.processes[name].machine
        if machine.view_changed():
            self._note(name, machine)

    def _probed(self, name: str, peer: str, answered: bool) -> None:
        self._done(name, self.processes[name].machine.probed(peer, self.now, answered=answered))

    def _probed_for(self, name: str, peer: str, alive: bool) -> None:
        self.processes[name].machine.probed_for(peer, self.now, alive=alive)
        self._done(name)

    def _note(self, name: str, machine: Membership) -> None:
        for member in machine.members:
            if self._seen.get((name, member.peer)) is not member.health:
                self._seen[name, member.peer] = member.health
                self.changes.append(Change(self.now, name, member.peer, member.health))

    def _exchange(
        self, name: str, to: str, timeout_s: float, ended: Callable[[bool], None]
    ) -> None:
        mine = self.deltas[name]
        asked = self._accusing(name, to, mine.request(to, self.members(name), self.now))
        self._count(name, asked)

        def serve(answer: Callable[[Callable[[], None]], None]) -> None:
            self._hear(to, name, asked)
            returned = self.deltas[to].answer(name, asked, self.members(to))
            returned = self._accusing(to, name, returned)
            self._count(to, returned)
            answer(lambda: self._hear(name, to, returned))

        def end(ok: bool) -> None:
            if not ok:
                mine.failed(to)
            ended(ok)

        self._call(name, to, timeout_s, serve, end)

    def _hear(self, name: str, sender: str, said: GossipMessage) -> None:
        members = with_progress(said, sender, self.members(name))
        self._done(name, self.processes[name].machine.hear(members, sender, self.now))
        self.deltas[name].heard(sender, said, self.members(name))

    def _accusing(self, name: str, to: str, said: GossipMessage) -> GossipMessage:
        word = self.processes[name].machine.said_against(to)
        return said if word is None else replace(said, members=(*said.members, word))

    def _count(self, name: str, said: GossipMessage) -> None:
        self.sent_bytes[name] += size_of(said, name, plain)
        if self.signed:
            self.signed_bytes[name] += size_of(said, name, travelling)
        self.messages[name] += 1

    def _ask(self, name: str, via: str, peer: str, address: str, timeout_s: float) -> None:
        alive = False

        def serve(answer: Callable[[Callable[[], None]], None]) -> None:
            def note(value: bool) -> None:
                nonlocal alive
                alive = value

            self._exchange(via, address, timeout_s, lambda ok: answer(lambda: note(ok)))

        self._call(
            name,
            via,
            2 * timeout_s,
            serve,
            lambda ok: self._probed_for(name, peer, ok and alive),
        )

    def _call(
        self,
        name: str,
        to: str,
        timeout_s: float,
        serve: Callable[[Callable[[Callable[[], None]], None]], None],
        ended: Callable[[bool], None],
    ) -> None:
        """One request and its answer. An answer that reached the machine in time counts, though a
        busy process takes it up later: gRPC's core needs no GIL to receive."""
        deadline = self.now + timeout_s
        done = False

        def end(ok: bool, take: Callable[[], None] | None = None) -> None:
            nonlocal done
            if not done:
                done = True
                if take is not None:
                    take()
                ended(ok)

        def answer(take: Callable[[], None]) -> None:
            self._send(to, name, lambda: end(True, take), by=deadline)

        self._send(name, to, lambda: serve(answer))
        self._at(timeout_s, name, lambda: end(False))

    def _send(self, sender: str, to: str, work: Callable[[], None], by: float = math.inf) -> None:
        """A message, lost now and then, and dropped when it would arrive too late."""
        if sender != to and frozenset((sender, to)) in self.cut:
            return
        latency_s = 0.0 if sender == to else self._rng.uniform(*LATENCY_S)
        if (sender == to or self._rng.random() >= self.loss) and self.now + latency_s < by:
            self._at(latency_s, to, work)


def size_of(said: GossipMessage, sender: str, to_message: Callable[[Member], pb.Member]) -> int:
    """Bytes of the message, with an epoch of the usual length."""
    if (progress := said.progress) is not None:
        said = replace(said, progress=replace(progress, epoch=progress.epoch + 2**40))
    members = [to_message(member) for member in said.members]
    return to_gossip_message(said, sender, RUN, members).ByteSize() + HTTP_BYTES


# A member goes to many, as it is.
@lru_cache(maxsize=2**14)
def plain(member: Member) -> pb.Member:
    """With an address and an epoch of the usual length."""
    return wire.member_to_message(located(member))


@lru_cache(maxsize=2**14)
def travelling(member: Member) -> pb.Member:
    """With a signature of the usual length."""
    words = wire.member_to_message(replace(located(member), health=Health.ALIVE))
    signed = Signed(words.SerializeToString(), bytes(64))
    return wire.signed_member_to_message(replace(member, signed=signed))


def located(member: Member) -> Member:
    return replace(member, address=f"10.1.22.{member.peer[1:]}:7000", epoch=member.epoch + 2**40)
