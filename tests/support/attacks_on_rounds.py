"""The attacks on a model, a joiner or a coordinator."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch

from murmuration.algorithms.codecs import codec_by_name
from murmuration.protos import murmuration_pb2 as pb
from murmuration.protos.documents import pack
from murmuration.worker import wire
from murmuration.worker.config import load_config
from murmuration.worker.identity.certificates import Identity
from murmuration.worker.manifest import Manifest
from tests.support.attacker import (
    AT_THE_HANDSHAKE,
    Attack,
    Target,
    expect,
    now_ms,
    refusal_of,
    repeated,
)
from tests.support.stranger import calling, handing_out, serving
from tests.support.workers import SMALL, Event, WorkerProcess

FAR_STEP = 999_999


def member_of(
    name: str, address: str, phase: pb.Phase.ValueType = pb.PHASE_TRAINING, **more: Any
) -> pb.Member:
    """One that has begun just now."""
    given = {"start_ms": now_ms(), "heartbeat": 5, **more}
    return pb.Member(peer=name, address=address, phase=phase, **given)


@contextmanager
def standing(
    target: Target,
    name: str,
    card: Callable[[str], pb.Member],
    answers: Mapping[str, Callable[[bytes], Any]],
) -> Iterator[Callable[[], None]]:
    """A member that answers. What it gives tells all workers of it.

    Args:
        card: what it says of itself, by its address.
        answers: what it serves beside gossip."""

    def said() -> pb.GossipMessage:
        return target.message(name, target.signed(card(address)))

    def announce() -> None:
        for worker in target.swarm.addresses.values():
            with calling(worker, target.identity) as stranger:
                refused = stranger.call("Control/Gossip", said(), pb.GossipMessage).refused
                expect(not refused, "it is no member:", *refused)

    served = {"Control/Gossip": lambda _request: said().SerializeToString(), **answers}
    with serving(served, identity=target.identity) as address:
        yield announce


@contextmanager
def false_state(
    target: Target, value: float, ahead: int = 1000, gives: int | None = None
) -> Iterator[Callable[[], str]]:
    """A member that is far ahead, gives a state that nobody else has, and confirms any state.

    Args:
        value: of its anchor.
        ahead: rounds.
        gives: the version that is in the state, in place of the announced one."""
    elements, name = target.elements, target.named(f"false-{value}-{ahead}-{gives}")
    anchor, momentum = torch.full((elements,), value), torch.zeros(elements)
    hashed, start = wire.state_hash(anchor, momentum, ("x",)), now_ms()
    here = target.member(target.swarm.names[0])
    version, step = here.digests[0].version + ahead, here.step + 5 * ahead
    given = 0

    def card(address: str) -> pb.Member:
        digest = pb.FragmentDigest(version=version, contributors=3, hash=hashed)
        return member_of(name, address, pb.PHASE_DONE, start_ms=start, step=step, digests=[digest])

    def fetch(request: bytes) -> Iterator[bytes]:
        nonlocal given
        header = pb.StateHeader(
            version=version if gives is None else gives,
            contributors=3,
            group=["x"],
            hash=hashed,
            step=step,
            total_bytes=8 * elements,
        )
        yield pb.FetchReply(header=header).SerializeToString()
        if pb.FetchRequest.FromString(request).versions:
            return
        given += 1
        for message, _ in wire.frame_messages(pb.FetchReply, wire.state_parts(anchor, momentum)):
            yield message

    def once() -> str:
        announce()
        known = target.seen(name)
        expect(known is not None, "nobody has heard of it")
        adopted, why = len(target.adopted()), target.warning_of(name) or "no word of it"
        return f"given {given} times, adopted {adopted} times: {why}"

    with standing(target, name, card, {"Data/Fetch": fetch}) as announce:
        yield once


@contextmanager
def contributions(
    target: Target, raw_of: Callable[["torch.Tensor"], "torch.Tensor"]
) -> Iterator[Callable[[], str]]:
    """By a member that answers and is in no round's group, to each shard of the round to come.

    Args:
        raw_of: the values, given a tensor of their shape; NaN is put in after the encoding."""
    names, name, start_ms = tuple(sorted(target.swarm.names)), target.named("outside"), now_ms()
    plan = target.config.plan
    codec, bounds = codec_by_name(plan.codec), plan.shard_bounds(target.elements, len(names))
    said: list[str] = []

    def card(address: str) -> pb.Member:
        return member_of(name, address, pb.PHASE_DONE, start_ms=start_ms)

    def contribute(round_: int, shard: int) -> str:
        start, stop = bounds[shard]
        values = raw_of(torch.randn(stop - start))
        finite = memoryview(raw := bytearray(wire.encode(codec, torch.nan_to_num(values))))
        if values.isnan().any():
            raw = bytearray(b"\xff" * len(raw))
        payload = wire.Payload.of(memoryview(raw))
        leaves = wire.Leaves.of(stop - start, [codec, codec_by_name(plan.reduction_codec)])
        norms = [1 / len(bounds)] * len(bounds) if plan.compares_norms else []
        header = pb.ContributionHeader(
            run=target.manifest.run,
            fragment=0,
            round=round_,
            shard=shard,
            sender=name,
            group=wire.group_hash(names),
            codec=codec.wire_id,
            elements=stop - start,
            total_bytes=len(raw),
            hash=payload.hash,
            weight=1,
            norm=1.0,
            norms=norms,
            root=wire.Commitment(codec, leaves, finite, 1, norms).root if norms else b"",
        )
        frames = [
            pb.ExchangeUp.FromString(m) for m, *_ in wire.payload_messages(pb.ExchangeUp, payload)
        ]
        messages, at = [pb.ExchangeUp(header=header), *frames], target.swarm.names[0]
        for _ in names:
            with calling(target.swarm.addresses[at], target.identity) as caller:
                answer = _answer(caller.stream("Data/Exchange", messages))
            if not answer.HasField("redirect"):
                break
            at = answer.redirect.peer
        if answer.HasField("header"):
            counted = list(answer.header.contributors)
            expect(name not in counted, f"it counts in round {round_}")
            return f"answered by the mean of {', '.join(counted)}"
        return f"refused: {answer.refusal.reason}"

    def once() -> str:
        announce()
        here = target.seen(target.swarm.names[0])
        round_ = here["versions"][0] if here else 0
        said.extend(threads.map(partial(contribute, round_), range(len(bounds))))
        most = max((event["contributors"] for event in target.told("round")), default=0)
        expect(most <= len(names), f"a round of {most}")
        return f"{len(said)} shards, the last {said[-1]}; rounds of {most} at most"

    with ThreadPoolExecutor(len(bounds)) as threads, standing(target, name, card, {}) as announce:
        yield once


def _answer(replies: Iterator[bytes]) -> pb.ExchangeDown:
    """The last word of the replies: where to go, why not, or whose mean it is."""
    for raw in replies:
        reply = pb.ExchangeDown.FromString(raw)
        if not reply.HasField("resume"):
            return reply
    return pb.ExchangeDown(refusal=pb.Refusal(reason="the stream has ended"))


@contextmanager
def far_ghosts(target: Target) -> Iterator[Callable[[], str]]:
    """Five, of certificates of their own where there are any, that begin again with every call."""
    names = target.names("far", 5)

    def once() -> str:
        far = [pb.FragmentDigest(version=FAR_STEP // 5, contributors=5, hash=7)]
        cards = [
            member_of(name, f"127.0.0.1:{9 + number}", step=FAR_STEP, digests=far)
            for number, name in enumerate(names)
        ]
        refused = target.gossip("x", *map(target.signed, cards)).refused
        expect(not refused, "they are no members:", *refused)
        members = {each["peer"]: each for each in target.status["members"]}
        expect(set(names) <= set(members), "nobody has heard of them")
        furthest = max(members[name]["step"] for name in target.swarm.names)
        expect(furthest < FAR_STEP // 2, f"a worker is at step {furthest}")
        skipped = target.told("skipped")
        expect(not skipped, f"skipped: {skipped}")
        return f"{len(names)} at step {FAR_STEP:,} are heard of, workers are at {furthest:,}"

    yield once


def ghost_elsewhere(target: Target) -> str:
    """A member that says it is where another is."""
    name, other = target.named("ghost"), target.swarm.names[1]
    ghost = member_of(name, target.swarm.addresses[other])
    refused = target.gossip("x", target.signed(ghost)).refused
    expect(not refused, "it is no member:", *refused)
    ghostly, real = target.seen(name), target.seen(other)
    expect(real and real["health"] == "alive", f"{other} is {real}")
    return f"at {other}'s address it is {(ghostly or {}).get('health')}, and {other} is alive"


def forged_result(target: Target) -> str:
    """The end of another's run, and of its microbatches."""
    other = target.swarm.names[1]
    document = pack({"event": "result", "peer": other, "val_loss": 0.0})
    result = pb.ResultRequest(run=target.manifest.run, sender=other, document=document)
    end = pb.FinishedRequest(run=target.manifest.run, origin=other, iteration=1, start_ms=now_ms())
    said = []
    for method, request in (("Control/Result", result), ("Control/Finished", end)):
        try:
            target.stranger.call(method, request, pb.ResultReply)
            said.append("answered")
        except grpc.RpcError as error:
            said.append(refusal_of(error))
    if AT_THE_HANDSHAKE in said:
        return AT_THE_HANDSHAKE
    if target.identity is not None:
        expect(all("does not speak for" in each for each in said), "refused otherwise:", said)
    return "; ".join(said)


def introduce(target: Target, member: pb.Member) -> tuple[pb.IntroduceReply, Event]:
    """Introduces a member to the coordinator: its answer, and its status."""
    assert target.coordinator is not None, "there is none"
    request = pb.IntroduceRequest(member=member, manifest=target.manifest.pack())
    with calling(target.coordinator, target.identity) as caller:
        reply = caller.call("Coordinator/Introduce", request, pb.IntroduceReply)
        raw = caller.call("Control/Status", pb.StatusRequest(), pb.StatusReply)
    return reply, wire.unpack_document(raw.document, 4 << 20)


def at_coordinator(target: Target, **said: Any) -> pb.Member:
    """The attacker, as it introduces itself there."""
    member = {"peer": target.named("x"), "address": "127.0.0.1:9", "start_ms": now_ms(), **said}
    return pb.Member(**member)


def forged_introduction(target: Target) -> str:
    """Another's later life, and a start of one's own that cannot be."""
    other = target.swarm.names[1]
    try:
        introduce(target, at_coordinator(target, peer=other))
        said = "answered"
    except grpc.RpcError as error:
        said = refusal_of(error)
        if said == AT_THE_HANDSHAKE:
            raise
    far, status = introduce(target, at_coordinator(target, start_ms=2**64 - 1))
    expect("cannot be" in far.refusal, "a far start is believed")
    if target.identity is not None:
        expect("is not for this call" in said, "refused otherwise:", said)
        (row,) = [each for each in status["members"] if each["peer"] == other]
        expect(row["health"] == "alive" and row["phase"] == "training", f"{other} is", row)
        return f"{said}; {other} is alive and trains to the coordinator"
    return f"{said}; a far start is refused"


def borrowed_token(target: Target) -> str:
    """A member that is called as a token asks for certificates, as if it were the token."""
    if target.certificates is None or target.coordinator is None:
        return "nobody has certificates"
    held, other = target.certificates.namesake, target.certificates.joiner
    asking = held if target.known is None else target.identity
    asked = pb.EnrolRequest(name="sybil", request=other.request(), certificate=held.der)
    with calling(target.coordinator, asking) as caller:
        said = caller.call("Control/Enrol", asked, pb.EnrolReply).refusal
    expect(said, "it is let in")
    asked.name = "trial:honest"
    with calling(target.coordinator, target.certificates.tokens[0]) as caller:
        left = caller.call("Control/Enrol", asked, pb.EnrolReply).refusal
    expect(not left or "in the last 30 s" in left, "the token is spent:", left)
    return f"refused: {said}; the token lets somebody in as before"


def spoiling_profile(target: Target) -> str:
    """A profile that no worker takes, for the coordinator to hand out."""
    large, _ = introduce(target, at_coordinator(target, profile=b"x" * 20_000))
    expect("no worker would believe it" in large.refusal, "it is taken")
    reply, _ = introduce(target, at_coordinator(target))
    longest = max(len(each.profile) for each in reply.members)
    expect(longest < 20_000, f"a profile of {longest} bytes is handed out")
    names = {each.peer for each in reply.members}
    expect(set(target.swarm.names) <= names, "workers are missing:", names)
    return f"refused: {large.refusal}; its replies have {len(names)} members, all whole"


FOREIGN = ("task.name=torch.hub:load", "inner.optimizer=infected:build", "task.text=/etc/passwd")


def foreign_manifest(setting: str) -> dict[str, Any]:
    config = load_config(None, [*SMALL[1::2], setting])
    return dict(Manifest.of(config, []).plain())


def join_through(
    address: str, out: Path, name: str, identity: Identity | None = None
) -> tuple[int, str]:
    """Somebody joins there: its exit code, and what it says on stderr."""
    if identity is not None:
        identity.save(out)
    with WorkerProcess(["join", address, "--out", str(out)], name) as joiner:
        return joiner.wait(), joiner.errors


@contextmanager
def foreign_manifests(target: Target) -> Iterator[Callable[[], str]]:
    """Names code to load or a file to read, one after another, to somebody that joins."""
    came: list[str] = []
    handed = {setting: handing_out(foreign_manifest(setting)) for setting in FOREIGN}

    def setting() -> str:
        return FOREIGN[len(came) % len(FOREIGN)]

    def once() -> str:
        joiner = target.certificates.joiner if target.certificates else None
        code, said = join_through(address, Path(folder) / f"j{len(came)}", "j", joiner)
        if target.known is not None and "not of this run's authority" in said:
            return AT_THE_HANDSHAKE
        expect(code == 4 and said.count("\n") == 1, f"exit code {code}:", said)
        expect(f"if you trust it, add --set {setting()}" in said, said)
        came.append(setting())
        return f"{len(came)} joiners ended with exit code 4, told to add --set {came[-1]}"

    answer = {"Control/Join": lambda request: handed[setting()](request)}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(answer, identity=target.identity) as address,
    ):
        yield once


ON_ROUNDS: dict[str, Attack] = {
    "a manifest that names code": foreign_manifests,
    "a state of NaN, 1,000 rounds ahead": partial(false_state, value=float("nan")),
    "a state of 3.0, 1,000 rounds ahead": partial(false_state, value=3.0),
    "a state of version 10^19": partial(false_state, value=3.0, gives=10**19),
    "a state of 3.0, 5,000 rounds ahead": partial(false_state, value=3.0, ahead=5000),
    "1e15 from outside the group": partial(
        contributions, raw_of=lambda v: torch.full_like(v, 1e15)
    ),
    "x100, flipped, from outside": partial(contributions, raw_of=lambda v: -100 * v),
    "NaN from outside the group": partial(contributions, raw_of=lambda v: v * torch.nan),
    "five ghosts at step 999,999": far_ghosts,
    "a ghost at another's address": repeated(ghost_elsewhere),
    "another's result and end": repeated(forged_result),
    "another's life, to the coordinator": repeated(forged_introduction),
    "another's token, to the coordinator": repeated(borrowed_token),
    "a profile of 20 kB, to it": repeated(spoiling_profile),
}
