"""Cards and documents: round trips, and refusals of whatever does not fit."""

import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from algorithms.codecs import codec_by_name
from protos import murmuration_pb2 as pb
from worker import wire
from worker.manifest import Manifest
from worker.membership import Card, Digest, Health, Phase
from worker.rounds import ShardKey
from worker.wire import WireError, pack_document, parse, unpack_document

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
NAMES = st.text(min_size=1, max_size=64).filter(str.isprintable)
CARDS = st.builds(
    Card,
    peer=NAMES,
    address=NAMES,
    epoch=U64,
    incarnation=U32,
    health=st.sampled_from(Health),
    phase=st.sampled_from(Phase),
    heartbeat=U64,
    step=U64,
    digests=st.lists(st.builds(Digest, U64, U32, U64), max_size=4).map(tuple),
)
KINDS = [
    pb.PeerCard, pb.JoinRequest, pb.JoinReply, pb.GossipMessage, pb.ProbeRequest, pb.ProbeReply,
    pb.StatusReply, pb.Frame, pb.ExchangeUp, pb.ExchangeDown, pb.FetchRequest, pb.FetchReply,
    pb.IntroduceRequest, pb.IntroduceReply,
]  # fmt: skip
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def compress(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


# -------------------------------------------------------------------------------------- cards


@given(CARDS)
def test_a_card_survives_the_wire(card: Card) -> None:
    raw = wire.card_to_message(card).SerializeToString()
    assert wire.card_from_message(parse(pb.PeerCard, raw)) == card


@given(st.lists(CARDS, max_size=5))
def test_a_member_list_survives_the_wire(cards: list[Card]) -> None:
    raw = pb.GossipMessage(members=[wire.card_to_message(card) for card in cards])
    gossip = parse(pb.GossipMessage, raw.SerializeToString())
    assert wire.cards_from_messages(gossip.members) == tuple(cards)


def test_ours_and_the_wires_enums_name_the_same_things() -> None:
    assert {f"HEALTH_{h.name}": int(h) for h in Health} == dict(pb.Health.items())
    assert {f"PHASE_{p.name}": int(p) for p in Phase} == dict(pb.Phase.items())


@pytest.mark.parametrize("name", ["", "x" * 257, "\N{BIRD}" * 65])
def test_names_are_of_1_to_256_bytes(name: str) -> None:
    for card in (pb.PeerCard(peer=name, address="a"), pb.PeerCard(peer="a", address=name)):
        with pytest.raises(WireError, match=f"a name or address of {len(name)} characters"):
            wire.card_from_message(card)
    longest = "\N{BIRD}" * 64
    assert wire.card_from_message(pb.PeerCard(peer=longest, address="a")).peer == longest


@pytest.mark.parametrize("field", ["health", "phase"])
@pytest.mark.parametrize("value", [4, 99, -1])
def test_an_unknown_enum_is_refused(field: str, value: int) -> None:
    with pytest.raises(WireError, match=f"^peer w3: {value} is not a valid"):
        wire.card_from_message(pb.PeerCard(peer="w3", address="a", **{field: value}))


def test_a_member_list_is_bounded() -> None:
    members = [pb.PeerCard(peer="a", address="b")] * 4097
    assert len(wire.cards_from_messages(members[:4096])) == 4096
    with pytest.raises(WireError, match="4097 peers in one message; at most 4096"):
        wire.cards_from_messages(members)


@given(st.binary(max_size=200))
def test_garbage_is_a_message_or_a_wire_error_and_so_is_its_card(raw: bytes) -> None:
    for kind in KINDS:
        with suppress(WireError):
            message = parse(kind, raw)
            if isinstance(message, pb.PeerCard):
                wire.card_from_message(message)


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


# ---------------------------------------------------------------------------------- documents


@given(DOCUMENTS)
def test_a_document_survives_the_wire(document: object) -> None:
    assert unpack_document(pack_document(document)) == document


@given(st.binary(max_size=100))
def test_garbage_is_no_document(raw: bytes) -> None:
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(raw)


@given(st.binary(max_size=100))
def test_compressed_garbage_is_a_document_or_a_wire_error(plain: bytes) -> None:
    with suppress(WireError):
        unpack_document(compress(plain))


def test_a_document_cut_short_anywhere_is_refused() -> None:
    raw = pack_document({"name": "murmuration", "steps": list(range(300))})
    for length in range(len(raw)):
        with pytest.raises(WireError):
            unpack_document(raw[:length])


@pytest.mark.parametrize("plain_bytes", [9 << 20, 256 << 20], ids=["9 MiB", "256 MiB"])
def test_a_bomb_is_refused_in_bounded_memory(plain_bytes: int) -> None:
    bomb = compress(bytes(plain_bytes))
    assert len(bomb) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="more than 1048576 bytes"):
            unpack_document(bomb)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_small_document_cannot_become_a_heap_of_objects() -> None:
    """Two million empty lists: 2 MB of msgpack, 200 bytes compressed, over 130 MB as objects."""
    count = 2 << 20
    raw = compress(b"\xdd" + struct.pack(">I", count) + b"\x90" * count)
    with pytest.raises(WireError):
        unpack_document(raw)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"k": inner}])
def test_nesting_is_bounded(wrap: Callable[[object], object]) -> None:
    def nested(depth: int) -> bytes:
        document: object = 1
        for _ in range(depth):
            document = wrap(document)
        return pack_document(document)

    unpack_document(nested(15))
    for depth in (16, 100, 600):
        with pytest.raises(WireError, match="a document nested deeper than 16"):
            unpack_document(nested(depth))


def test_the_length_of_lists_and_maps_is_bounded() -> None:
    longest = 16 * 1024
    for document in ([0] * longest, {str(i): i for i in range(longest)}):
        assert unpack_document(pack_document(document)) == document
    for document in ([0] * (longest + 1), {str(i): i for i in range(longest + 1)}):
        with pytest.raises(WireError, match="a damaged document"):
            unpack_document(pack_document(document))


def test_keys_are_text() -> None:
    with pytest.raises(WireError, match="a document with the key b'x'"):
        unpack_document(pack_document([{"ok": {b"x": 1}}]))


@pytest.mark.parametrize("claimed_bytes", [1, 1 << 40])
def test_the_size_in_the_header_is_not_trusted(claimed_bytes: int) -> None:
    """A zstd frame whose header says 1 byte or 1 TiB, around a raw block of three."""
    last_raw_block = (1 | 3 << 3).to_bytes(3, "little") + b"\x92\x01\x02"
    forged = b"\x28\xb5\x2f\xfd\xc0\x50" + struct.pack("<Q", claimed_bytes) + last_raw_block
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(forged)


def test_a_window_over_the_limit_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=24, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    raw = compressor.compress(msgpack.packb("x")) + compressor.flush()
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(raw)


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xa2\xff\xff",
        b"\x81\x01\x02",
        b"\x01\x02",
    ],
    ids=[
        "empty", "no such type", "deep", "long array", "long map", "no utf-8", "a number as key",
        "two documents",
    ],
)  # fmt: skip
def test_hostile_msgpack_is_refused(plain: bytes) -> None:
    with pytest.raises(WireError, match="a damaged document"):
        unpack_document(compress(plain))


# ------------------------------------------------------------------------------------- pickles


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
    for document in (raw, compress(raw), pack_document(raw)):
        with pytest.raises(WireError):
            Manifest.unpack(document)
    assert not trap.exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_reduction_that_is_not_finite_or_absurd_is_refused(bad: float) -> None:
    """Whatever the codec: here a reducer that lies in fp32."""
    values = torch.ones(1000)
    values[777] = bad
    with pytest.raises(WireError, match="NaN, Inf or absurdly large"):
        wire.decode(codec_by_name("fp32"), wire.tensor_bytes(values), 1000)


def test_a_contribution_beyond_what_the_reduction_can_hold_is_refused() -> None:
    payload = wire.tensor_bytes(torch.full((10,), 70_000.0))
    fp32, fp16 = codec_by_name("fp32"), codec_by_name("fp16")
    wire.check_values(fp32, payload, 10, fp32.limit)
    with pytest.raises(WireError, match="absurdly large"):
        wire.check_values(fp32, payload, 10, fp16.limit)
