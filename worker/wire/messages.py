"""Messages to and from bytes: those that more than one module reads or makes, checked."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from murmuration.algorithms.counted import MOST_PARTS, RECORDED_ROUNDS, CountedRound, History, Part
from murmuration.algorithms.fragments import Ranges
from murmuration.protos import documents, murmuration_pb2 as pb
from murmuration.protos.addresses import check_address, check_name
from murmuration.worker.leases.ledger import Block, Holding, LeaseNews, OpenedStream
from murmuration.worker.membership import MAX_UNREACHABLE, Digest, Health, Member, Phase
from murmuration.worker.transport import RELAY_METHODS, Method
from murmuration.worker.wire.payloads import Payload
from murmuration.worker.wire.tensors import Again, WireError

T = TypeVar("T", bound=Message)

_MAX_PEERS = 4096


def parse(kind: type[T], raw: bytes) -> T:
    """Raises Again when the bytes are no such message."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise Again(f"not a {kind.__name__}") from error


@dataclass(frozen=True)
class ReductionHeader:
    """The beginning of a reduction."""

    contributors: tuple[str, ...]
    joiners: tuple[str, ...]  # to be in the next group as well; of one shard a round
    codec: int
    total_bytes: int
    hash: int
    last: str  # the peer whose contribution came last
    factors: tuple[float, ...] = ()  # how far each counts, where the norm limit has scaled one
    reducer: str = ""  # that has computed it, which may not be the one that gives it
    roots: tuple[bytes, ...] = ()  # of the contributors, as announced
    weights: tuple[int, ...] = ()  # likewise; none where all are 1
    lefts: tuple[bytes, ...] = ()  # roots of what encodings have left: what it takes up, and leaves

    def root(self, peer: str) -> bytes:
        """The root that a peer has announced; empty where it is none of the contributors."""
        return dict(zip(self.contributors, self.roots, strict=True)).get(peer, b"")

    def factor(self, peer: str) -> float:
        """How far the peer's contribution counts; 0 where it does not."""
        factors = self.factors or (1.0,) * len(self.contributors)
        return dict(zip(self.contributors, factors, strict=True)).get(peer, 0.0)


@dataclass(frozen=True)
class Reduction:
    """The mean of a shard, as the encoded bytes that everyone applies."""

    header: ReductionHeader
    payload: Payload


def unpack_document(raw: bytes, max_bytes: int) -> dict[str, Any]:
    """As `murmuration.protos.documents.unpack`. Raises WireError."""
    try:
        return documents.unpack(raw, max_bytes)
    except documents.BadDocument as error:
        raise WireError(f"a bad document: {error}") from error


def status_reply(document: object) -> bytes:
    return pb.StatusReply(document=documents.pack(document)).SerializeToString()


def reduction_to_message(header: ReductionHeader) -> bytes:
    return pb.ExchangeDown(header=pb.ReductionHeader(**vars(header))).SerializeToString()


_LISTS = ("contributors", "joiners", "factors", "roots", "weights", "lefts")


class FalseHeader(WireError):
    """A reducer says of its mean what none says that lays out the round alike."""


def reduction_from_message(header: pb.ReductionHeader) -> ReductionHeader:
    """Raises FalseHeader: it names more peers than a round has, or one twice."""
    named = (each.name for each in fields(ReductionHeader))
    plain = {name: getattr(header, name) for name in named}
    groups = {name: tuple(plain[name]) for name in _LISTS}
    for peers in (groups["contributors"], groups["joiners"]):
        if len(peers) > _MAX_PEERS or len(set(peers)) < len(peers):
            raise FalseHeader(f"{len(peers)} peers in a reduction, or one twice")
        for name in peers:
            check_name(name, FalseHeader)
    return ReductionHeader(**(plain | groups))


# `run`: another run; `group`, `pruned`: the sender must repair its state first; `invalid`: it does
# not fit; `again`: trying again helps.
_REFUSALS = ("run", "group", "pruned", "invalid", "again")
_REFUSAL_CODES = {kind: pb.RefusalCode.Value(f"REFUSAL_{kind.upper()}") for kind in _REFUSALS}
_REFUSAL_KINDS = {code: kind for kind, code in _REFUSAL_CODES.items()}


def refusal(kind: str, reason: str) -> pb.Refusal:
    return pb.Refusal(code=_REFUSAL_CODES[kind], reason=reason)


def refusal_kind(refused: pb.Refusal) -> str:
    """A code that is not known ends the round, as one that says so."""
    return _REFUSAL_KINDS.get(refused.code, "invalid")


_SAME = {each.name for each in fields(Member)} - {"digests", "signed"}


def member_to_message(member: Member) -> pb.Member:
    digests = [pb.FragmentDigest(**vars(digest)) for digest in member.digests]
    return pb.Member(digests=digests, **{name: getattr(member, name) for name in _SAME})


def signed_member_to_message(member: Member) -> pb.Member:
    """As its peer has signed it, and what this one says of its health."""
    assert member.signed is not None
    health, signed = pb.Health.ValueType(member.health), member.signed
    return pb.Member(health=health, signed=signed.words, signature=signed.signature)


def member_from_message(message: pb.Member) -> Member:
    """Raises WireError when names or enums are out of range."""
    waited_for = [message.waited_for] if message.waited_for else []
    for name in (message.peer, message.address, *waited_for, *message.unreachable, *message.idle):
        check_name(name, WireError)
    if len(message.profile) > documents.PROFILE_BYTES:
        raise WireError(f"peer {message.peer}: a profile of {len(message.profile)} bytes")
    for named, what in ((message.unreachable, "out of its reach"), (message.idle, "idle")):
        if len(named) > MAX_UNREACHABLE:
            raise WireError(f"peer {message.peer}: {len(named)} peers {what}")
        if len({*named}) != len(named) or message.peer in message.unreachable:
            raise WireError(f"peer {message.peer}: itself or a peer twice is {what}")
    try:
        check_address(message.address, message.peer)
        health, phase = Health(message.health), Phase(message.phase)
    except ValueError as error:
        raise WireError(f"peer {message.peer}: {error}") from error
    plain = {name: getattr(message, name) for name in _SAME}
    plain |= {"health": health, "phase": phase}
    plain |= {name: tuple(plain[name]) for name in ("unreachable", "idle")}
    if not (math.isfinite(message.step_s) and message.step_s > 0):
        plain["step_s"] = 0.0  # it is no duration
    digests = tuple(Digest(d.version, d.contributors, d.hash) for d in message.digests)
    return Member(digests=digests, **plain)


def counted_members(messages: Sequence[pb.Member]) -> Sequence[pb.Member]:
    """Raises WireError: more than a message may hold."""
    if len(messages) > _MAX_PEERS:
        raise WireError(f"{len(messages)} peers in one message; at most {_MAX_PEERS}")
    return messages


def _joining(raw: bytes) -> str | None:
    join = parse(pb.JoinRequest, raw)
    # Asked to dial another back, or what the run is: it says nothing of itself.
    return None if join.dial_only or not join.manifest else join.member.peer


def _leasing(raw: bytes) -> str | None:
    """An announcement is of its sender's own blocks; in answers alone there are others' too."""
    holdings = parse(pb.LeaseNews, raw).holdings
    if len(holdings) != 1:
        raise WireError(f"{len(holdings)} peers' blocks announced; each peer announces its own")
    return holdings[0].peer


def _exchanging(raw: bytes) -> str:
    up = parse(pb.ExchangeUp, raw)
    return up.check.sender if up.HasField("check") else up.header.sender


# By method, of a call or of the first message of a stream; the others speak for nobody.
_SENDERS: Mapping[str, Callable[[bytes], str | None]] = {
    Method.JOIN: _joining,
    Method.GOSSIP: lambda raw: parse(pb.GossipMessage, raw).sender,
    Method.LEASE: _leasing,
    Method.RESULT: lambda raw: parse(pb.ResultRequest, raw).sender,
    Method.FINISHED: lambda raw: parse(pb.FinishedRequest, raw).origin,
    Method.EXCHANGE: _exchanging,
    Method.AVERAGE: _exchanging,
    Method.PAIR_ROUND: lambda raw: parse(pb.PairMessage, raw).header.sender,
    Method.STAGE_CALL: lambda raw: parse(pb.StageCallUp, raw).header.sender,
    **dict.fromkeys(RELAY_METHODS, lambda raw: parse(pb.RelayMessage, raw).header.sender),
}


def claimed_sender(method: str, raw: bytes) -> str | None:
    """The peer that the message says it is from; None where it does not say. Raises WireError."""
    read = _SENDERS.get(method)
    return None if read is None else read(raw)


def history_to_message(history: History) -> pb.History:
    """Each name stands in it once."""
    names = sorted({peer for each in history for *_, peers in each.parts for peer in peers})
    places, message = {name: place for place, name in enumerate(names)}, pb.History(peers=names)
    for each in history:
        parts = message.rounds.add(round=each.round).parts
        for start, stop, peers in each.parts:
            parts.add(start=start, stop=stop, contributors=[places[peer] for peer in peers])
    return message


def history_from_message(message: pb.History, elements: int, most_peers: int) -> History:
    """Raises WireError: it fits no fragment of so many values, or is longer than any is, or names
    more than `most_peers`."""
    if len(message.peers) > most_peers or len(message.rounds) > RECORDED_ROUNDS:
        raise WireError(f"a history of {len(message.peers)} peers, {len(message.rounds)} rounds")
    names = tuple(message.peers)
    for name in names:
        check_name(name, WireError)
    history = []
    for each in message.rounds:
        parts: list[Part] = []
        if len(each.parts) > MOST_PARTS:
            raise WireError(f"a history of {len(each.parts)} ranges in round {each.round}")
        for part in each.parts:
            at, places = parts[-1][1] if parts else 0, part.contributors
            if not at <= part.start < part.stop <= elements:
                raise WireError(f"a history of values {part.start} to {part.stop} of {elements}")
            if len(places) > len(names) or max(places, default=0) >= len(names):
                raise WireError(f"a history of more than its {len(names)} peers")
            parts.append((part.start, part.stop, tuple(names[place] for place in places)))
        history.append(CountedRound(each.round, tuple(parts)))
    return tuple(history)


_MOST_HOLDINGS = 4096
_MOST_BLOCKS = 1024  # of one peer
_MOST_STREAMS = 1024
_MOST_OPENED = 64  # streams that one peer has drawn from
_MOST_RANGES = 1 << 14
_LAST_BLOCK = 1 << 63


def lease_news_to_message(news: LeaseNews, run: int) -> pb.LeaseNews:
    ledgers = {stream: pb.StreamLedger(stream=stream) for stream in news.done}
    for stream, ranges in news.done.items():
        numbers = (0, *itertools.chain.from_iterable(ranges))
        ledgers[stream].done.extend(b - a for a, b in itertools.pairwise(numbers))
    for block, used in news.cursors.items():
        ledger = ledgers.setdefault(block.stream, pb.StreamLedger(stream=block.stream))
        ledger.cursors.append(pb.BlockCursor(number=block.number, used=used))
    message = pb.LeaseNews(run=run, ledgers=ledgers.values())
    for each in news.holdings:
        said = message.holdings.add(peer=each.peer, start_ms=each.start_ms, sequence=each.sequence)
        for blocks, told in ((each.held, said.held), (each.asked, said.asked)):
            told.extend(pb.SampleBlock(stream=stream, number=number) for stream, number in blocks)
        said.streams.extend(pb.OpenedStream(**stream._asdict()) for stream in each.streams)
    return message


def lease_news_from_message(message: pb.LeaseNews, run: int) -> LeaseNews:
    """Raises WireError: of another run, nobody's, or more than a swarm can have."""
    if message.run != run:
        raise WireError("another run's blocks")
    if not 0 < len(message.holdings) <= _MOST_HOLDINGS:
        raise WireError(f"{len(message.holdings)} holdings of blocks in one message")
    if len(message.ledgers) > _MOST_STREAMS:
        raise WireError(f"{len(message.ledgers)} streams of samples; at most {_MOST_STREAMS}")
    done: dict[int, Ranges] = {}
    cursors: dict[Block, int] = {}
    for ledger in message.ledgers:
        most = max(len(ledger.done), len(ledger.cursors))
        numbers = list(itertools.accumulate(ledger.done)) if most <= _MOST_RANGES else [0]
        rising = all(a < b for a, b in itertools.pairwise(numbers))
        if len(numbers) % 2 or not rising or max(numbers, default=0) > _LAST_BLOCK:
            raise WireError("what is used of a stream is no list of ranges")
        done[ledger.stream] = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        cursors |= {Block(ledger.stream, each.number): each.used for each in ledger.cursors}
    return LeaseNews(tuple(map(_holding, message.holdings)), done, cursors)


def _holding(message: pb.BlockHolding) -> Holding:
    check_name(message.peer, WireError)
    held, asked = _blocks(message.held), _blocks(message.asked)
    if len(message.streams) > _MOST_OPENED:
        raise WireError(f"{len(message.streams)} streams of one peer; at most {_MOST_OPENED}")
    streams = tuple(OpenedStream(each.id, each.name, each.length) for each in message.streams)
    return Holding(message.peer, message.start_ms, message.sequence, held, asked, streams)


def _blocks(messages: Sequence[pb.SampleBlock]) -> tuple[Block, ...]:
    if len(messages) > _MOST_BLOCKS:
        raise WireError(f"{len(messages)} blocks of one peer; at most {_MOST_BLOCKS}")
    return tuple(Block(each.stream, each.number) for each in messages)
