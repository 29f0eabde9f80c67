"""Messages of the exchange; garbage and pickles are refused whatever they were to be."""

import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protos import murmuration_pb2 as pb
from worker import wire
from worker.exchange.types import ShardKey
from worker.manifest import Manifest
from worker.wire import WireError, hash64, pack_document, parse

KINDS = [
    pb.Member, pb.JoinRequest, pb.JoinReply, pb.GossipMessage, pb.ProbeRequest, pb.ProbeReply,
    pb.StatusReply, pb.Frame, pb.ExchangeUp, pb.ExchangeDown, pb.FetchRequest, pb.FetchReply,
    pb.IntroduceRequest, pb.IntroduceReply,
]  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@given(st.binary(max_size=200))
def test_garbage_is_a_message_or_a_wire_error_and_so_is_its_card(raw: bytes) -> None:
    for kind in KINDS:
        with suppress(WireError):
            message = parse(kind, raw)
            if isinstance(message, pb.Member):
                wire.member_from_message(message)


@every_kind
def test_what_is_no_message_is_refused_by_name(kind: type) -> None:
    with pytest.raises(WireError, match=f"^not a {kind.__name__}$"):
        parse(kind, b"\x0f\xff\xff")


def test_a_shard_key_comes_from_the_header() -> None:
    header = pb.ContributionHeader(fragment=3, round=2**40, shard=7)
    assert wire.key_of(header) == ShardKey(3, 2**40, 7)


def test_a_refusal_says_why() -> None:
    raw = wire.refusal(wire.REFUSAL_CODES["pruned"], "closed long ago")
    down = parse(pb.ExchangeDown, raw)
    assert (down.refusal.code, down.refusal.reason) == (pb.REFUSAL_PRUNED, "closed long ago")
    assert wire.REFUSAL_CODES["group"] == pb.REFUSAL_GROUP


def test_a_reduction_is_announced_by_its_size_and_hash() -> None:
    payload = wire.Payload.of(memoryview(b"mean"))
    reduction = wire.Reduction(("a", "b"), ("a", "b", "c"), payload, last="b")
    header = parse(pb.ExchangeDown, wire.reduction_header(reduction, codec=2)).header
    assert (reduction.contributors, reduction.next_group) == (
        tuple(header.contributors),
        tuple(header.next_group),
    )
    assert (header.codec, header.total_bytes, header.hash) == (2, 4, hash64(b"mean"))
    assert header.last == "b"


class Malicious:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_executed(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "executed"
    raw = pickle.dumps(Malicious(trap), protocol=protocol)
    for kind in KINDS:
        with pytest.raises(WireError, match=f"^not a {kind.__name__}$"):
            parse(kind, raw)
    for document in (raw, zstandard.compress(raw), pack_document(raw)):
        with pytest.raises(WireError):
            Manifest.unpack(document)
    assert not trap.exists()
