"""What somebody may try on live workers, again and again: each attack says what came of it."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial

import grpc
import torch
import zstandard

from coordinator.report.status import ask
from protos import murmuration_pb2 as pb
from protos.identity import Identity
from tests.support.held_streams import hold_streams
from tests.support.stranger import Stranger, calling, serving
from tests.support.workers import Swarm
from worker.manifest import Manifest
from worker.wire import frame_messages, state_hash, state_parts

FAR = 2**64 - 1


@dataclass(frozen=True)
class Target:
    """Workers, and the attacker's way to the first of them.

    `identity` is the attacker's where it is a member with a certificate."""

    swarm: Swarm
    stranger: Stranger
    identity: Identity | None = None

    @property
    def address(self) -> str:
        """Of the worker that is attacked."""
        return self.swarm.addresses[self.swarm.names[0]]

    @cached_property
    def manifest(self) -> Manifest:
        """Of the run."""
        return self.stranger.manifest()

    def named(self, wanted: str) -> str:
        """The name to speak in: a certificate is good for one only."""
        return wanted if self.identity is None else self.identity.name

    def gossip(self, sender: str, *members: pb.Member, full: bool = False) -> pb.GossipMessage:
        """Says something of members; the answer."""
        said = pb.GossipMessage(
            sender=self.named(sender), run=self.manifest.run, members=members, full=full
        )
        return self.stranger.call("Control/Gossip", said, pb.GossipMessage)

    def member(self, name: str) -> pb.Member:
        """As the first worker knows it."""
        known = self.gossip("stranger", full=True).members
        plain = (pb.Member.FromString(each.signed) if each.signed else each for each in known)
        return next(member for member in plain if member.peer == name)


Attack = Callable[[Target], AbstractContextManager[Callable[[], str]]]


def repeated(attack: Callable[[Target], str]) -> Attack:
    """An attack that needs nothing but calls."""

    @contextmanager
    def held(target: Target) -> Iterator[Callable[[], str]]:
        yield partial(attack, target)

    return held


def far_members(target: Target) -> str:
    first, second = (target.swarm.addresses[name] for name in target.swarm.names[:2])
    mine = {"peer": "w0", "address": first}
    theirs = {"peer": "w1", "address": second, "epoch": 1}
    cards = [
        pb.Member(**mine, epoch=FAR),
        pb.Member(**mine, epoch=1, incarnation=2**32 - 1),
        pb.Member(**theirs, heartbeat=FAR),
        pb.Member(**theirs, step=FAR),
        pb.Member(**theirs, stage=9),
        pb.Member(**theirs, digests=[pb.FragmentDigest()] * 9),
        pb.Member(**theirs, digests=[pb.FragmentDigest(version=10**12)]),
        pb.Member(**theirs, profile=b"x" * 20_000),
    ]
    refused = target.gossip("x", *cards).refused
    return f"{len(refused)} of {len(cards)} members refused"


def garbage(target: Target) -> str:
    methods = ("Control/Gossip", "Control/Join", "Control/IndirectProbe")
    said = [target.stranger.refusal(method, b"\xff" * 1000) for method in methods]
    return f"refused: {said[0]}"


def bombs(target: Target) -> str:
    plain = b"\x81\xa1x\xdd" + struct.pack(">I", 1_000_000) + b"\x90" * 1_000_000
    bomb = zstandard.ZstdCompressor().compress(plain)
    said = target.stranger.refusal("Control/Join", pb.JoinRequest(manifest=bomb))
    return f"refused: {said}"


def large_profile(target: Target) -> str:
    member = pb.Member(peer="x", address="x", profile=b"x" * 1_000_000)
    return f"refused: {target.stranger.refusal('Control/Join', pb.JoinRequest(member=member))}"


def long_name(target: Target) -> str:
    header = pb.ContributionHeader(run=target.manifest.run, sender="x" * 3_000_000, fragment=99)
    target.stranger.answers("Data/Exchange", pb.ExchangeUp(header=header))
    return "refused, the name cut"


def probe_elsewhere(target: Target) -> str:
    asked = pb.ProbeRequest(peer="x", address="unix:/tmp/socket", timeout_s=1e300)
    return f"refused: {target.stranger.refusal('Control/IndirectProbe', asked)}"


@contextmanager
def probes_of_ports(target: Target) -> Iterator[Callable[[], str]]:
    """Asks to probe w1 at ports where w1 is not; on one of them somebody listens."""
    asked = tried = 0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)

        def once() -> str:
            nonlocal asked, tried
            elsewhere = f"127.0.0.1:{listening.getsockname()[1]}"
            for address in (elsewhere, *(f"127.0.0.1:{20_000 + asked + n}" for n in range(9))):
                probe = pb.ProbeRequest(peer="w1", address=address, timeout_s=60)
                target.stranger.call("Control/IndirectProbe", probe, pb.ProbeReply)
            asked += 10
            with suppress(BlockingIOError):
                listening.accept()[0].close()
                tried += 1
            return f"asked {asked} times, tried {tried} times: w1 is probed where it is"

        yield once


def forged_end(target: Target, health: pb.Health.ValueType) -> str:
    other = target.member("w1")
    other.health, other.incarnation = health, other.incarnation + 900
    target.gossip("w1", other)
    return "taken back by the accused"


@contextmanager
def ghosts(target: Target) -> Iterator[Callable[[], str]]:
    number = 0

    def once() -> str:
        nonlocal number
        names = [f"ghost-{number + n}" for n in range(200)]
        number += len(names)
        target.gossip("x", *(pb.Member(peer=name, address="127.0.0.1:9") for name in names))
        return f"{len(ask(target.address, identity=target.identity)['members'])} members are kept"

    yield once


@contextmanager
def false_state(target: Target, value: float) -> Iterator[Callable[[], str]]:
    """A member that is far ahead, and gives a state that nobody else has."""
    elements, run = target.manifest.elements, target.manifest.run
    anchor, momentum = torch.full((elements,), value), torch.zeros(elements)
    hashed, name = state_hash(anchor, momentum, ("x",)), target.named(f"false-{value}")
    here = target.member("w0")
    version, step = here.digests[0].version + 5000, here.step + 25_000
    given = 0

    def member() -> pb.Member:
        digest = pb.FragmentDigest(version=version, contributors=3, hash=hashed)
        return pb.Member(
            peer=name, address=address, epoch=1, phase=pb.PHASE_DONE, step=step, digests=[digest]
        )

    def answer(_request: bytes) -> bytes:
        said = pb.GossipMessage(sender=name, run=run, members=[member()])
        return said.SerializeToString()

    def fetch(_request: bytes) -> Iterator[bytes]:
        nonlocal given
        header = pb.StateHeader(
            version=version, contributors=3, group=["x"], hash=hashed, step=step,
            total_bytes=8 * elements,
        )  # fmt: skip
        yield pb.FetchReply(header=header).SerializeToString()
        for message, _ in frame_messages(pb.FetchReply, state_parts(anchor, momentum)):
            yield message
        given += 1

    def once() -> str:
        for worker in target.swarm.addresses.values():
            with calling(worker, target.identity) as stranger:
                said = pb.GossipMessage(sender=name, run=run, members=[member()])
                stranger.call("Control/Gossip", said, pb.GossipMessage)
        return f"given {given} times, adopted never"

    answers = {"Control/Gossip": answer, "Data/Fetch": fetch}
    with serving(answers, identity=target.identity) as address:
        yield once


@contextmanager
def held_streams(target: Target) -> Iterator[Callable[[], str]]:
    """Headers without frames, each on a stream that stays open."""
    open_: list[grpc.Call] = []
    sender = target.named("w1")
    header = pb.ContributionHeader(run=target.manifest.run, sender=sender, round=10**9)

    def once() -> str:
        if len(open_) < 600:
            stream = target.stranger.stream("Data/Exchange", [pb.ExchangeUp(header=header)])
            open_.append(stream)  # type: ignore[arg-type]  # its stubs know an iterator only
        return f"{len(open_)} streams asked for, held as far as they are taken"

    yield once
    for stream in open_:
        stream.cancel()


@contextmanager
def unread_streams(target: Target) -> Iterator[Callable[[], str]]:
    """400 streams that are filled as far as the worker takes them, and held."""
    frame = pb.ExchangeUp(frame=pb.Frame(payload=bytes(1024 * 1024))).SerializeToString()
    sender = target.named("w1")
    far = pb.ContributionHeader(run=target.manifest.run, sender=sender, round=10**9)
    header = pb.ExchangeUp(header=far).SerializeToString()
    ended = threading.Event()
    outcome = "400 streams are being opened"

    async def hold() -> None:
        nonlocal outcome
        held, tasks = await hold_streams(
            target.address, target.identity, "Data/Exchange", [header, frame], count=400, left=128
        )
        outcome = f"{held.open} of 400 streams held, the others refused: {held.refusals[-1][:80]}"
        await asyncio.to_thread(ended.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    holding = threading.Thread(target=lambda: asyncio.run(hold()))
    holding.start()
    try:
        yield lambda: outcome
    finally:
        ended.set()
        holding.join()


@contextmanager
def idle_connections(target: Target) -> Iterator[Callable[[], str]]:
    """Connections that say nothing, 1,200 of them."""
    host, port = target.address.split(":")
    made = 0
    with ExitStack() as stack:

        def once() -> str:
            nonlocal made
            if made < 1200:
                for _ in range(40):
                    stack.enter_context(socket.create_connection((host, int(port))))
                made += 40
            return f"{made} connections that say nothing"

        yield once


@contextmanager
def hasty_connections(target: Target) -> Iterator[Callable[[], str]]:
    """Connections of which each asks one thing and goes: five a call, TLS where the run has it."""
    made = 0

    def once() -> str:
        nonlocal made
        for _ in range(5):
            with calling(target.address, target.identity) as caller:
                caller.call("Control/Status", pb.StatusRequest(), pb.StatusReply)
        made += 5
        return f"{made} connections were answered"

    yield once


@contextmanager
def broken_connections(target: Target) -> Iterator[Callable[[], str]]:
    """Connections that break off: at once, in the first record of TLS, or by a reset; 60 a call."""
    host, port = target.address.split(":")
    made = 0

    def once() -> str:
        nonlocal made
        for _ in range(20):
            for begun, reset in (
                (b"", False),
                (b"\x16\x03\x01\x02\x00" + bytes(99), False),
                (b"", True),
            ):
                with suppress(OSError), socket.create_connection((host, int(port))) as connection:
                    connection.sendall(begun)
                    if reset:
                        linger = struct.pack("ii", 1, 0)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    made += 1
        return f"{made} connections were broken off"

    yield once


def refused_calls(target: Target) -> str:
    """As somebody without a certificate; whatever is asked, it is the same."""
    try:
        target.stranger.call("Control/Status", pb.StatusRequest(), pb.StatusReply)
    except grpc.RpcError as error:
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]  # not in its stubs
        return "refused at the handshake" if unavailable else f"refused: {error}"
    return "HARM: it was answered"


# By somebody without a certificate, on an encrypted run.
STRANGERS: dict[str, Attack] = {
    "a call": repeated(refused_calls),
    "1,200 idle connections": idle_connections,
    "connections that break off": broken_connections,
}
ATTACKS: dict[str, Attack] = {
    "members that cannot be": repeated(far_members),
    "garbage": repeated(garbage),
    "128 bytes of a million lists": repeated(bombs),
    "a profile of 1 MB": repeated(large_profile),
    "a name of 3 MB": repeated(long_name),
    "a probe of a Unix socket": repeated(probe_elsewhere),
    "probes of 700 ports": probes_of_ports,
    "another's forged departure": repeated(partial(forged_end, health=pb.HEALTH_LEFT)),
    "another's forged death": repeated(partial(forged_end, health=pb.HEALTH_DEAD)),
    "a state of NaN, 5,000 rounds ahead": partial(false_state, value=float("nan")),
    "a state of 3.0, 5,000 rounds ahead": partial(false_state, value=3.0),
    "headers without frames": held_streams,
    "400 unread streams": unread_streams,
    "1,200 idle connections": idle_connections,
    "connections that come and go": hasty_connections,
    "connections that break off": broken_connections,
    "ghosts, 200 a call": ghosts,
}
