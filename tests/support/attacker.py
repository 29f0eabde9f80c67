"""Somebody that attacks live workers: what it has got, what it says, and what comes of it.

A member of the run has a certificate, and signs what it says of itself. A stranger to an encrypted
run has a certificate of an authority of its own, and knows all the rest that a member knows. Where
nothing is encrypted, anybody may say anything.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import grpc

from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import STATUS_BYTES, unpack
from murmuration.worker.config import Config, parse_config
from murmuration.worker.identity.certificates import Identity, signer
from murmuration.worker.manifest import Manifest
from tests.support.members import Certificates
from tests.support.stranger import Stranger, calling
from tests.support.workers import Event, Swarm

AT_THE_HANDSHAKE = "refused at the handshake"
_DOMAIN = b"murmuration member\0"


class Harm(AssertionError):
    """An attack has done what it must not do."""


@dataclass(frozen=True)
class Target:
    """Workers, and the attacker's way to the first of them. Args: identity: the attacker's; None
    where nothing is encrypted; accomplices: of the attacker's, with certificates of the run as it
    has; certificates: of all, where anything is encrypted; coordinator: where there is one; known:
    the run's manifest, for a stranger, whom nobody tells."""

    swarm: Swarm
    stranger: Stranger
    identity: Identity | None = None
    accomplices: Sequence[Identity] = ()
    certificates: Certificates | None = None
    coordinator: str | None = None
    known: Manifest | None = None
    _began: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began.update({name: len(w.events) for name, w in self.swarm.workers.items()})

    @property
    def address(self) -> str:
        return self.swarm.addresses[self.swarm.names[0]]

    @cached_property
    def manifest(self) -> Manifest:
        return self.known or self.stranger.manifest()

    @property
    def config(self) -> Config:
        return parse_config(self.manifest.sections, "the run")

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.manifest.document["tensors"].values())

    @property
    def status(self) -> Event:
        return status_through(self.stranger)

    def seen(self, peer: str) -> Event | None:
        """A member, as the attacked worker's status shows it."""
        return next((each for each in self.status["members"] if each["peer"] == peer), None)

    def named(self, wanted: str) -> str:
        """The name to speak in: a certificate is good for one only."""
        return wanted if self.identity is None else self.identity.name

    def names(self, wanted: str, count: int) -> list[str]:
        """As many that have certificates where there are any, the attacker's first."""
        if self.identity is None:
            return [f"{wanted}-{number}" for number in range(count)]
        return [each.name for each in (self.identity, *self.accomplices)][:count]

    def signed(self, member: pb.Member) -> pb.Member:
        """The member as it travels: signed by it where it is one of the attacker's, by the attacker
        where it is not. Nothing is signed where nothing is encrypted."""
        if self.identity is None:
            return member
        named = (each for each in self.accomplices if each.name == member.peer)
        words, prefix = member.SerializeToString(), _DOMAIN + self.manifest.run.to_bytes(8, "big")
        sign = signer(next(named, self.identity).key)
        signature = sign(hashlib.sha256(prefix + words).digest())
        return pb.Member(signed=words, signature=signature)

    def message(self, sender: str, *members: pb.Member, full: bool = False) -> pb.GossipMessage:
        """Words of members as they travel, with the attackers' certificates."""
        attackers = () if self.identity is None else (self.identity, *self.accomplices)
        return pb.GossipMessage(
            sender=self.named(sender),
            run=self.manifest.run,
            members=members,
            certificates=[each.der for each in attackers],
            full=full,
        )

    def gossip(self, sender: str, *members: pb.Member, full: bool = False) -> pb.GossipMessage:
        """Says something of members; the answer."""
        said = self.message(sender, *members, full=full)
        return self.stranger.call("Control/Gossip", said, pb.GossipMessage)

    def card(self, name: str) -> pb.Member:
        """A member as the first worker passes it on."""
        known = self.gossip("stranger", full=True).members
        return next(each for each in known if plain(each).peer == name)

    def member(self, name: str) -> pb.Member:
        return plain(self.card(name))

    def told(self, kind: str) -> list[Event]:
        """Events of a kind of all workers, since the attack began."""
        return [
            event
            for name, worker in self.swarm.workers.items()
            for event in worker.events[self._began.get(name, 0) :]
            if event["event"] == kind
        ]

    def warning_of(self, peer: str) -> str:
        """The last that a worker has given of the peer; empty if there was none."""
        texts = [str(event["text"]) for event in self.told("warning")]
        return next((text for text in reversed(texts) if peer in text), "")

    @property
    def longest_event(self) -> int:
        """Characters of the longest line that a worker has logged since the attack began."""
        kinds = ("warning", "refused", "member", "round")
        return max(
            (len(json.dumps(event)) for kind in kinds for event in self.told(kind)), default=0
        )

    def adopted(self) -> list[Event]:
        """States that workers have taken of somebody else than each other."""
        return [event for event in self.told("adopted") if event["donor"] not in self.swarm.names]


@contextmanager
def aiming(
    swarm: Swarm,
    coordinator: str,
    certificates: Certificates | None,
    *,
    stranger: bool = False,
    turn: int = 0,
) -> Iterator[Target]:
    """An attacker's way to a swarm. Args: certificates: None where nothing is encrypted; stranger:
    has none of the run's authority; turn: which of the members attacks: workers pass one over for a
    while that has lied."""
    address = swarm.addresses[swarm.names[0]]
    if certificates is None:
        with calling(address) as anybody:
            yield Target(swarm, anybody, coordinator=coordinator)
        return
    at = turn % len(certificates.members)
    first, *others = (*certificates.members[at:], *certificates.members[:at])
    with calling(address, first) as member:
        if not stranger:
            yield Target(swarm, member, first, others, certificates, coordinator)
            return
        known = member.manifest()
    outsider = certificates.outsider
    with calling(address, outsider) as caller:
        yield Target(swarm, caller, outsider, [], certificates, coordinator, known)


# Made once an attack; what it gives is called again and again, and says what came of it.
Attack = Callable[[Target], AbstractContextManager[Callable[[], str]]]


def repeated(attack: Callable[[Target], str]) -> Attack:
    """An attack that needs nothing but calls."""

    @contextmanager
    def held(target: Target) -> Iterator[Callable[[], str]]:
        yield partial(attack, target)

    return held


def attacked(target: Target, attack: Attack, times: Iterable[object]) -> str:
    """Attacks once for each of `times`, and says what came of the last one. Raises Harm."""
    outcome = "not tried"
    with ExitStack() as stack:
        once: Callable[[], str] | None = None
        for _ in times:
            try:
                once = once or stack.enter_context(attack(target))
                outcome = once()
            except grpc.RpcError as error:
                outcome = refusal_of(error)
            if adopted := target.adopted():
                raise Harm(f"adopted of {adopted[0]['donor']}")
    return outcome


def refusal_of(error: grpc.RpcError) -> str:
    """The refusal of a call."""
    code, said = error.code(), error.details()  # type: ignore[attr-defined]  # not in its stubs
    return AT_THE_HANDSHAKE if code is grpc.StatusCode.UNAVAILABLE else f"refused: {said}"


def status_through(caller: Stranger) -> Event:
    """The status of the worker or coordinator that is called. Raises grpc.RpcError."""
    reply = caller.call("Control/Status", pb.StatusRequest(), pb.StatusReply)
    return unpack(reply.document, STATUS_BYTES)


def plain(member: pb.Member) -> pb.Member:
    """The words of a member that has travelled."""
    return pb.Member.FromString(member.signed) if member.signed else member


def now_ms() -> int:
    """A start that is later than all before."""
    return time.time_ns() // 1_000_000


def expect(holds: object, otherwise: str, *more: Any) -> None:
    """Raises Harm unless it holds."""
    if not holds:
        raise Harm(" ".join([otherwise, *map(str, more)]))
