"""The calls and connections that may attack live workers: each attack says what came of it.

Every attack of this file and of `attacks_on_rounds` stands in `ATTACKS`; the lab
measures them, and `tests/integration/test_hostile.py` tries each once.
"""

import asyncio
import os
import random
import resource
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import grpc
import zstandard

from murmuration.protos import murmuration_pb2 as pb
from tests.support.attacker import (
    AT_THE_HANDSHAKE,
    Attack,
    Target,
    expect,
    now_ms,
    refusal_of,
    repeated,
    status_through,
)
from tests.support.attacks_on_rounds import ON_ROUNDS
from tests.support.held_streams import beside, hold_streams, released
from tests.support.stranger import break_off, calling, channel_of, impossible, serving

_SHORT = 2000  # characters of a line of the log


def far_members(target: Target) -> str:
    cards = impossible(target.named("x"), "127.0.0.1:9", now_ms())
    refused = target.gossip("x", *map(target.signed, cards.values())).refused
    expect(len(refused) == len(cards), "not all refused:", list(refused))
    for what, reason in zip(cards, refused, strict=True):
        expect(what in reason, f"{what} is refused for something else:", reason)
    return f"{len(refused)} of {len(cards)} refused, each for what is wrong with it"


def words_of_others(target: Target) -> str:
    """Words of the attacked worker and of another that they have not said."""
    first, second = target.swarm.names[:2]
    mine = impossible(first, target.address, now_ms())
    theirs = impossible(second, target.swarm.addresses[second], now_ms())
    cards = [target.signed(card) for card in (*mine.values(), *theirs.values())]
    refused = [target.gossip("x", card).refused for card in cards]
    expect(all(refused), f"{refused.count([])} of them were believed")
    if target.identity is not None:
        changed = target.card(second)
        words = pb.Member.FromString(changed.signed)
        words.heartbeat, words.phase = words.heartbeat + 500, pb.PHASE_DONE
        changed.signed = words.SerializeToString()
        (reason,) = target.gossip("x", changed).refused
        expect("its words are not signed by it" in reason, "refused for something else:", reason)
    return f"{len(cards)} of {len(cards)} refused: {refused[0][0]}"


def bombs(target: Target) -> str:
    lists = b"\x81\xa1x\xdd" + struct.pack(">I", 1_000_000) + b"\x90" * 1_000_000
    me = pb.Member(peer=target.named("x"), address="127.0.0.1:9")
    for content in (lists, bytes(256 << 20)):
        bomb = zstandard.ZstdCompressor().compress(content)
        said = refused(target, "Control/Join", pb.JoinRequest(member=me, manifest=bomb))
        expect("larger than" in said and "\n" not in said, "refused for something else:", said)
    return f"refused: {said}"


def large_profile(target: Target) -> str:
    member = pb.Member(peer=target.named("x"), address="x", profile=b"x" * 1_000_000)
    return f"refused: {refused(target, 'Control/Join', pb.JoinRequest(member=member))}"


def long_name(target: Target) -> str:
    """Names the sender of a contribution, and a member that is to be probed."""
    name = "\x1b[2J" * 750_000
    header = pb.ContributionHeader(run=target.manifest.run, sender=name, fragment=99)
    try:
        for _ in target.stranger.stream("Data/Exchange", [pb.ExchangeUp(header=header)]):
            pass
        said = ""
    except grpc.RpcError as error:
        said = refusal_of(error)
    if said == AT_THE_HANDSHAKE:
        return said
    longest = max(target.longest_event, len(said))
    expect(longest < _SHORT, f"a line of {longest} characters")
    expect("\x1b" not in said, "it reaches the terminal as it is")
    return f"no line is longer than {longest} characters; {said[:60] or 'answered by a refusal'}"


def refused(target: Target, method: str, request: pb.JoinRequest | pb.ProbeRequest | bytes) -> str:
    """The answer of a worker to a call that it must not answer. Raises grpc.RpcError: it does not
    even hear it."""
    try:
        target.stranger.call(method, request, pb.StatusReply)
    except grpc.RpcError as error:
        said = refusal_of(error)
        if said == AT_THE_HANDSHAKE:
            raise
        return said.removeprefix("refused: ")
    expect(False, f"{method} was answered")
    return ""


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
            expect(not tried, "it was tried")
            return f"asked {asked} times, tried {tried} times: w1 is probed where it is"

        yield once


def forged_end(target: Target, health: pb.Health.ValueType) -> str:
    """Accuses the second worker: its own words are passed on with this health."""
    victim = target.swarm.names[1]
    other = target.card(victim)
    other.health = health
    if target.identity is None:
        other.incarnation += 900
    said = target.gossip(victim, other)
    expect(not said.refused, "it is no accusation:", *said.refused)
    seen, counts = target.seen(victim), target.status["accusations"]
    expect(seen is not None, f"{victim} is forgotten")
    at = "nobody" if seen is None else seen["health"]
    if target.identity is not None:
        expect(at == "alive", f"{victim} is {at}")
    who = f"{target.named(victim)} of {victim}"
    return f"{victim} is {at} to the status; accusations by {who}: {counts.get(who, 0)}"


@contextmanager
def ghosts(target: Target) -> Iterator[Callable[[], str]]:
    """Members that do not exist; a member of the run signs them all."""
    number = 0

    def once() -> str:
        nonlocal number
        names = [f"ghost-{number + n}" for n in range(200)]
        number += len(names)
        cards = [
            pb.Member(peer=name, address="127.0.0.1:9", start_ms=now_ms(), phase=pb.PHASE_TRAINING)
            for name in names
        ]
        target.gossip("x", *map(target.signed, cards))
        kept = [each for each in target.status["members"] if each["peer"].startswith("ghost")]
        if target.identity is not None:
            expect(not kept, f"{len(kept)} that nobody has certified are kept")
        return f"of {number} ghosts {len(kept)} are kept"

    yield once


def false_revocations(target: Target) -> str:
    """Revokes the second worker, as often as a message holds; where members have certificates."""
    one = pb.Revocation(subject=f"peer/{target.swarm.names[1]}", signature=bytes(64))
    said = target.message("x")
    said.revocations.extend([one] * 600)
    if target.identity is None:
        target.stranger.call("Control/Gossip", said, pb.GossipMessage)
        return "nobody has certificates"
    problem = refused(target, "Control/Gossip", said.SerializeToString())
    expect("600 revocations in one message" in problem, "refused for something else:", problem)
    return f"refused: {problem}"


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
            if target.known is not None:  # a stranger's ends by itself
                open_[-1].code()
        ended = [stream for stream in open_ if not stream.is_active()]  # type: ignore[attr-defined]  # not in its stubs
        said = {refusal_of(stream) for stream in ended}  # type: ignore[arg-type]  # it is both
        if said == {AT_THE_HANDSHAKE}:
            return AT_THE_HANDSHAKE
        held = len(open_) - len(ended)
        return f"{len(open_)} streams asked for, {held} held; {min(said, default='none refused')}"

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
    filled, outcome = threading.Event(), ""

    async def hold(ended: threading.Event) -> None:
        nonlocal outcome
        try:
            asked = (target.address, target.identity, "Data/Exchange", [header, frame])
            held, tasks = await hold_streams(*asked, count=400, left=128)
            busy = [said for said in held.refusals if said.startswith("RESOURCE_EXHAUSTED")]
            why = min(busy or held.refusals, default="none")
            outcome = f"{held.open} of 400 streams held; refused: {why[:80]}"
            if not held.open and all(said.startswith("UNAVAILABLE") for said in held.refusals):
                outcome = AT_THE_HANDSHAKE
        finally:
            filled.set()
        await asyncio.to_thread(ended.wait)
        await released(tasks)

    def once() -> str:
        filled.wait()
        return outcome

    with beside(hold):
        yield once


@contextmanager
def held_places(target: Target, who: str, method: str) -> Iterator[Callable[[], str]]:
    """Calls that never come, or streams without a header: by each of four as many as it can get,
    again and again. Args: who: of the certificates."""
    known = target.certificates
    callers = [target.identity] if known is None or target.known else getattr(known, who)[:4]
    counts: Counter[str] = Counter()

    async def hold(channel: grpc.aio.Channel) -> None:
        while True:
            call = channel.stream_stream(f"/murmuration.v1.{method}")(None)
            counts[(await call.code()).name] += 1
            await asyncio.sleep(1)  # the next call of this one

    async def hold_all(ended: threading.Event) -> None:
        channels = [channel_of(target.address, c, grpc.aio) for c in callers for _ in range(4)]
        tasks = [asyncio.create_task(hold(each)) for each in channels for _ in range(16)]
        await asyncio.to_thread(ended.wait)
        await released(tasks)

    def once() -> str:
        if target.known is not None:
            expect(counts.keys() <= {"UNAVAILABLE"}, "a stranger is answered:", counts)
            return AT_THE_HANDSHAKE
        if known is not None:
            with calling(target.address, known.joiner) as caller:
                status_through(caller)
        return f"{counts.total()} calls of {len(callers)} ended, others are answered"

    with beside(hold_all):
        yield once


@contextmanager
def passing_addresses(target: Target) -> Iterator[Callable[[], str]]:
    """A member is elsewhere with each call, and answers there: ten a call. Files are counted."""
    asked, pid = 0, target.swarm.workers[target.swarm.names[0]].process.pid
    start_ms, name = now_ms(), target.named("moving")
    before = len(os.listdir(f"/proc/{pid}/fd"))
    answers = {"Control/Gossip": lambda _: target.message(name).SerializeToString()}
    with serving(answers, "0.0.0.0:0", target.identity) as address:
        port = address.rpartition(":")[2]

        def once() -> str:
            nonlocal asked
            for _ in range(10):
                asked += 1
                at = f"127.0.{1 + asked // 250}.{1 + asked % 250}:{port}"
                member = pb.Member(peer=name, address=at, start_ms=start_ms + asked, heartbeat=5)
                join = pb.JoinRequest(member=target.signed(member), manifest=target.manifest.pack())
                join.member.peer = name
                if target.identity is not None:
                    join.certificate = target.identity.der
                target.stranger.call("Control/Join", join, pb.JoinReply)
            files = len(os.listdir(f"/proc/{pid}/fd"))
            expect(files < before + 64, f"{files} files are open, {before} before")
            return f"{asked} addresses dialled, {files} files open, {before} before"

        yield once


@contextmanager
def idle_connections(target: Target) -> Iterator[Callable[[], str]]:
    """Connections that say nothing, 1,200 of them."""
    host, port = target.address.split(":")
    made: list[socket.socket] = []
    with more_files(4096), ExitStack() as stack:

        def once() -> str:
            if not made:
                for _ in range(1200):
                    made.append(socket.create_connection((host, int(port))))
                    stack.enter_context(made[-1])
                    made[-1].setblocking(False)
            return f"{len(made)} connections that say nothing, {sum(map(closed, made))} closed"

        yield once


def closed(connection: socket.socket) -> bool:
    """Tells whether the other side has ended the connection."""
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def more_files(wanted: int) -> Iterator[None]:
    """This process may have so many open, or as many as it is allowed."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
    """Connections that break off in their handshake, 60 a call."""
    made, draws = 0, random.Random(0)

    def once() -> str:
        nonlocal made
        for _ in range(60):
            with suppress(OSError):
                break_off(target.address, draws)
                made += 1
        return f"{made} connections were broken off"

    yield once


# They take their time.
HOLDING: dict[str, Attack] = {
    f"four {who} hold all {what}": partial(held_places, who=who, method=method)
    for who in ("tokens", "expelled", "members")
    for what, method in (("calls", "Control/Gossip"), ("streams", "Data/Exchange"))
}
CALLS: dict[str, Attack] = {
    "members that cannot be": repeated(far_members),
    "words of others": repeated(words_of_others),
    "128 bytes of a million lists": repeated(bombs),
    "a profile of 1 MB": repeated(large_profile),
    "a name of 3 MB": repeated(long_name),
    "probes of 700 ports": probes_of_ports,
    "another's forged departure": repeated(partial(forged_end, health=pb.HEALTH_LEFT)),
    "another's forged death": repeated(partial(forged_end, health=pb.HEALTH_DEAD)),
    "headers without frames": held_streams,
    "400 unread streams": unread_streams,
    "connections that come and go": hasty_connections,
    "ghosts, 200 a call": ghosts,
    "addresses that are dialled once": passing_addresses,
    "600 false revocations": repeated(false_revocations),
}
# Whoever makes them, nobody is asked anything.
CONNECTIONS: dict[str, Attack] = {
    "1,200 idle connections": idle_connections,
    "connections that break off": broken_connections,
}
# A stranger to an encrypted run is refused at the handshake in each of them.
ATTACKS = CALLS | ON_ROUNDS
